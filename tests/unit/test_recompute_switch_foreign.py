"""Blocks that a script or a framework checkpoints by means of its own, and models of several kinds of blocks."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from recompute_models import VOCABULARY, Output, Plain, blocks_of, count_runs, same, saved_bytes, text, train_once
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from training_xpu.recompute.switching.policies import is_kept
from training_xpu.recompute.switching.switch import BlockSwitch, Mode

KEEP, SELECTIVE, RECOMPUTE = Mode.KEEP, Mode.SELECTIVE, Mode.RECOMPUTE


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("implementation", list(CheckpointImpl))
def test_blocks_in_torchs_checkpoint_wrapper_can_be_kept(implementation: CheckpointImpl) -> None:
    expected = train_once(Plain())
    model = Plain()
    blocks = set(blocks_of(model))
    apply_activation_checkpointing(
        model, lambda m: checkpoint_wrapper(m, checkpoint_impl=implementation), check_fn=lambda m: m in blocks
    )
    keys = list(model.state_dict())
    switch = BlockSwitch(model, blocks_of(model))
    assert switch.how == ("checkpoint wrapper",) * 3
    assert switch.requested == switch.modes == (RECOMPUTE,) * 3
    switch.apply([RECOMPUTE, KEEP, SELECTIVE])
    assert switch.reentrant_replaced is (implementation is CheckpointImpl.REENTRANT)
    assert same(train_once(model), expected)
    assert list(model.state_dict()) == keys
    with count_runs(blocks_of(model)) as runs:
        train_once(model)
    assert runs.total == 5
    assert same(train_once(pickle.loads(pickle.dumps(model))), expected)
    switch.restore()
    assert switch.modes == (RECOMPUTE,) * 3
    assert same(train_once(model), expected)


class OwnCheckpoint(Plain):
    """Calls a checkpoint function on every block in its own forward."""

    reentrant = False

    def run_block(self, block: torch.nn.Module, hidden: torch.Tensor) -> torch.Tensor:
        def run(hidden: torch.Tensor) -> torch.Tensor:
            return block(hidden, scale=0.5)  # type: ignore[no-any-return]

        return checkpoint(run, hidden, use_reentrant=self.reentrant)  # type: ignore[no-any-return]


class OwnReentrant(OwnCheckpoint):
    reentrant = True


class OwnSequential(Plain):
    """Recomputes its blocks in two stretches."""

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> Output:
        def one(block: torch.nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
            return lambda hidden: block(hidden, scale=0.5)

        steps = [one(block) for block in self.layers]
        hidden = checkpoint_sequential(steps, 2, self.embedding(input_ids), use_reentrant=False)
        return Output(torch.nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten()))


@pytest.mark.parametrize("build", [OwnCheckpoint, OwnReentrant])
def test_a_checkpoint_in_the_scripts_forward_is_left_as_it_is_and_told(build: type[Plain]) -> None:
    expected = train_once(Plain())
    model = build()
    switch = BlockSwitch(model, blocks_of(model))
    switch.apply([RECOMPUTE, SELECTIVE, KEEP])
    with count_runs(blocks_of(model)) as runs:
        assert same(train_once(model), expected)
    assert runs.total == 6
    assert switch.by_script == (True, True, False)


def test_blocks_between_the_scripts_stretches_are_switched_as_ever() -> None:
    expected = train_once(Plain())
    model = OwnSequential()
    switch = BlockSwitch(model, blocks_of(model))
    switch.apply([RECOMPUTE] * 3)
    assert same(train_once(model), expected)
    # torch does not recompute the last stretch, here the last two blocks.
    assert switch.by_script == (True, False, False)


class OlderContainer(Plain):
    """As transformers' models were before each layer had a flag: the model checkpoints its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.gradient_checkpointing = True
        self._gradient_checkpointing_func = lambda run, hidden: checkpoint(run, hidden, use_reentrant=False)

    def run_block(self, block: torch.nn.Module, hidden: torch.Tensor) -> torch.Tensor:
        return block(hidden, scale=0.5)  # type: ignore[no-any-return]

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> Output:
        hidden = self.embedding(input_ids)
        for block in self.layers:
            if self.gradient_checkpointing and self.training:
                hidden = self._gradient_checkpointing_func(lambda h, block=block: block(h, scale=0.5), hidden)
            else:
                hidden = block(hidden, scale=0.5)
        return Output(torch.nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten()))


def test_a_container_that_checkpoints_all_its_blocks_gives_them_to_us() -> None:
    expected = train_once(Plain())
    model = OlderContainer()
    switch = BlockSwitch(model, blocks_of(model))
    assert switch.requested == (RECOMPUTE,) * 3
    switch.apply([RECOMPUTE, KEEP, KEEP])
    with count_runs(blocks_of(model)) as runs:
        assert same(train_once(model), expected)
    assert runs.total == 4
    assert switch.requested == (RECOMPUTE,) * 3
    switch.restore()
    assert model.gradient_checkpointing
    with count_runs(blocks_of(model)) as runs:
        assert same(train_once(model), expected)
    assert runs.total == 6


