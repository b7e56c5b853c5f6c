"""The batches of a rank: the same global batches for a seed, however many ranks, micro batches or loader workers.

Sequences are numbered along one endless global order, epoch after epoch, each epoch shuffled anew by the seed. Step k
takes the next `world_size * gradient_accumulation * micro_batch` of them; within a step, micro batch a of rank r is the
block number `a * world_size + r`. That is also how accelerate shards a sequential sampler (`split_batches=False`:
rank r takes every world_size-th batch), which is what makes `ordered_dataset` give the HF Trainer the same batches.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import os
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from training_xpu.workloads.config import PreparedData
from training_xpu.workloads.data.sequences import GlobalOrder, Sequences

IGNORED = -100  # the label that cross entropy passes over

_Raw = tuple[npt.NDArray[Any], tuple[int, ...]]  # token ids (micro batch, sequence length), real lengths


@dataclass(frozen=True, slots=True)
class Batch:
    """One micro batch; every batch of a job has the same shape, so that compiled graphs and memory stay the same.

    With packing, attention crosses document boundaries inside a sequence, as is usual in pretraining: EOS tells the
    model where a document ends. Labels equal the inputs; HF models shift them, so the first position has no loss.
    """

    input_ids: torch.Tensor  # int64 (micro batch, sequence length)
    labels: torch.Tensor  # as input_ids, IGNORED at padding
    attention_mask: torch.Tensor | None  # int64, 1 at real tokens; None with packing, where all are real
    lengths: tuple[int, ...]  # real tokens of each sequence; 0: a sequence that only fills the batch

    @property
    def real_tokens(self) -> int:
        return sum(self.lengths)

    @property
    def padded_tokens(self) -> int:
        return self.input_ids.numel() - self.real_tokens

    @property
    def loss_tokens(self) -> int:
        """Positions whose next token is a label."""
        return sum(max(0, length - 1) for length in self.lengths)

    def inputs(self) -> dict[str, torch.Tensor]:
        """The keyword arguments of a HF causal language model."""
        tensors = {"input_ids": self.input_ids, "labels": self.labels}
        return tensors if self.attention_mask is None else {**tensors, "attention_mask": self.attention_mask}

    def to(self, device: torch.device | str) -> Batch:
        mask = None if self.attention_mask is None else self.attention_mask.to(device)
        return Batch(self.input_ids.to(device), self.labels.to(device), mask, self.lengths)

    @classmethod
    def from_inputs(cls, inputs: Mapping[str, torch.Tensor]) -> Self:
        """The batch behind the inputs a HF Trainer hands to its model, to count its tokens.

        The inputs must come from `ordered_dataset`: padding, if any, on the right and without labels.
        """
        lengths = tuple(int(n) for n in (inputs["labels"] != IGNORED).sum(dim=1).tolist())
        return cls(inputs["input_ids"], inputs["labels"], inputs.get("attention_mask"), lengths)


class TrainingBatches(Iterator[list[Batch]]):
    """An endless iterator over the steps of one rank; each item has `gradient_accumulation` micro batches."""

    def __init__(
        self,
        data: PreparedData,
        *,
        rank: int,
        world_size: int,
        micro_batch: int,
        gradient_accumulation: int,
        sequence_length: int,
        packing: bool = True,
        seed: int = 0,
        workers: int = 0,
        start_step: int = 0,
    ) -> None:
        sequences = Sequences(data.train_tokens, data.train_offsets, sequence_length, packing)
        order = GlobalOrder(len(sequences), seed)
        self._assemble = _Assembler(sequence_length, data.pad_token_id, packing)
        self._accumulation = gradient_accumulation
        self._loader: DataLoader[_Raw] = DataLoader(
            _MicroBatches(sequences, order, rank, world_size, micro_batch, data.pad_token_id),
            batch_size=None,
            sampler=_CountFrom(start_step * gradient_accumulation),
            num_workers=workers,
            collate_fn=_as_it_is,
            worker_init_fn=functools.partial(_start_worker, os.getpid()) if workers else None,
            # Forked workers start at once and share the token files' pages. That is safe beside OpenMP and Gloo
            # threads since a worker only slices arrays: it runs no parallel region and no collective.
            multiprocessing_context="fork" if workers else None,
            # A generator of its own: the global one, which dropout uses, is the same for any number of workers.
            generator=torch.Generator().manual_seed(seed),
        )
        self._batches: Iterator[_Raw] = iter(self._loader)  # workers start now, not within the first measured step

    def __next__(self) -> list[Batch]:
        return [self._assemble(*next(self._batches)) for _ in range(self._accumulation)]

    def close(self) -> None:
        """Ends the loader's workers; they also end when this object is collected, and when the rank dies."""
        self._batches = iter(())


