"""Models and scripts that a second forward could harm: nothing may change but what is recomputed."""

from __future__ import annotations

import gc
import random
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.flop_counter import FlopCounterMode

from training_xpu import envs, features, seams
from training_xpu.recompute import feature
from training_xpu.recompute.budget import Budget
from training_xpu.recompute.online.controller import Controller, NothingToDo, State
from training_xpu.recompute.switching.switch import BlockSwitch, Mode


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TRAINING_XPU_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("TRAINING_XPU_MEMORY_BUDGET", raising=False)
    yield
    gc.collect()  # a controller that goes later would ask for the next model
    for seam in seams.SEAMS.values():
        for subscription in seam.subscriptions:
            subscription.cancel()


class Block(torch.nn.Module):
    """Draws from and changes whatever a checkpoint might forget."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(width, width)
        self.norm = torch.nn.BatchNorm1d(width)
        self.dropout = torch.nn.Dropout(0.2)
        self.own = torch.Generator().manual_seed(7)
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))
        self.register_buffer("average", torch.zeros(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.dropout(torch.tanh(self.norm(self.linear(x))))
        if self.training:
            self.seen += 1
            self.average = 0.9 * self.average + 0.1 * y.detach().mean(0)
        y = y * (1 + random.random()) + torch.rand(y.shape, generator=self.own)
        return x + y * torch.sigmoid(y)


class Model(torch.nn.Module):
    def __init__(self, depth: int = 3) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(Block() for _ in range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


Script = Callable[[torch.nn.Module, torch.optim.Optimizer], list[float]]


def plain_script(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    losses = []
    for step in range(3):
        x = torch.full((8, 16), float(step)) + torch.arange(128.0).view(8, 16) / 64
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def evaluation_in_between(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    losses = []
    for _ in range(3):
        loss = model(torch.arange(128.0).view(8, 16) / 64).square().mean()
        model.eval()
        with torch.no_grad():
            model(torch.ones(4, 16))
        loss.backward()
        model.train()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def several_forwards(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    losses = []
    for _ in range(3):
        one = model(torch.arange(128.0).view(8, 16) / 64)
        other = model(torch.arange(128.0).view(8, 16).flip(0) / 64)
        loss = (one * other).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def result(script: Script, modes: list[Mode] | None) -> tuple[list[float], dict[str, torch.Tensor], float]:
    torch.manual_seed(0)
    random.seed(0)
    model = Model()
    if modes is not None:
        BlockSwitch(model, list(model.blocks)).apply(modes)
    losses = script(model, torch.optim.SGD(model.parameters(), lr=0.1))
    return losses, model.state_dict(), random.random() + torch.rand(()).item()


@pytest.mark.parametrize("mode", [Mode.RECOMPUTE, Mode.SELECTIVE])
@pytest.mark.parametrize("script", [plain_script, evaluation_in_between, several_forwards])
def test_nothing_is_drawn_or_changed_twice(script: Script, mode: Mode) -> None:
    losses, state, drawn = result(script, None)
    again, state_again, drawn_again = result(script, [mode] * 3)
    assert again == losses
    assert drawn_again == drawn
    assert state_again.keys() == state.keys()
    for name, value in state.items():
        assert torch.equal(state_again[name], value), name
    assert int(state["blocks.0.seen"]) == (6 if script is several_forwards else 3)


def controlled(model: torch.nn.Module, budget: int = 2**40) -> Controller:
    return Controller(model, Budget(budget, "test", live=True))


def test_several_forwards_before_one_backward_are_planned() -> None:
    torch.manual_seed(0)
    random.seed(0)
    model = Model()
    controller = controlled(model)

    class Stepping(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            done = super().step(closure)
            controller.after_step()
            return done

    losses = several_forwards(model, Stepping(model.parameters(), lr=0.1))
    assert controller.planner is not None
    assert set(controller.switch.modes) == {Mode.KEEP}
    controller.close()
    assert losses == result(several_forwards, None)[0]


def test_per_sample_gradients_of_torch_func_work() -> None:
    block = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh())
    model = torch.nn.Sequential(block, torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh()))
    weights = dict(model.named_parameters())

    def loss(values: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(model, values, (x,)).sum()

    def gradients() -> dict[str, torch.Tensor]:
        found = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(weights, torch.eye(4))
        assert isinstance(found, dict)
        return found

    expected = gradients()
    BlockSwitch(model, list(model)).apply([Mode.RECOMPUTE] * 2)
    assert all(torch.equal(value, expected[name]) for name, value in gradients().items())


def test_blocks_with_hooks_of_the_script_are_left_alone() -> None:
    model = Model()
    collected: list[torch.Tensor] = []
    for block in list(model.blocks)[:2]:
        block.linear.register_forward_hook(lambda module, args, output: collected.append(output))
    controller = controlled(model)
    assert controller.blocks == [model.blocks[2]]
    controller.close()
    model.blocks[2].register_forward_pre_hook(lambda module, args: None)
    with pytest.raises(NothingToDo, match="hooks of its script"):
        controlled(model)


def test_a_counter_of_the_script_s_own_goes_when_it_should() -> None:
    torch.manual_seed(0)
    model = Model()
    controller = controlled(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(5):
        with FlopCounterMode(display=False):
            loss = model(torch.ones(8, 16)).sum()
        assert _get_current_dispatch_mode_stack() == []
        loss.backward()
        optimizer.step()
        controller.after_step()
    assert controller.state is State.GIVEN_UP  # nothing could be measured
    assert _get_current_dispatch_mode_stack() == []


def test_an_optimizer_inside_the_backward_is_left_alone() -> None:
    model = Model()
    controller = controlled(model)
    optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}

    def step(parameter: torch.Tensor) -> None:
        optimizers[parameter].step()  # type: ignore[index]
        optimizers[parameter].zero_grad()  # type: ignore[index]
        controller.after_step()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step)
    for _ in range(3):
        model(torch.ones(8, 16)).sum().backward()
        assert _get_current_dispatch_mode_stack() == []
    assert controller.state is State.GIVEN_UP


def test_without_optimizer_steps_the_script_gets_its_model_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("training_xpu.recompute.online.controller.MOST_FORWARDS", 5)
    model = Model()
    controller = controlled(model)
    for _ in range(6):
        model(torch.ones(8, 16)).sum().backward()
    assert controller.state is State.GIVEN_UP
    assert set(BlockSwitch(model, list(model.blocks)).modes) == {Mode.KEEP}


def test_a_model_is_freed_with_its_last_user_and_the_next_one_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CHECKPOINT_OPTIMIZATION", "true")
    assert envs.get("CHECKPOINT_OPTIMIZATION") == "true"
    features.activate("single")

    def train() -> weakref.ref[torch.nn.Module]:
        model = Model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        plain_script(model, optimizer)
        assert feature._controller is not None
        controller = feature._controller()
        assert controller is not None
        assert controller.inner is model
        return weakref.ref(model)

    first = train()
    gc.collect()
    assert first() is None
    train()


def test_a_parametrization_is_not_taken_for_the_model() -> None:
    seen: list[torch.nn.Module] = []
    seams.ROOT_FORWARD.subscribe(lambda event: seen.append(event.module), owner="test")
    model = torch.nn.Sequential(torch.nn.utils.parametrizations.spectral_norm(torch.nn.Linear(4, 4)))
    assert seen == []
    model(torch.ones(2, 4))
    assert seen == [model]


def test_a_fault_while_taking_a_model_in_hand_leaves_it_untouched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAINING_XPU_CACHE", "~nobody-of-this-name/cache")
    model = Model()
    with pytest.raises(Exception, match="no such home folder"):
        controlled(model)
    assert set(BlockSwitch(model, list(model.blocks)).modes) == {Mode.KEEP}
    assert not model._forward_pre_hooks
