"""What is compiled of a model, what a call needs a graph for, and when one is made."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from recompute_models import Plain, llama

from training_xpu.compiler.backend import Backend
from training_xpu.compiler.call_shape import NotCompilable, call_shape
from training_xpu.compiler.compiled_region import MOST_STRUCTURES, CompiledRegion
from training_xpu.compiler.forward import Forward
from training_xpu.compiler.regions import Region, find_regions


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    """Dynamo remembers by code what could not be compiled, and the tests share theirs."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def eager(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
    return graph.forward


class Block(torch.nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(width, width)

    def forward(self, hidden: torch.Tensor, scale: float = 1.0, cache: Any = None) -> torch.Tensor:
        return hidden + torch.tanh(self.linear(hidden)) * scale


class Breaking(Block):
    def forward(self, hidden: torch.Tensor, scale: float = 1.0, cache: Any = None) -> torch.Tensor:
        scaled = self.linear(hidden)
        torch._dynamo.graph_break()
        return hidden + torch.tanh(scaled)


def region_of(*modules: torch.nn.Module, compiler: Any = eager) -> CompiledRegion:
    region = CompiledRegion(Region("Block", modules, True), Backend(compiler=compiler))
    region.may_open_sizes = True
    for module in modules:
        Forward(module, region).install()
    return region


class TestFinding:
    def test_blocks_share_a_region_and_single_operators_have_none(self) -> None:
        regions = find_regions(llama(layers=3))
        assert [(r.name, len(r.modules), r.is_block) for r in regions] == [
            ("LlamaDecoderLayer", 3, True),
            ("model.norm", 1, False),
            ("model.rotary_emb", 1, False),
        ]

    def test_a_plain_model(self) -> None:
        assert [(r.name, len(r.modules)) for r in find_regions(Plain())] == [("PlainBlock", 3)]

    def test_what_is_compiled_already_is_left_alone(self) -> None:
        model = llama(layers=3)
        model.model.layers[0].compile(backend="eager")
        model.model.layers[1].forward = model.model.layers[1].forward
        assert find_regions(model)[0].modules == (model.model.layers[2],)


class TestCallShape:
    def test_sizes_are_no_part_of_the_structure(self) -> None:
        first, second = torch.zeros(2, 3), torch.zeros(2, 5)
        assert call_shape((first,), {}).structure == call_shape((second,), {}).structure
        assert call_shape((first,), {}).sizes != call_shape((second,), {}).sizes

    @pytest.mark.parametrize(
        "other",
        [
            {"mask": None},
            {"mask": torch.zeros(2, 3, dtype=torch.bool)},
            {"mask": torch.zeros(3, 2).t()},
            {"mask": torch.zeros(2, 3, requires_grad=True)},
            {"mask": (torch.zeros(2, 3),)},
            {"other": torch.zeros(2, 3)},
        ],
    )
    def test_all_else_is(self, other: dict[str, Any]) -> None:
        assert call_shape((), {"mask": torch.zeros(2, 3)}).structure != call_shape((), other).structure

    def test_autocast_is(self) -> None:
        outside = call_shape((torch.zeros(1),), {}).structure
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert call_shape((torch.zeros(1),), {}).structure != outside

    def test_a_cache_of_keys_and_values_is_for_plain_python(self) -> None:
        from transformers import DynamicCache

        with pytest.raises(NotCompilable, match="DynamicCache"):
            call_shape((), {"past_key_values": DynamicCache()})


class TestGraphs:
    def test_one_graph_serves_all_modules(self) -> None:
        blocks = [Block() for _ in range(4)]
        region = region_of(*blocks)
        hidden = torch.randn(2, 3, 8)
        for block in blocks:
            expected = type(block).forward(block, hidden)
            torch.testing.assert_close(block(hidden), expected)
        assert region.backend.record.graphs == 1
        assert region.recompiles == 0

    def test_fifty_lengths_cost_two_graphs(self) -> None:
        block = Block()
        region = region_of(block)
        for length in range(3, 53):
            hidden = torch.randn(2, length, 8)
            torch.testing.assert_close(block(hidden), Block.forward(block, hidden))
        assert region.backend.record.graphs == 2
        assert region.recompiles == 1

    def test_batch_and_length_may_change_one_after_the_other(self) -> None:
        block = Block()
        region = region_of(block)
        for batch, length in [(2, 6), (2, 9), (3, 9), (4, 7), (2, 6), (5, 11)]:
            block(torch.randn(batch, length, 8))
        assert region.backend.record.graphs == 2

    def test_other_sizes_wait_for_the_ranks(self) -> None:
        block = Block()
        region = region_of(block)
        region.may_open_sizes = False
        block(torch.randn(2, 3, 8))
        block(torch.randn(2, 4, 8))
        assert (region.backend.record.graphs, region.sizes_changed) == (1, True)
        region.may_open_sizes = region.open_next = True
        block(torch.randn(2, 3, 8))  # the sizes known before: made all the same, in step with the other ranks
        assert region.backend.record.graphs == 2
        block(torch.randn(2, 7, 8))
        block(torch.randn(2, 3, 8))
        assert region.backend.record.graphs == 2

    def test_ways_to_call_are_limited(self) -> None:
        block = Block()
        region = region_of(block)
        for dtype in (torch.float32, torch.bfloat16, torch.float64):
            for grad in (False, True):
                own = Block().to(dtype)
                own.load_state_dict(block.state_dict())
                Forward(own, region).install()
                own(torch.randn(2, 3, 8, dtype=dtype, requires_grad=grad))
        assert region.backend.record.graphs == MOST_STRUCTURES
        assert "more than 4 ways" in region.plain_reason

    def test_a_break_is_survived_and_named(self) -> None:
        block = Breaking()
        region = region_of(block)
        hidden = torch.randn(2, 3, 8)
        torch.testing.assert_close(block(hidden), Breaking.forward(block, hidden))
        (found,) = region.backend.record.breaks
        assert found.file == __file__
        assert found.line == Breaking.forward.__code__.co_firstlineno + 2
        assert region.backend.record.graphs == 2

    def test_a_compiler_that_fails_leaves_plain_python(self) -> None:
        def fails(graph: Any, inputs: Any) -> Any:
            raise RuntimeError("no code for this")

        block = Block()
        region = region_of(block, compiler=fails)
        hidden = torch.randn(2, 3, 8)
        torch.testing.assert_close(block(hidden), Block.forward(block, hidden))
        assert region.backend.record.graphs == 0
        assert "no code for this" in region.backend.record.failures[0]
        block(hidden)

    def test_weights_that_thaw_get_a_graph_of_their_own(self) -> None:
        block = Block()
        block.linear.weight.requires_grad_(False)
        region = region_of(block)
        hidden = torch.randn(2, 3, 8, requires_grad=True)
        block(hidden)
        block.linear.weight.requires_grad_(True)
        block(hidden).sum().backward()  # in plain Python: nothing compiles behind the back of a settled call
        assert region.backend.record.graphs == 1
        assert block.linear.weight.grad is not None
        region.look_again()
        block(hidden)
        assert region.backend.record.graphs == 2

    def test_errors_of_the_model_are_the_models(self) -> None:
        block = Block()
        region_of(block)
        with pytest.raises(RuntimeError, match="shapes"):
            block(torch.randn(2, 3, 7))

    def test_evaluation_and_caches_stay_plain(self) -> None:
        block = Block()
        region = region_of(block)
        with torch.no_grad():
            block(torch.randn(2, 3, 8))
        block.eval()
        block(torch.randn(2, 3, 8))
        block.train()
        from transformers import DynamicCache

        block(torch.randn(2, 3, 8), cache=DynamicCache())
        assert region.backend.record.graphs == 0
        assert "DynamicCache" in region.plain_reason


class TestCopies:
    def test_a_copy_and_a_pickle_are_plain(self) -> None:
        block = Block()
        region = region_of(block)
        for other in (copy.deepcopy(block), pickle.loads(pickle.dumps(block))):
            assert not isinstance(other.__dict__.get("forward"), Forward)
            hidden = torch.randn(1, 2, 8)
            torch.testing.assert_close(other(hidden), Block.forward(other, hidden))
            other.linear.weight.data.zero_()
            other.linear.bias.data.zero_()
            torch.testing.assert_close(other(hidden), hidden)  # bound to the copy, not to the original
        assert region.backend.record.graphs == 0

    def test_taken_back(self) -> None:
        block = Block()
        region = region_of(block)
        forward = block.__dict__["forward"]
        forward.remove()
        assert "forward" not in block.__dict__
        forward(torch.randn(1, 2, 8))
        assert region.backend.record.graphs == 0
