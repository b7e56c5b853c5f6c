"""Live tensor bytes: the sums, and one real step whose peak is known."""

from __future__ import annotations

import torch

from training_xpu.workloads.live_bytes import (
    covered_seconds,
    living_tensor_bytes,
    measure_live_bytes,
    peak_of_allocations,
)


def test_the_peak_is_the_largest_running_sum_in_the_order_of_time() -> None:
    assert peak_of_allocations([]) == 0
    assert peak_of_allocations([(1, 100), (2, 50), (3, -100), (4, 60)]) == 150
    assert peak_of_allocations([(3, -100), (1, 100), (4, 60), (2, 50)]) == 150
    assert peak_of_allocations([(1, -70), (2, 50)]) == 0  # freed what was there before


def test_overlapping_spans_count_once() -> None:
    assert covered_seconds([]) == 0
    assert covered_seconds([(0, 2_000_000_000), (1_000_000_000, 3_000_000_000)]) == 3.0
    assert covered_seconds([(5_000_000_000, 6_000_000_000), (0, 4_000_000_000), (1_000_000_000, 2_000_000_000)]) == 5.0


def test_views_share_a_storage_and_gradients_count() -> None:
    before = living_tensor_bytes()
    base = torch.zeros(1000)
    views = [base[:10], base.view(10, 100), base.detach()]
    assert living_tensor_bytes() - before == 4000
    leaf = torch.zeros(500, requires_grad=True)
    leaf.sum().backward()
    assert living_tensor_bytes() - before == 4000 + 2000 + 2000
    assert torch.zeros(10**9, device="meta").numel() == 10**9
    assert len(views) == 3


def test_a_step_s_peak_is_what_lived_before_and_what_it_allocated() -> None:
    kept = torch.zeros(1 << 20, dtype=torch.uint8)

    def step() -> None:
        a = torch.ones(3 << 20, dtype=torch.uint8)
        del a
        b = torch.ones(2 << 20, dtype=torch.uint8)
        c = torch.ones(4 << 20, dtype=torch.uint8)
        del b, c

    before = living_tensor_bytes()
    measured = measure_live_bytes(step)
    assert before >= kept.numel()
    assert measured.peak_bytes == before + (6 << 20)
    assert measured.communication_seconds == 0.0