class GradientCheckpointingLayer(torch.nn.Module):
    """As in transformers before 5.24: the whole call is checkpointed, hooks and all, not the forward."""

    gradient_checkpointing = False

    def __init__(self, block: torch.nn.Module) -> None:
        super().__init__()
        self.block = block

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        call = super().__call__
        if self.gradient_checkpointing and self.training:
            return self._gradient_checkpointing_func(partial(call, **kwargs), *args)
        return call(*args, **kwargs)

    def forward(self, hidden: torch.Tensor, *, scale: float) -> torch.Tensor:
        return self.block(hidden, scale=scale)  # type: ignore[no-any-return]


def test_layers_of_an_older_transformers() -> None:
    model = Plain(dropout=0.3)
    model.layers = torch.nn.ModuleList(GradientCheckpointingLayer(block) for block in model.layers)
    expected = train_once(model)
    switch = BlockSwitch(model, blocks_of(model))
    assert switch.how == ("flag",) * 3
    kept = saved_bytes(model)
    for modes in ([RECOMPUTE] * 3, [SELECTIVE] * 3, [KEEP, RECOMPUTE, SELECTIVE]):
        switch.apply(modes)
        assert same(train_once(model), expected)
        assert saved_bytes(model) < kept
    switch.apply([RECOMPUTE] * 3)
    with count_runs(blocks_of(model)) as runs:
        model.eval()
        with torch.no_grad():
            model(**text())
    assert runs.total == 3


class MegatronLike(Plain):
    """Carries what Megatron's TransformerBlock is recognised by, and recomputes as it does."""

    def __init__(self, **settings: Any) -> None:
        super().__init__()
        empty = {"recompute_granularity": None, "recompute_method": None, "recompute_num_layers": None}
        self.config = SimpleNamespace(**{**empty, **settings})

    def _checkpointed_forward(self, hidden: torch.Tensor) -> torch.Tensor:
        if self.config.recompute_method == "uniform":
            for block in self.layers:
                hidden = checkpoint(lambda h, block=block: block(h, scale=0.5), hidden, use_reentrant=True)
            return hidden
        assert self.config.recompute_method == "block"
        for index, block in enumerate(self.layers):
            if index < self.config.recompute_num_layers:
                hidden = checkpoint(lambda h, block=block: block(h, scale=0.5), hidden, use_reentrant=True)
            else:
                hidden = block(hidden, scale=0.5)
        return hidden

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> Output:
        hidden = self.embedding(input_ids)
        if self.config.recompute_granularity == "full" and self.training:
            hidden = self._checkpointed_forward(hidden)
        else:
            for block in self.layers:
                hidden = block(hidden, scale=0.5)
        return Output(torch.nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten()))


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"recompute_granularity": "selective"},
        {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
        {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 2},
    ],
)
def test_megatrons_own_recompute_takes_the_first_layers(settings: dict[str, Any]) -> None:
    expected = train_once(Plain())
    model = MegatronLike(**settings)
    before = vars(model.config).copy()
    asked = {None: 0, "block": 2, "uniform": 3}[settings.get("recompute_method")]
    switch = BlockSwitch(model, blocks_of(model))
    assert switch.how == ("megatron",) * 3
    assert switch.requested == switch.modes == (RECOMPUTE,) * asked + (KEEP,) * (3 - asked)
    assert switch.offered == (frozenset({KEEP, RECOMPUTE}),) * 3
    for count in (1, 3, 0, 2):
        modes = (RECOMPUTE,) * count + (KEEP,) * (3 - count)
        assert switch.apply(modes)
        assert switch.modes == modes
        with count_runs(blocks_of(model)) as runs:
            assert same(train_once(model), expected)
        assert runs.total == 3 + count
        if count == 0:
            selective = settings.get("recompute_granularity") == "selective"
            assert model.config.recompute_granularity == ("selective" if selective else None)
    with pytest.raises(ValueError, match="first layers"):
        switch.apply([KEEP, KEEP, RECOMPUTE])
    with pytest.raises(ValueError, match="selective"):
        switch.apply([SELECTIVE] * 3)
    assert switch.modes == (RECOMPUTE, RECOMPUTE, KEEP)
    model.config.recompute_num_layers = 3
    assert switch.overruled
    assert not switch.apply([KEEP] * 3)
    model.config.recompute_num_layers = 2
    switch.restore()
    assert vars(model.config) == before


def moe() -> Any:
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=VOCABULARY,
        num_local_experts=4,
        output_router_logits=True,
        router_jitter_noise=0.3,
        attention_dropout=0.2,
        use_cache=False,
    )
    return MixtralForCausalLM(config)


def mixed_attention() -> Any:
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    config = Gemma3TextConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        vocab_size=VOCABULARY,
        sliding_window=4,
        layer_types=["sliding_attention", "full_attention"] * 2,
        attention_dropout=0.2,
        use_cache=True,
    )
    return Gemma3ForCausalLM(config)


