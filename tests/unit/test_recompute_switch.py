"""Switching the blocks of a model in one process: same losses and gradients, less saved, nothing left behind."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from recompute_models import (
    LoraLinear,
    Plain,
    Result,
    blocks_of,
    count_runs,
    gpt2,
    llama,
    same,
    saved_bytes,
    text,
    train_once,
)
from torch.utils.checkpoint import checkpoint

from training_xpu.recompute.switching.policies import offloading
from training_xpu.recompute.switching.switch import BlockSwitch, Mode

KEEP, SELECTIVE, RECOMPUTE = Mode.KEEP, Mode.SELECTIVE, Mode.RECOMPUTE


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def switch_of(model: torch.nn.Module, root: torch.nn.Module | None = None) -> BlockSwitch:
    return BlockSwitch(root if root is not None else model, blocks_of(model))


@pytest.mark.parametrize("build", [llama, gpt2, Plain])
def test_modes_save_less_in_their_order_and_restore_leaves_no_trace(build: Callable[[], torch.nn.Module]) -> None:
    model = build()
    before = [dict(m.__dict__) for m in model.modules()]
    switch = switch_of(model)
    count = len(switch.modes)
    assert switch.requested == switch.modes == (KEEP,) * count
    assert switch.can_change
    measured = {}
    for mode in (KEEP, SELECTIVE, RECOMPUTE):
        assert switch.apply([mode] * count)
        assert switch.modes == (mode,) * count
        measured[mode] = saved_bytes(model)
    assert measured[RECOMPUTE] < measured[SELECTIVE] < measured[KEEP]
    switch.restore()
    assert [m.__dict__.keys() for m in model.modules()] == [b.keys() for b in before]
    for module, was in zip(model.modules(), before, strict=True):
        assert all(module.__dict__[name] is value for name, value in was.items())
    assert not any(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


@pytest.mark.parametrize("autocast", [False, True])
def test_a_prefix_of_recomputed_blocks_changes_from_forward_to_forward(autocast: bool) -> None:
    model = Plain(dropout=0.3)
    expected = train_once(model, autocast)
    switch = switch_of(model)
    for modes in (
        [RECOMPUTE, KEEP, KEEP],
        [RECOMPUTE] * 3,
        [SELECTIVE] * 3,
        [KEEP, RECOMPUTE, SELECTIVE],
        [KEEP] * 3,
    ):
        switch.apply(modes)
        assert same(train_once(model, autocast), expected)


def test_a_backward_uses_the_modes_of_its_own_forward() -> None:
    model = Plain(dropout=0.3)
    expected = train_once(model)
    switch = switch_of(model)

    def between(_: Any) -> None:
        switch.apply([KEEP, SELECTIVE, KEEP])

    switch.apply([RECOMPUTE] * 3)
    assert same(train_once(model, before_backward=between), expected)
    switch.apply([SELECTIVE] * 3)
    assert same(train_once(model, before_backward=lambda _: switch.apply([RECOMPUTE] * 3)), expected)
    switch.apply([RECOMPUTE] * 3)
    assert same(train_once(model, before_backward=lambda _: switch.restore()), expected)


@pytest.mark.parametrize("mode", [RECOMPUTE, SELECTIVE])
def test_a_graph_that_is_retained_can_be_run_backward_twice(mode: Mode) -> None:
    model = Plain(dropout=0.3)
    expected = train_once(model, before_backward=lambda loss: loss.backward(retain_graph=True))
    switch_of(model).apply([mode] * 3)
    assert same(train_once(model, before_backward=lambda loss: loss.backward(retain_graph=True)), expected)


def test_gradients_that_are_asked_for_one_by_one() -> None:
    model = Plain(dropout=0.3)

    def asked() -> list[torch.Tensor]:
        torch.manual_seed(4)
        return list(torch.autograd.grad(model(**text()).loss, list(model.parameters())))

    expected = asked()
    switch = switch_of(model)
    for mode in (RECOMPUTE, SELECTIVE):
        switch.apply([mode] * 3)
        assert all(torch.equal(a, b) for a, b in zip(asked(), expected, strict=True))


def test_what_is_offloaded_comes_back_as_it_was_and_weights_stay() -> None:
    class Inside(torch.nn.Module):
        def __init__(self, model: torch.nn.Module) -> None:
            super().__init__()
            self.model = model

        def forward(self, **inputs: Any) -> Any:
            with offloading(pin_memory=False):
                return self.model(**inputs)

    model = Plain(dropout=0.3)
    expected = train_once(model)
    assert same(train_once(Inside(model)), expected)
    weight = torch.nn.Parameter(torch.ones(2, 2))
    with offloading(pin_memory=False):
        product = torch.ones(2, 2, requires_grad=True).sin() @ weight.t()
    hidden, transposed = product.grad_fn._saved_self, product.grad_fn._saved_mat2  # type: ignore[union-attr]
    assert transposed.data_ptr() == weight.data_ptr()
    assert torch.equal(hidden, torch.ones(2, 2).sin())


def test_wrong_modes_are_refused() -> None:
    switch = switch_of(Plain())
    with pytest.raises(ValueError, match="2 modes for 3 blocks"):
        switch.apply([KEEP] * 2)
    assert all(Mode.OFFLOAD not in offered for offered in switch.offered) or torch.accelerator.is_available()
    if not torch.accelerator.is_available():
        with pytest.raises(ValueError, match="offload"):
            switch.apply([Mode.OFFLOAD] * 3)


def test_every_keyword_argument_arrives_in_forward_and_recompute() -> None:
    seen: list[dict[str, Any]] = []

    class Block(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = torch.nn.Linear(4, 4)

        def forward(self, hidden: torch.Tensor, *rest: Any, **kwargs: Any) -> dict[str, torch.Tensor]:
            seen.append({"rest": rest, **kwargs})
            return {"hidden": torch.tanh(self.inner(hidden)) * kwargs["mask"]}

    blocks = torch.nn.ModuleList([Block(), Block()])
    # Names that torch's checkpoint function has for itself are a layer's to use as well.
    keywords = {"mask": torch.ones(4), "debug": 1, "early_stop": 2, "context_fn": 3, "use_reentrant": 4, "table": [5]}
    switch = switch_of(torch.nn.ModuleDict({"layers": blocks}))
    for mode in (RECOMPUTE, SELECTIVE):
        switch.apply([mode] * 2)
        seen.clear()
        hidden = torch.ones(2, 4)
        for block in blocks:
            hidden = block(hidden, "third", **keywords)["hidden"]
        hidden.sum().backward()  # type: ignore[no-untyped-call]
        assert len(seen) == 4
        for call in seen:
            assert call["rest"] == ("third",)
            assert {k: v for k, v in call.items() if k not in ("rest", "mask")} == {
                k: v for k, v in keywords.items() if k != "mask"
            }
            assert torch.equal(call["mask"], torch.ones(4))


@pytest.mark.parametrize("build", [llama, Plain])
def test_blocks_run_once_in_evaluation_and_twice_in_training(build: Callable[[], torch.nn.Module]) -> None:
    model = build()
    switch = switch_of(model)
    count = len(switch.modes)
    switch.apply([RECOMPUTE] * count)
    with count_runs(blocks_of(model)) as runs:
        with torch.no_grad():
            model(**text())
        assert runs.total == count
        model.eval()
        model(**text()).loss.backward()
        assert runs.total == 2 * count
        model.train()
        model(**text()).loss.backward()
        assert runs.total == 4 * count


def test_an_in_place_activation_behind_a_matrix_product_survives_the_selective_mode() -> None:
    model = Plain(in_place=True, dropout=0.2)
    expected = train_once(model)
    switch = switch_of(model)
    switch.apply([SELECTIVE] * 3)
    assert same(train_once(model), expected)
    assert switch.selective_matched == (True,) * 3


def test_selective_says_where_there_is_nothing_to_keep() -> None:
    class Scale(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = torch.nn.LayerNorm(8)

        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            return torch.sigmoid(self.norm(hidden))

    model = torch.nn.Sequential(Scale(), Scale())
    switch = BlockSwitch(model, list(model))
    assert switch.selective_matched == (None, None)
    switch.apply([SELECTIVE, RECOMPUTE])
    model(torch.ones(2, 8)).sum().backward()
    assert switch.selective_matched == (False, None)


def test_frozen_first_layers_leave_the_gradients_of_low_rank_adapters_as_they_are() -> None:
    for build in (llama, Plain):
        model = build()
        for parameter in model.parameters():
            parameter.requires_grad_(False)
        LoraLinear.replace_in(model, "up_proj")
        expected = train_once(model)
        trained = [g for g in expected.gradients if g is not None]
        assert trained
        assert all(g.abs().sum() > 0 for g in trained)
        switch = switch_of(model)
        for mode in (RECOMPUTE, SELECTIVE):
            switch.apply([mode] * len(switch.modes))
            assert same(train_once(model), expected)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", ["gradient_checkpointing_enable", "activation_checkpointing_enable"])
def test_what_the_script_asked_for_is_where_we_start(reentrant: bool, name: str) -> None:
    plain = llama()
    expected = train_once(plain)
    model = llama()
    getattr(model, name)(**{name.replace("_enable", "_kwargs"): {"use_reentrant": reentrant}})
    switch = switch_of(model)
    assert switch.requested == switch.modes == (RECOMPUTE,) * 4
    switch.apply([RECOMPUTE, KEEP, KEEP, KEEP])
    assert switch.requested == (RECOMPUTE,) * 4
    assert switch.reentrant_replaced is reentrant
    assert same(train_once(model), expected)
    with count_runs(blocks_of(model)) as runs:
        model(**text()).loss.backward()
    assert runs.total == 5
    switch.restore()
    assert switch.modes == (RECOMPUTE,) * 4
    assert model.is_activation_checkpointing


def test_a_reentrant_request_trains_what_it_would_have_left_untrained() -> None:
    model = llama()
    for parameter in model.model.embed_tokens.parameters():
        parameter.requires_grad_(False)
    expected = train_once(model)
    model._set_gradient_checkpointing(enable=True, gradient_checkpointing_func=partial(checkpoint, use_reentrant=True))
    switch = switch_of(model)
    switch.apply([RECOMPUTE] * 4)
    assert same(train_once(model), expected)
    assert switch.reentrant_replaced


def test_a_script_that_switches_later_has_its_way() -> None:
    model = llama()
    switch = switch_of(model)
    heard: list[tuple[Mode, ...]] = []
    switch.on_request = heard.append
    assert switch.apply([RECOMPUTE, RECOMPUTE, KEEP, KEEP])
    model.gradient_checkpointing_disable()
    assert switch.overruled
    assert switch.requested == switch.modes == (KEEP,) * 4
    assert not switch.apply([RECOMPUTE] * 4)
    assert not switch.apply([RECOMPUTE] * 4)
    assert switch.modes == (KEEP,) * 4
    model.activation_checkpointing_enable(every_n_layers=2)
    assert not switch.apply([KEEP] * 4)
    assert heard == [(KEEP,) * 4, (RECOMPUTE, KEEP) * 2]
    switch.restore()
    assert switch.modes == (RECOMPUTE, KEEP) * 2


def test_one_flag_set_by_hand_counts_too() -> None:
    model = llama()
    switch = switch_of(model)
    switch.apply([KEEP] * 4)
    model.model.layers[2].gradient_checkpointing = True
    assert switch.overruled
    assert switch.requested == (KEEP, KEEP, RECOMPUTE, KEEP)


def test_settings_of_the_scripts_own_checkpoint_function_are_kept() -> None:
    model = llama()
    calls = 0

    def own(function: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        return checkpoint(function, *args, use_reentrant=False, **kwargs)

    model._set_gradient_checkpointing(enable=True, gradient_checkpointing_func=own)
    switch = switch_of(model)
    switch.apply([RECOMPUTE, KEEP, KEEP, RECOMPUTE])
    expected = train_once(llama())
    assert same(train_once(model), expected)
    assert calls == 2


def test_a_model_that_makes_a_cache_makes_none_while_a_block_is_recomputed() -> None:
    model = llama(use_cache=True)
    expected = train_once(model)
    assert model(**text()).past_key_values is not None
    switch = switch_of(model)
    for modes in ([KEEP, RECOMPUTE, KEEP, KEEP], [SELECTIVE, KEEP, KEEP, RECOMPUTE]):
        switch.apply(modes)
        assert model(**text()).past_key_values is None
        assert same(train_once(model), expected)
    assert switch.caches_seen == 0
    switch.apply([KEEP] * 4)
    assert model(**text()).past_key_values is not None
    switch.restore()
    assert model(**text()).past_key_values is not None


def test_a_cache_that_the_script_hands_in_keeps_its_effect() -> None:
    from transformers import DynamicCache

    model = llama()

    def prefix() -> Any:
        torch.manual_seed(5)
        cache = DynamicCache(config=model.config)
        for layer in range(4):
            cache.update(torch.randn(2, 4, 3, 16), torch.randn(2, 4, 3, 16), layer)
        return cache

    def once() -> Result:
        return train_once(model, past_key_values=prefix())

    expected = once()
    assert not same(expected, train_once(model))
    switch = switch_of(model)
    switch.apply([RECOMPUTE, KEEP, RECOMPUTE, KEEP])
    assert same(once(), expected)
    assert switch.caches_seen == 1
    assert switch.modes == (RECOMPUTE, KEEP, RECOMPUTE, KEEP)
    with count_runs(blocks_of(model)) as runs:
        model(**text()).loss.backward()
    assert runs.total == 6


@pytest.mark.parametrize("build", [llama, Plain])
def test_copies_and_files_of_a_model_are_those_of_the_model_without_us(build: Callable[[], torch.nn.Module]) -> None:
    model = build()
    keys, names = list(model.state_dict()), [n for n, _ in model.named_modules()]
    classes = [type(m) for m in model.modules()]
    expected = train_once(model)
    switch = switch_of(model)
    switch.apply([RECOMPUTE, SELECTIVE] + [KEEP] * (len(switch.modes) - 2))
    assert list(model.state_dict()) == keys
    assert [n for n, _ in model.named_modules()] == names
    assert [type(m) for m in model.modules()] == classes
    data = pickle.dumps(model)
    assert b"training_xpu" not in data
    for twin in (copy.deepcopy(model), pickle.loads(data)):
        assert same(train_once(twin), expected)
        with torch.no_grad():
            next(twin.parameters()).add_(1.0)
        assert same(train_once(model), expected)
        with count_runs(blocks_of(model)) as runs:
            train_once(twin)
        assert runs.total == 0


def test_the_signature_of_a_wrapped_forward_is_its_own() -> None:
    import inspect

    model = Plain()
    before = inspect.signature(model.layers[0].forward)
    switch_of(model).apply([RECOMPUTE] * 3)
    assert inspect.signature(model.layers[0].forward) == before


def test_a_forward_that_somebody_puts_in_front_later_stays_when_we_go() -> None:
    model = Plain()
    expected = train_once(model)
    switch = switch_of(model)
    switch.apply([RECOMPUTE] * 3)
    ours = model.layers[0].forward
    model.layers[0].forward = lambda *args, **kwargs: ours(*args, **kwargs)
    theirs = model.layers[0].forward
    switch.restore()
    assert model.layers[0].forward is theirs
    with count_runs(blocks_of(model)) as runs:
        assert same(train_once(model), expected)
    assert runs.total == 3


def test_while_measuring_a_recompute_goes_to_the_end_and_is_heard() -> None:
    model = Plain()
    heard: list[tuple[str, int]] = []

    class Listener:
        def recompute_begins(self, block: int) -> None:
            heard.append(("begins", block))

        def recompute_ends(self, block: int) -> None:
            heard.append(("ends", block))

    # The tanh at the end of a block saves its result; nothing after it, so that early stop leaves the scaling out.
    ends = []
    for block in model.layers:
        block.last.register_forward_hook(lambda *_: ends.append(torch._C._current_graph_task_id() != -1))
    switch = switch_of(model)
    switch.apply([RECOMPUTE, SELECTIVE, KEEP])
    train_once(model)
    assert ends.count(True) == 0
    assert heard == []
    switch.measuring, switch.listener = True, Listener()
    train_once(model)
    assert ends.count(True) >= 1
    assert heard == [("begins", 1), ("ends", 1), ("begins", 0), ("ends", 0)]
    switch.measuring, switch.listener = False, None
    ends.clear()
    heard.clear()
    train_once(model)
    assert ends.count(True) == 0
    assert heard == []
