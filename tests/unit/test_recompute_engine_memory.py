"""What engines keep and move, against numbers worked out by hand from their documented layouts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from training_xpu.errors import UserError
from training_xpu.recompute.prediction.engine_memory import DdpMemory, EngineMemory, Zero0Memory
from training_xpu.recompute.prediction.fsdp_memory import FsdpMemory
from training_xpu.recompute.prediction.ledger import COMMUNICATION, MODEL_STATES, Ledger
from training_xpu.recompute.prediction.live_bytes import Stretch
from training_xpu.recompute.prediction.optimizers import optimizer_bytes
from training_xpu.recompute.prediction.setting import TrainingSetting
from training_xpu.recompute.prediction.weights import Weight, Weights
from training_xpu.recompute.prediction.zero3_memory import Zero3Memory
from training_xpu.recompute.prediction.zero12_memory import Zero12Memory, part_of, pieces_of


def weights(*shapes: tuple[int, ...], width: int = 4, frozen: tuple[int, ...] = (), blocks: Any = ()) -> Weights:
    found = tuple(Weight(shape, width, i not in frozen) for i, shape in enumerate(shapes))
    return Weights(found, blocks, buffer_bytes=0)


def at_rest(kind: type[EngineMemory], of: Weights, setting: TrainingSetting) -> Ledger:
    ledger = Ledger()
    kind(of, setting, ledger)
    return ledger


DEEPSPEED = TrainingSetting(engine="deepspeed", world_size=2, dtype="bf16", reduce_bucket_elements=50)


def test_plain_adamw_keeps_twelve_bytes_a_weight_and_a_step_number_a_tensor() -> None:
    assert at_rest(EngineMemory, weights((10, 10), (20,)), TrainingSetting()).live == 12 * 120 + 2 * 4


def test_ddp_adds_buckets_as_large_as_the_trained_weights() -> None:
    ledger = at_rest(DdpMemory, weights((10, 10), (20,), frozen=(1,)), TrainingSetting(engine="ddp", world_size=2))
    assert ledger.states == 4 * 120 + 8 * 100 + 4
    assert ledger.communication == 4 * 100


def test_deepspeed_without_zero_has_fp32_masters_beside_bf16_weights() -> None:
    assert at_rest(Zero0Memory, weights((10, 10), width=2), DEEPSPEED).live == (2 + 4 + 8) * 100


def test_zero_1_and_2_split_masters_and_moments_with_padding() -> None:
    # 101 elements: 4-byte alignment of bf16 on 2 ranks pads to 104, 52 for each
    for stage in (1, 2):
        ledger = at_rest(Zero12Memory, weights((101,), width=2), replace(DEEPSPEED, zero_stage=stage))
        assert ledger.live == 2 * 104 + 12 * 52


def test_zero_3_splits_everything_and_keeps_small_weights_gathered() -> None:
    setting = replace(DEEPSPEED, zero_stage=3, param_persistence_threshold=9)
    ledger = at_rest(Zero3Memory, weights((11, 3), (9,), width=2), setting)
    part = 17 + 5  # rounded up
    assert ledger.states == part * (2 + 4 + 8 + 2)
    assert ledger.communication == 2 * 50 + 2 * 10


def test_fsdp_pads_the_first_dimension_of_each_weight() -> None:
    ledger = at_rest(FsdpMemory, weights((5, 4)), TrainingSetting(engine="fsdp", world_size=2, dtype="bf16"))
    assert ledger.live == 3 * 4 * 12 + 4


def test_parts_of_zero_1_and_2_cut_through_parameters() -> None:
    of = weights((6,), (10,), (4,), width=2)
    assert part_of(20, 2) == 10
    assert pieces_of(of, 10) == {0: [(0, 6)], 1: [(0, 4), (1, 6)], 2: [(1, 4)]}


def test_zero_2_reduces_a_full_bucket_before_the_next_gradient() -> None:
    ledger = Ledger()
    of = weights((30,), (30,), width=2)
    engine = Zero12Memory(of, replace(DEEPSPEED, zero_stage=2), ledger)
    rest = ledger.live
    engine.start_micro_batch(True, True)
    engine.gradient(1)
    assert ledger.live == rest + 2 * 50  # the bucket, of 50 elements
    engine.gradient(0)  # does not fit: gradient 1 belongs to rank 1 and is dropped
    assert ledger.live == rest + 2 * 50
    engine.end_backward()
    assert ledger.live == rest + 2 * 30  # rank 0's own gradient, copied out
    engine.update()
    assert ledger.live == rest


def test_gradients_wait_for_the_update_and_are_there_once_however_many_micro_batches() -> None:
    ledger = Ledger()
    engine = EngineMemory(weights((10,)), TrainingSetting(gradient_accumulation=3), ledger)
    rest = ledger.live
    for first, last in ((True, False), (False, False), (False, True)):
        engine.start_micro_batch(first, last)
        engine.gradient(0)
        engine.end_backward()
        assert ledger.live == rest + 40
    engine.update()
    assert ledger.live == rest


def test_zero_3_releases_what_is_not_needed_again_soon() -> None:
    setting = replace(
        DEEPSPEED, zero_stage=3, param_persistence_threshold=0, prefetch_bucket_elements=0, max_reuse_distance=25
    )
    ledger = Ledger()
    engine = Zero3Memory(weights((20,), (30,), width=2), setting, ledger)
    engine.expect([(0,), (1,), (1,), (0,)])
    rest = ledger.live
    engine.start_micro_batch(True, True)
    engine.module_event("enter", 1, (0,))
    assert ledger.live == rest + 40
    engine.module_event("leave", 1, (0,))  # needed again after 60 elements
    assert ledger.live == rest
    engine.module_event("enter", 2, (1,))
    engine.module_event("leave", 2, (1,))  # needed again at once
    assert ledger.live == rest + 60


def test_zero_3_looks_ahead_within_its_bucket() -> None:
    setting = replace(DEEPSPEED, zero_stage=3, param_persistence_threshold=0, prefetch_bucket_elements=30)
    ledger = Ledger()
    engine = Zero3Memory(weights((20,), (30,), (40,), width=2), setting, ledger)
    engine.expect([(0,), (1,), (2,)])
    rest = ledger.live
    engine.start_micro_batch(True, True)
    engine.module_event("enter", 1, (0,))
    assert ledger.live == rest + 40 + 60


@pytest.mark.parametrize(
    ("kind", "states"),
    [("adamw", 8 * 200 + 4), ("sgd", 0), ("sgd-momentum", 4 * 200), ("adafactor", 4 * (10 + 20) + 4)],
)
def test_states_of_optimizers(kind: str, states: int) -> None:
    assert optimizer_bytes(kind, [(10, 20)], "plain", "cpu").states == states


def test_optimizers_take_tensors_one_by_one_on_cpus_and_together_elsewhere() -> None:
    shapes = [(64, 64), (32, 32)]
    alone = optimizer_bytes("adafactor", shapes, "plain", "cpu").transient
    together = optimizer_bytes("adafactor", shapes, "plain", "cuda").transient
    assert 0 < alone < together


def test_an_unknown_optimizer_is_refused() -> None:
    with pytest.raises(UserError, match="lion"):
        optimizer_bytes("lion", [(1,)], "plain", "cpu")


def test_settings_that_make_no_sense_are_refused() -> None:
    for wrong in ({"world_size": 0}, {"engine": "magic"}, {"zero_stage": 4}, {"dtype": "fp8"}, {"zero_stage": 1}):
        with pytest.raises(UserError):
            TrainingSetting(**wrong)  # type: ignore[arg-type]


def test_the_ledger_finds_the_peak_and_what_it_is_made_of() -> None:
    ledger = Ledger()
    ledger.keep(100)
    ledger.communicate(10)
    with ledger.segment("block-0"):
        ledger.run(Stretch(50, 20))
    with ledger.segment("head", head=True):
        ledger.run(Stretch(40, 5))
    assert ledger.peak.total == 100 + 10 + 20 + 40
    assert ledger.peak.phase == "head"
    assert ledger.peak.parts == {
        MODEL_STATES: 100,
        COMMUNICATION: 10,
        "block activations": 20,
        "head and loss": 40,
        "transients": 0,
    }