def encoder_and_decoder() -> Any:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        d_model=32,
        d_ff=48,
        num_layers=2,
        num_heads=4,
        d_kv=8,
        vocab_size=VOCABULARY,
        decoder_start_token_id=0,
        use_cache=False,  # its cache, which recompute does without, changes the order of sums in the cross-attention
    )
    return T5ForConditionalGeneration(config)


def linear_attention() -> Any:
    from transformers import JambaConfig, JambaForCausalLM

    config = JambaConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=VOCABULARY,
        attn_layer_period=2,
        attn_layer_offset=1,
        num_experts=2,
        use_mamba_kernels=False,
        mamba_d_state=4,
    )
    return JambaForCausalLM(config)


@pytest.mark.parametrize("build", [moe, mixed_attention, encoder_and_decoder, linear_attention])
@pytest.mark.parametrize("autocast", [False, True])
def test_models_of_several_kinds_of_blocks(build: Callable[[], Any], autocast: bool) -> None:
    torch.manual_seed(0)
    model = build().train()
    expected = train_once(model, autocast)
    assert same(train_once(model, autocast), expected)
    switch = BlockSwitch(model, blocks_of(model))
    count = len(switch.modes)
    kept = saved_bytes(model)
    for modes in ([RECOMPUTE] * count, [SELECTIVE] * count, ([RECOMPUTE, KEEP, SELECTIVE] * count)[:count]):
        switch.apply(modes)
        assert same(train_once(model, autocast), expected)
        assert saved_bytes(model) < kept
    assert all(matched is not False for matched in switch.selective_matched)


def test_vision_and_text_layers_of_one_model() -> None:
    from transformers import CLIPConfig, CLIPModel

    torch.manual_seed(0)
    small: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
    config = CLIPConfig(
        text_config={**small, "num_hidden_layers": 3, "vocab_size": VOCABULARY, "max_position_embeddings": 12},
        vision_config={**small, "num_hidden_layers": 2, "image_size": 8, "patch_size": 4},
        projection_dim=8,
    )
    model = CLIPModel(config).train()
    tokens = text()["input_ids"]
    images = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(1))

    def once() -> list[torch.Tensor | None]:
        model.zero_grad()
        loss = model(input_ids=tokens, pixel_values=images, return_loss=True).loss
        loss.backward()
        return [loss.detach(), *(None if p.grad is None else p.grad.clone() for p in model.parameters())]

    expected = once()
    switch = BlockSwitch(model, blocks_of(model))
    assert len(switch.modes) == 5
    switch.apply([RECOMPUTE, KEEP, SELECTIVE, RECOMPUTE, KEEP])
    for a, b in zip(once(), expected, strict=True):
        assert a is b or (a is not None and b is not None and torch.equal(a, b))


def test_a_copy_of_a_switched_older_container_is_as_good() -> None:
    model = OlderContainer()
    expected = train_once(model)
    switch = BlockSwitch(model, blocks_of(model))
    switch.apply([RECOMPUTE, KEEP, KEEP])
    assert same(train_once(copy.deepcopy(model)), expected)


def test_attention_that_drops_out_is_not_kept() -> None:
    operator = torch.ops.aten._scaled_dot_product_flash_attention.default
    hidden = torch.ones(1)
    assert is_kept(operator, (hidden, hidden, hidden))
    assert is_kept(operator, (hidden, hidden, hidden, 0.0, True))
    assert not is_kept(operator, (hidden, hidden, hidden, 0.1))
    assert not is_kept(operator, (hidden, hidden, hidden), {"dropout_p": 0.1})
    assert is_kept(torch.ops.aten.mm.default, (hidden, hidden))
    assert not is_kept(torch.ops.aten.native_dropout.default, (hidden, 0.1, True))


def test_the_operators_of_real_matrix_products_and_attention_are_known() -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    class Names(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()  # type: ignore[no-untyped-call]
            self.kept = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.kept += is_kept(func, args, kwargs)
            return func(*args, **(kwargs or {}))

    functional = torch.nn.functional
    a, b, bias = torch.ones(4, 8), torch.ones(8, 16), torch.ones(16)
    heads = torch.ones(2, 4, 16, 8)
    ends = torch.tensor([2, 4], dtype=torch.int32)
    products: list[Callable[[], Any]] = [
        lambda: a @ b,
        lambda: functional.linear(a, b.T),
        lambda: functional.linear(a, b.T, bias),
        lambda: torch.ones(3, 4, 8) @ b,
        lambda: torch.bmm(torch.ones(2, 4, 8), torch.ones(2, 8, 4)),
        lambda: torch.einsum("ij,jk->ik", a, b),
        lambda: functional.scaled_dot_product_attention(heads, heads, heads, is_causal=True),
        lambda: functional.scaled_dot_product_attention(heads, heads, heads, attn_mask=torch.zeros(16, 16)),
        lambda: torch._grouped_mm(a.bfloat16(), torch.ones(2, 8, 16, dtype=torch.bfloat16), offs=ends),
    ]
    for product in products:
        with Names() as names:
            product()
        assert names.kept >= 1
