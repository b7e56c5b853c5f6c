"""The step seam: which optimizer updates are one step."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.optim import optimizer as torch_optimizer
from torch.utils.checkpoint import checkpoint

from training_xpu import seams

X = torch.ones(2, 4)
BACKWARD = torch.autograd.backward


def hooks() -> int:
    return len(torch_optimizer._global_optimizer_pre_hooks) + len(torch_optimizer._global_optimizer_post_hooks)


@pytest.fixture
def steps() -> Iterator[list[seams.Step]]:
    heard: list[seams.Step] = []
    subscription = seams.STEP.subscribe(heard.append, "t")
    assert hooks() == 2
    yield heard
    subscription.cancel()
    assert hooks() == 0
    assert torch.autograd.backward is BACKWARD


def tiny() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))


def train(model: torch.nn.Module, steps: int, optimizer: torch.optim.Optimizer | None = None) -> None:
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        model(X).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def test_index_and_time(steps: list[seams.Step]) -> None:
    before = time.monotonic()
    train(tiny(), 3)
    assert [s.index for s in steps] == [1, 2, 3]
    assert before <= steps[0].time <= steps[1].time <= steps[2].time <= time.monotonic()


def test_gradient_accumulation(steps: list[seams.Step]) -> None:
    model = tiny()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for micro_batch in range(6):
        model(X).sum().backward()
        if micro_batch % 3 == 2:
            optimizer.step()
            optimizer.zero_grad()
    assert len(steps) == 2


def test_one_parameter_group_after_the_other_as_under_zero_3(steps: list[seams.Step]) -> None:
    model = tiny()
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters)
    for _ in range(2):
        model(X).sum().backward()
        for parameter in parameters:
            optimizer.param_groups[0]["params"] = [parameter]
            optimizer.step()
            optimizer.param_groups[0]["params"] = []
        model.zero_grad()
    assert len(steps) == 2


def test_two_optimizers_after_one_backward(steps: list[seams.Step]) -> None:
    model = tiny()
    pair = [torch.optim.SGD(model[0].parameters(), lr=0.1), torch.optim.AdamW(model[1].parameters())]
    for _ in range(3):
        model(X).sum().backward()
        for optimizer in pair:
            optimizer.step()
            optimizer.zero_grad()
    assert len(steps) == 3


def test_two_models_in_turns_take_two_steps(steps: list[seams.Step]) -> None:
    a, b = tiny(), tiny()
    pair = [(m, torch.optim.SGD(m.parameters(), lr=0.1)) for m in (a, b)]
    for _ in range(3):
        for model, optimizer in pair:
            train(model, 1, optimizer)
    assert len(steps) == 6


def test_a_second_model_after_the_first(steps: list[seams.Step]) -> None:
    train(tiny(), 2)
    train(tiny(), 3)
    assert len(steps) == 5


def test_one_optimizer_per_parameter_inside_backward(steps: list[seams.Step]) -> None:
    model = tiny()
    optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}

    def update(parameter: torch.Tensor) -> None:
        optimizers[parameter].step()  # type: ignore[index]
        optimizers[parameter].zero_grad()  # type: ignore[index]

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(update)
    for _ in range(2):
        model(X).sum().backward()
    assert len(steps) == 2


def test_a_recomputing_layer_starts_no_step_of_its_own(steps: list[seams.Step]) -> None:
    model = tiny()
    optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: optimizers[p].step())
    for _ in range(2):
        hidden = X.clone().requires_grad_()
        for layer in model:
            hidden = checkpoint(layer, hidden, use_reentrant=True)
        hidden.sum().backward()
    assert len(steps) == 2


def test_lbfgs_evaluates_its_closure_many_times(steps: list[seams.Step]) -> None:
    model = tiny()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4)
    evaluations = 0

    def closure() -> torch.Tensor:
        nonlocal evaluations
        evaluations += 1
        optimizer.zero_grad()
        loss = (model(X) - 1).square().sum()
        loss.backward()
        return loss

    for _ in range(2):
        optimizer.step(closure)
    assert evaluations > 2
    assert len(steps) == 2


def test_a_gradient_scaler_skips_after_an_overflow(steps: list[seams.Step]) -> None:
    model = tiny()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    for loss_factor in (1.0, float("inf"), 1.0):
        scaler.scale(model(X).sum() * loss_factor).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert len(steps) == 2


def test_a_fused_optimizer_that_skips_by_itself(steps: list[seams.Step]) -> None:
    model = tiny()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    for loss_factor in (1.0, float("inf"), 1.0):
        scaler.scale(model(X).sum() * loss_factor).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert len(steps) == 2


def test_a_call_without_gradients_updates_nothing(steps: list[seams.Step]) -> None:
    model = tiny()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.step()
    train(model, 1, optimizer)
    optimizer.step()
    assert len(steps) == 1


def test_an_optimizer_around_another_counts_once(steps: list[seams.Step]) -> None:
    class Outer(torch.optim.Optimizer):
        def __init__(self, inner: torch.optim.Optimizer) -> None:
            super().__init__(inner.param_groups, {})
            self.inner = inner

        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            self.inner.step()

    model = tiny()
    train(model, 3, Outer(torch.optim.SGD(model.parameters(), lr=0.1)))
    assert len(steps) == 3


def test_an_optimizer_that_failed_once_goes_on(steps: list[seams.Step]) -> None:
    class Fails(torch.optim.SGD):
        fails = True

        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            if Fails.fails:
                raise MemoryError

    model = tiny()
    optimizer = Fails(model.parameters(), lr=0.1)
    model(X).sum().backward()
    with pytest.raises(MemoryError):
        optimizer.step()
    Fails.fails = False
    optimizer.step()
    train(model, 2, optimizer)
    assert len(steps) == 3


def test_gradients_without_backward(steps: list[seams.Step]) -> None:
    model = tiny()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    parameters = list(model.parameters())
    for _ in range(3):
        for parameter, gradient in zip(parameters, torch.autograd.grad(model(X).sum(), parameters), strict=True):
            parameter.grad = gradient
        optimizer.step()
    assert len(steps) == 3


def test_training_inside_compiled_functions_is_not_disturbed(steps: list[seams.Step]) -> None:
    model = tiny()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    @torch.compile(backend="eager")
    def update() -> None:
        optimizer.step()

    before = model[0].weight.detach().clone()
    model(X).sum().backward()
    update()
    assert not torch.equal(before, model[0].weight)
