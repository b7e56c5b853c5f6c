"""Batches: the same for any number of workers, ranks and micro batches; nothing lost, nothing counted twice."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler

from training_xpu.workloads.config import PreparedData
from training_xpu.workloads.data.batches import (
    IGNORED,
    Batch,
    TrainingBatches,
    evaluation_batches,
    ordered_dataset,
    training_batches,
)
from training_xpu.workloads.data.sequences import GlobalOrder, Sequences, pieces

LENGTH = 8
PAD = 0
TRAIN_SIZES = [3, 1, 20, 8, 2, 5, 17, 9, 4, 40, 6]
EVAL_SIZES = [10, 3, 25, 8, 7, 9]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> PreparedData:
    """Tokens that are all different, so that a sequence tells where it comes from."""
    folder = tmp_path_factory.mktemp("tokens")
    for side, sizes, first in (("train", TRAIN_SIZES, 1), ("eval", EVAL_SIZES, 1001)):
        np.save(folder / f"{side}-tokens.npy", np.arange(first, first + sum(sizes), dtype=np.uint16))
        np.save(folder / f"{side}-offsets.npy", np.cumsum([0, *sizes]).astype(np.int64))
    return PreparedData(
        source="test",
        train_tokens=folder / "train-tokens.npy",
        train_offsets=folder / "train-offsets.npy",
        eval_tokens=folder / "eval-tokens.npy",
        eval_offsets=folder / "eval-offsets.npy",
        tokenizer=folder,
        vocabulary_size=2000,
        eos_token_id=1999,
        pad_token_id=PAD,
        train_token_count=sum(TRAIN_SIZES),
        eval_token_count=sum(EVAL_SIZES),
        document_count=len(TRAIN_SIZES) + len(EVAL_SIZES),
        digest="",
    )


def batches(
    data: PreparedData,
    rank: int = 0,
    world_size: int = 1,
    micro_batch: int = 4,
    gradient_accumulation: int = 1,
    packing: bool = True,
    seed: int = 7,
    workers: int = 0,
    start_step: int = 0,
) -> TrainingBatches:
    return training_batches(
        data,
        rank=rank,
        world_size=world_size,
        micro_batch=micro_batch,
        gradient_accumulation=gradient_accumulation,
        sequence_length=LENGTH,
        packing=packing,
        seed=seed,
        workers=workers,
        start_step=start_step,
    )


def rows(steps: list[list[Batch]]) -> list[list[list[int]]]:
    """Per step, the sequences of all its micro batches."""
    return [[row for batch in step for row in batch.input_ids.tolist()] for step in steps]


def test_packed_epoch_is_the_stream_cut_into_sequences(data: PreparedData) -> None:
    stream = np.load(data.train_tokens).tolist()
    count = len(stream) // LENGTH
    epoch = rows(list(islice(batches(data, micro_batch=1), count)))
    back = sorted(step[0] for step in epoch)
    assert [token for row in back for token in row] == stream[: count * LENGTH]
    next_epoch = rows(list(islice(batches(data, micro_batch=1), count, 2 * count)))
    assert sorted(next_epoch) == sorted(epoch)
    assert next_epoch != epoch


def test_packed_batch_counts_every_position(data: PreparedData) -> None:
    batch = next(batches(data, micro_batch=3))[0]
    assert batch.input_ids.shape == (3, LENGTH)
    assert batch.input_ids.dtype == torch.int64
    assert torch.equal(batch.labels, batch.input_ids)
    assert batch.attention_mask is None
    assert (batch.real_tokens, batch.padded_tokens, batch.loss_tokens) == (24, 0, 21)
    assert batch.lengths == (8, 8, 8)
    assert set(batch.inputs()) == {"input_ids", "labels"}


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("workers", [1, 2])
def test_workers_change_nothing(data: PreparedData, workers: int, packing: bool) -> None:
    torch.manual_seed(3)
    alone = batches(data, gradient_accumulation=2, packing=packing)
    expected, drawn = rows(list(islice(alone, 12))), torch.rand(1)
    torch.manual_seed(3)
    read_ahead = batches(data, gradient_accumulation=2, packing=packing, workers=workers)
    assert rows(list(islice(read_ahead, 12))) == expected
    assert torch.equal(torch.rand(1), drawn)
    read_ahead.close()


@pytest.mark.parametrize(("world_size", "micro_batch", "accumulation"), [(2, 2, 1), (1, 2, 2), (4, 1, 1), (2, 1, 2)])
def test_global_batch_is_the_same_however_it_is_shared(
    data: PreparedData, world_size: int, micro_batch: int, accumulation: int
) -> None:
    expected = rows(list(islice(batches(data, micro_batch=4), 9)))
    ranks = [
        rows(list(islice(batches(data, rank, world_size, micro_batch, accumulation), 9))) for rank in range(world_size)
    ]
    for step, wanted in enumerate(expected):
        assert sorted(row for rank in ranks for row in rank[step]) == sorted(wanted)


@pytest.mark.parametrize("workers", [0, 2])
def test_resumed_run_sees_what_an_uninterrupted_one_would(data: PreparedData, workers: int) -> None:
    whole = rows(list(islice(batches(data, rank=1, world_size=2, micro_batch=1, gradient_accumulation=3), 12)))
    resumed = batches(data, rank=1, world_size=2, micro_batch=1, gradient_accumulation=3, start_step=5, workers=workers)
    assert rows(list(islice(resumed, 7))) == whole[5:]
    resumed.close()


def test_seeds_differ(data: PreparedData) -> None:
    assert rows([next(batches(data, seed=1))]) != rows([next(batches(data, seed=2))])


def test_without_packing_each_document_is_padded_by_itself(data: PreparedData) -> None:
    documents, at = [], 1
    for size in TRAIN_SIZES:
        documents.append(list(range(at, at + size)))
        at += size
    expected = [
        document[i : i + LENGTH]
        for document in documents
        for i in range(0, len(document), LENGTH)
        if len(document[i : i + LENGTH]) > 1
    ]
    steps = list(islice(batches(data, micro_batch=1, packing=False), len(expected)))
    found = []
    for (batch,) in steps:
        assert batch.attention_mask is not None
        length = batch.lengths[0]
        real = batch.input_ids[0, :length].tolist()
        found.append(real)
        assert batch.input_ids.shape == (1, LENGTH)
        assert batch.input_ids[0, length:].tolist() == [PAD] * (LENGTH - length)
        assert batch.labels[0].tolist() == real + [IGNORED] * (LENGTH - length)
        assert batch.attention_mask[0].tolist() == [1] * length + [0] * (LENGTH - length)
        assert (batch.real_tokens, batch.padded_tokens, batch.loss_tokens) == (length, LENGTH - length, length - 1)
    assert sorted(found) == sorted(expected)


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize(("world_size", "micro_batch"), [(1, 4), (2, 2), (3, 2), (2, 8)])
def test_evaluation_is_the_same_text_for_any_world(
    data: PreparedData, world_size: int, micro_batch: int, packing: bool
) -> None:
    def share(rank: int, world_size: int, micro_batch: int) -> list[Batch]:
        return evaluation_batches(
            data,
            rank=rank,
            world_size=world_size,
            micro_batch=micro_batch,
            sequence_length=LENGTH,
            packing=packing,
            count=5,
        )

    def kept(batch_list: list[Batch]) -> list[list[int]]:
        return [
            row[:length]
            for batch in batch_list
            for row, length in zip(batch.input_ids.tolist(), batch.lengths, strict=True)
            if length
        ]

    ranks = [share(rank, world_size, micro_batch) for rank in range(world_size)]
    assert len({len(rank) for rank in ranks}) == 1
    assert all(batch.input_ids.shape == (micro_batch, LENGTH) for rank in ranks for batch in rank)
    together = sorted(row for rank in ranks for row in kept(rank))
    assert together == sorted(kept(share(0, 1, 1)))
    assert len(together) == 5
    assert all(token > 1000 for row in together for token in row)
    for batch in (batch for rank in ranks for batch in rank):
        labels = (batch.labels[:, 1:] != IGNORED).sum().item()
        assert labels == batch.loss_tokens
        for row, length in enumerate(batch.lengths):
            if length == 0:
                assert (batch.labels[row] == IGNORED).all()
                assert batch.attention_mask is None or batch.attention_mask[row].all()


def test_evaluation_takes_what_there_is(data: PreparedData) -> None:
    found = evaluation_batches(data, rank=0, world_size=1, micro_batch=4, sequence_length=LENGTH, count=1000)
    assert sum(batch.real_tokens for batch in found) == sum(EVAL_SIZES) // LENGTH * LENGTH
    assert evaluation_batches(data, rank=0, world_size=2, micro_batch=4, sequence_length=LENGTH, count=0) == []


@pytest.mark.parametrize("packing", [True, False])
def test_ordered_dataset_gives_accelerate_the_same_global_batches(data: PreparedData, packing: bool) -> None:
    from accelerate.data_loader import prepare_data_loader

    world_size, micro_batch, accumulation, steps = 2, 2, 2, 7
    dataset = ordered_dataset(
        data,
        sequence_length=LENGTH,
        packing=packing,
        seed=7,
        length=steps * world_size * micro_batch * accumulation,
    )
    for rank in range(world_size):
        sampler = BatchSampler(SequentialSampler(dataset), micro_batch, drop_last=False)
        loader = prepare_data_loader(
            DataLoader(dataset, batch_sampler=sampler),
            num_processes=world_size,
            process_index=rank,
            split_batches=False,
            dispatch_batches=False,
        )
        # Iterated without its wrapper, which would call collectives.
        given = [Batch.from_inputs(inputs) for inputs in DataLoader(dataset, batch_sampler=loader.batch_sampler)]
        expected = [
            batch
            for step in islice(batches(data, rank, world_size, micro_batch, accumulation, packing), steps)
            for batch in step
        ]
        assert [b.input_ids.tolist() for b in given] == [b.input_ids.tolist() for b in expected]
        assert [b.labels.tolist() for b in given] == [b.labels.tolist() for b in expected]
        assert [b.lengths for b in given] == [b.lengths for b in expected]
        assert [b.loss_tokens for b in given] == [b.loss_tokens for b in expected]


@given(st.lists(st.integers(0, 30), max_size=20), st.integers(2, 9))
def test_pieces_cover_every_document_in_order(sizes: list[int], length: int) -> None:
    offsets = np.cumsum([0, *sizes]).astype(np.int64)
    starts, lengths = pieces(offsets, length)
    expected = [
        (int(offset) + at, min(length, size - at))
        for offset, size in zip(offsets, sizes, strict=False)
        for at in range(0, size, length)
        if min(length, size - at) > 1
    ]
    assert list(zip(starts.tolist(), lengths.tolist(), strict=True)) == expected


@given(st.integers(1, 50), st.integers(0, 1 << 40), st.integers(0, 5))
def test_order_visits_every_sequence_once_per_epoch(count: int, seed: int, epoch: int) -> None:
    order = GlobalOrder(count, seed)
    places = [order[epoch * count + i] for i in range(count)]
    assert sorted(places) == list(range(count))
    assert [GlobalOrder(count, seed)[epoch * count + i] for i in range(count)] == places


def test_sequences_are_views_of_the_file(data: PreparedData) -> None:
    row = Sequences(Path(data.train_tokens), Path(data.train_offsets), LENGTH, True)[1]
    assert isinstance(row, np.memmap)
    assert row.tolist() == list(range(9, 17))
