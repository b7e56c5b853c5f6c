"""Compiled blocks: full recompute around them without compiling anew, selective recompute inside."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from recompute_models import Plain, Result, blocks_of, llama, text, train_once
from torch._dynamo.utils import counters
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from training_xpu.recompute.switching.switch import BlockSwitch, Mode

KEEP, SELECTIVE, RECOMPUTE = Mode.KEEP, Mode.SELECTIVE, Mode.RECOMPUTE
BACKEND = "aot_eager"  # cuts out joint graphs and their recompute as inductor does, without its compiler


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()
    torch.set_num_threads(threads)


def layers_of(model: Any) -> torch.nn.ModuleList:
    return model.layers if isinstance(model, Plain) else model.model.layers  # type: ignore[no-any-return]


def by_forward(model: Any) -> Any:
    for block in blocks_of(model):
        block.forward = torch.compile(block.forward, backend=BACKEND)  # type: ignore[method-assign]
    return model


def by_method(model: Any) -> Any:
    for block in blocks_of(model):
        block.compile(backend=BACKEND)
    return model


def by_module(model: Any) -> Any:
    layers = layers_of(model)
    for index, block in enumerate(list(layers)):
        layers[index] = torch.compile(block, backend=BACKEND)  # type: ignore[assignment]
    return model


def graphs() -> int:
    return int(counters["stats"]["unique_graphs"])


def near(a: Result, b: Result) -> bool:
    """Equal up to the rounding of another order of operations."""
    return torch.allclose(a.loss, b.loss, atol=1e-5) and all(
        x is y or (x is not None and y is not None and torch.allclose(x, y, atol=1e-5))
        for x, y in zip(a.gradients, b.gradients, strict=True)
    )


def build_llama() -> Any:
    model = llama(layers=3)
    for module in model.modules():
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.0  # compiled, it draws other numbers
    return model


def build_plain() -> Any:
    return Plain(dropout=0.0)


@pytest.mark.parametrize("build", [build_llama, build_plain])
@pytest.mark.parametrize("compile_blocks", [by_forward, by_method, by_module])
def test_full_recompute_goes_around_a_compiled_block(
    build: Callable[[], Any], compile_blocks: Callable[[Any], Any]
) -> None:
    model = compile_blocks(build())
    expected = train_once(model)
    made = graphs()
    assert made >= 1
    keys = list(model.state_dict())
    switch = BlockSwitch(model, blocks_of(model))
    assert switch.how == ("compiled",) * 3
    assert switch.can_change
    assert switch.modes == (KEEP,) * 3
    kept = saved_bytes_compiled(model)
    for modes in ([RECOMPUTE, KEEP, KEEP], [RECOMPUTE] * 3, [KEEP, RECOMPUTE, KEEP], [KEEP] * 3):
        switch.apply(modes)
        assert switch.modes == tuple(modes)
        assert near(train_once(model), expected)
        assert (saved_bytes_compiled(model) < kept) is (RECOMPUTE in modes)
    assert graphs() == made
    assert not counters["graph_break"]
    assert list(model.state_dict()) == keys
    switch.restore()
    assert near(train_once(model), expected)
    assert graphs() == made


@pytest.mark.parametrize(
    ("build", "compile_blocks"),
    [(build_llama, by_forward), (build_llama, by_method), (build_plain, by_method), (build_plain, by_module)],
)
def test_selective_recompute_goes_into_a_compiled_block(
    build: Callable[[], Any], compile_blocks: Callable[[Any], Any]
) -> None:
    model = compile_blocks(build())
    expected = train_once(model)
    switch = BlockSwitch(model, blocks_of(model))
    saved = {}
    for mode in (KEEP, SELECTIVE, RECOMPUTE):
        switch.apply([mode] * 3)
        assert switch.modes == (mode,) * 3
        assert near(train_once(model), expected)
        saved[mode] = saved_bytes_compiled(model)
    assert saved[RECOMPUTE] < saved[SELECTIVE] < saved[KEEP]
    assert True in switch.selective_matched
    made = graphs()
    for mode in (KEEP, SELECTIVE, RECOMPUTE, SELECTIVE, KEEP):
        switch.apply([mode] * 3)
        assert near(train_once(model), expected)
    assert graphs() == made  # one for the plain block, one for the selective: no more
    assert not counters["graph_break"]


def test_a_compiled_function_offers_no_selective_mode() -> None:
    model = by_forward(build_plain())
    switch = BlockSwitch(model, blocks_of(model))
    assert switch.offered == (frozenset({KEEP, RECOMPUTE}),) * 3
    with pytest.raises(ValueError, match="selective"):
        switch.apply([SELECTIVE] * 3)


@pytest.mark.parametrize("mode", [KEEP, SELECTIVE])
def test_a_compiled_blocks_recompute_is_that_of_its_forward_whatever_has_been_set_since(mode: Mode) -> None:
    model = by_method(build_llama())
    expected = train_once(model)
    switch = BlockSwitch(model, blocks_of(model))
    switch.apply([RECOMPUTE] * 3)
    assert near(train_once(model, before_backward=lambda _: switch.apply([mode] * 3)), expected)
    assert switch.modes == (mode,) * 3
    assert near(train_once(model, before_backward=lambda _: switch.apply([RECOMPUTE] * 3)), expected)


@pytest.mark.parametrize("compiled_outside", [True, False])
def test_torchs_checkpoint_wrapper_around_or_inside_a_compiled_block(compiled_outside: bool) -> None:
    model = build_plain()
    expected = train_once(model)
    blocks = blocks_of(model)
    for index, block in enumerate(blocks):
        if not compiled_outside:
            block.compile(backend=BACKEND)
        wrapper = checkpoint_wrapper(block)
        if compiled_outside:
            wrapper.compile(backend=BACKEND)
        model.layers[index] = wrapper
    switch = BlockSwitch(model, blocks_of(model))
    assert switch.requested == switch.modes == (RECOMPUTE,) * 3
    assert switch.can_change
    assert near(train_once(model), expected)
    least = saved_bytes_compiled(model)
    switch.apply([KEEP] * 3)
    assert near(train_once(model), expected)
    assert saved_bytes_compiled(model) > least
    made = graphs()
    for modes in ([RECOMPUTE, KEEP, KEEP], [RECOMPUTE] * 3, [KEEP] * 3):
        switch.apply(modes)
        assert switch.modes == tuple(modes)
        assert near(train_once(model), expected)
    assert graphs() == made
    assert (SELECTIVE in switch.offered[0]) is compiled_outside
    if compiled_outside:
        switch.apply([SELECTIVE] * 3)
        assert near(train_once(model), expected)
        assert True in switch.selective_matched
    switch.restore()
    assert switch.modes == (RECOMPUTE,) * 3
    assert near(train_once(model), expected)


def test_a_script_may_have_compiled_its_own_checkpointing() -> None:
    model = build_llama()
    model.activation_checkpointing_enable()
    by_forward(model)
    expected = train_once(model)
    switch = BlockSwitch(model, blocks_of(model))
    assert switch.requested == switch.modes == (RECOMPUTE,) * 3
    least = saved_bytes_compiled(model)
    switch.apply([RECOMPUTE, KEEP, KEEP])
    assert switch.modes == (RECOMPUTE, KEEP, KEEP)
    assert near(train_once(model), expected)
    assert saved_bytes_compiled(model) > least
    model.activation_checkpointing_enable()
    assert switch.overruled
    switch.restore()
    assert switch.modes == (RECOMPUTE,) * 3


@pytest.mark.parametrize(("build", "way"), [(build_llama, "torch.compile"), (build_plain, "Module.compile")])
def test_inside_a_compiled_model_a_switch_compiles_anew_and_says_so(build: Callable[[], Any], way: str) -> None:
    inner = build()
    expected = train_once(inner)
    model = torch.compile(inner, backend=BACKEND) if way == "torch.compile" else inner
    if way != "torch.compile":
        inner.compile(backend=BACKEND)
    switch = BlockSwitch(model, blocks_of(inner))
    assert not switch.can_change
    kept = saved_bytes_compiled(model)
    made = graphs()
    switch.apply([RECOMPUTE] * 3)
    assert near(train_once(model), expected)
    assert graphs() > made
    assert saved_bytes_compiled(model) < kept


def test_a_model_with_one_compiled_part_beside_its_blocks_can_be_switched() -> None:
    model = build_plain()
    model.head.compile(backend=BACKEND)
    assert BlockSwitch(model, blocks_of(model)).can_change


def saved_bytes_compiled(model: torch.nn.Module) -> int:
    """Bytes saved for the backward, beside weights: a dispatch mode would not see those of a compiled graph."""
    weights = {p.untyped_storage()._cdata for p in model.parameters()}
    sizes: dict[int, int] = {}
    kept = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in weights:
            sizes[storage._cdata] = storage.nbytes()
            kept.append(tensor)
        return tensor

    torch.manual_seed(11)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(**text())
    return sum(sizes.values())