def training_batches(
    data: PreparedData,
    *,
    rank: int,
    world_size: int,
    micro_batch: int,
    gradient_accumulation: int,
    sequence_length: int,
    packing: bool = True,
    seed: int = 0,
    workers: int = 0,
    start_step: int = 0,
) -> TrainingBatches:
    """This rank's micro batches, step by step, without end.

    Args:
        data: from `prepare`.
        rank: this process's place in the data-parallel world.
        world_size: data-parallel ranks.
        micro_batch: sequences per rank and forward.
        gradient_accumulation: micro batches per step.
        sequence_length: tokens per sequence.
        packing: True: the token stream cut into full sequences. False: one document or piece of one per sequence,
            padded on the right to sequence_length.
        seed: of the order.
        workers: processes that read ahead; 0 reads in this process, which is as good for tokens in memory.
        start_step: steps already done; the first item is what an uninterrupted run would have seen next.
    """
    return TrainingBatches(
        data,
        rank=rank,
        world_size=world_size,
        micro_batch=micro_batch,
        gradient_accumulation=gradient_accumulation,
        sequence_length=sequence_length,
        packing=packing,
        seed=seed,
        workers=workers,
        start_step=start_step,
    )


def evaluation_batches(
    data: PreparedData,
    *,
    rank: int,
    world_size: int,
    micro_batch: int,
    sequence_length: int,
    packing: bool = True,
    count: int,
) -> list[Batch]:
    """This rank's share of `count` fixed held-out sequences (all of them, if there are fewer).

    They are spread evenly over the held-out text and are the same for any world size. Every rank gets equally many
    batches of equal shape, as ZeRO-3 needs; what is missing to that is filled with sequences whose labels are all
    ignored. Average by `loss_tokens`, and pass over a batch that has none: its mean loss is 0/0.
    """
    sequences = Sequences(data.eval_tokens, data.eval_offsets, sequence_length, packing)
    count = min(count, len(sequences))
    chosen = [i * len(sequences) // count for i in range(count)]
    blocks = -(-count // micro_batch)
    assemble = _Assembler(sequence_length, data.pad_token_id, packing)
    batches: list[Batch] = []
    for block in range(rank, -(-blocks // world_size) * world_size, world_size):
        rows = [sequences[i] for i in chosen[block * micro_batch : (block + 1) * micro_batch]]
        batches.append(assemble(*_rows(rows, micro_batch, sequence_length, data.pad_token_id)))
    return batches


class OrderedDataset(Dataset[dict[str, torch.Tensor]]):
    """The global order as a data set of a fixed length: item i is the sequence at global place i."""

    def __init__(self, sequences: Sequences, order: GlobalOrder, length: int, assemble: _Assembler, pad: int) -> None:
        self._sequences = sequences
        self._order = order
        self._length = length
        self._assemble = assemble
        self._pad = pad

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, place: int) -> dict[str, torch.Tensor]:
        if not 0 <= place < self._length:
            raise IndexError(place)
        row = self._sequences[self._order[place]]
        inputs = self._assemble(*_rows([row], 1, self._sequences.sequence_length, self._pad)).inputs()
        return {name: tensor[0] for name, tensor in inputs.items()}


def ordered_dataset(
    data: PreparedData, *, sequence_length: int, packing: bool = True, seed: int = 0, length: int
) -> OrderedDataset:
    """A data set with which the HF Trainer sees the sequences of `training_batches` in the same global batches.

    Give it as `train_dataset` with `length = steps * world_size * gradient_accumulation * micro_batch` (one epoch of it
    is the whole run, epochs of the text included) and the `TrainingArguments` `train_sampling_strategy="sequential"`
    and `max_steps=steps`, with accelerate's defaults `split_batches=False` and `dispatch_batches=False`. A Trainer that
    resumes skips by itself what it has seen. `default_data_collator` stacks the items; `Batch.from_inputs` counts their
    tokens.
    """
    sequences = Sequences(data.train_tokens, data.train_offsets, sequence_length, packing)
    assemble = _Assembler(sequence_length, data.pad_token_id, packing)
    return OrderedDataset(sequences, GlobalOrder(len(sequences), seed), length, assemble, data.pad_token_id)


@dataclass(frozen=True, slots=True)
class _Assembler:
    """Makes the tensors of a batch from padded rows."""

    sequence_length: int
    pad_token_id: int
    packing: bool

    def __call__(self, rows: npt.NDArray[Any], lengths: tuple[int, ...]) -> Batch:
        input_ids = torch.from_numpy(rows.astype(np.int64))
        if self.packing and min(lengths) == self.sequence_length:
            return Batch(input_ids, input_ids.clone(), None, lengths)
        real = torch.arange(self.sequence_length) < torch.tensor(lengths).unsqueeze(1)
        labels = input_ids.masked_fill(~real, IGNORED)
        # A row that masks everything would make attention a softmax over nothing; filling rows attend as usual.
        mask = None if self.packing else (real | (torch.tensor(lengths) == 0).unsqueeze(1)).long()
        return Batch(input_ids, labels, mask, lengths)


class _MicroBatches(Dataset[_Raw]):
    """Item j is micro batch j of one rank, counted from step 0; tokens stay in their small dtype between processes."""

    def __init__(
        self, sequences: Sequences, order: GlobalOrder, rank: int, world_size: int, micro_batch: int, pad: int
    ) -> None:
        self._sequences = sequences
        self._order = order
        self._rank = rank
        self._world_size = world_size
        self._micro_batch = micro_batch
        self._pad = pad

    def __getitem__(self, index: int) -> _Raw:
        first = (index * self._world_size + self._rank) * self._micro_batch
        rows = [self._sequences[self._order[place]] for place in range(first, first + self._micro_batch)]
        return _rows(rows, self._micro_batch, self._sequences.sequence_length, self._pad)


class _CountFrom(Sampler[int]):
    def __init__(self, start: int) -> None:
        self._start = start

    def __iter__(self) -> Iterator[int]:
        return itertools.count(self._start)


def _rows(rows: Sequence[npt.NDArray[Any]], height: int, width: int, pad: int) -> _Raw:
    """Rows padded on the right, and rows of padding below, to (height, width)."""
    table = np.full((height, width), pad, dtype=rows[0].dtype if rows else np.uint32)
    for target, row in zip(table, rows, strict=False):
        target[: len(row)] = row
    return table, (*map(len, rows), *([0] * (height - len(rows))))


def _as_it_is(raw: Any) -> Any:
    return raw


_MAIN_THREAD = (
    threading.main_thread().ident
)  # of the rank: a forked worker inherits it, and has it as its own main thread


def _start_worker(rank_pid: int, _worker: int) -> None:
    """Ties a loader worker to its rank: it dies with it, and leaves Ctrl-C, which reaches the whole group, to it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if threading.main_thread().ident != _MAIN_THREAD:
        return  # the signal below comes when the thread that forked ends, which only for the main one is the rank's end
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != rank_pid:
        os._exit(1)
