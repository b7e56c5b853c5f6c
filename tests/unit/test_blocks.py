"""blocks and identify: the repeated layers of many kinds of models, and what wraps them."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import training_xpu
from training_xpu.blocks import BlockGroup, find_blocks, kind_of, publish, published, recomputed_blocks, unwrap
from training_xpu.engines.identify import identify


class Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = nn.ModuleList(nn.Sequential(nn.Linear(width, width)) for _ in range(2))


class Layer(nn.Module):
    def __init__(self, width: int = 4, experts: int = 0) -> None:
        super().__init__()
        self.attention = Attention(width)
        self.mlp = nn.Linear(width, width)
        if experts:
            self.experts = nn.ModuleList(nn.Sequential(nn.Linear(width, width)) for _ in range(experts))


class Decoder(nn.Module):
    def __init__(self, layers: nn.Module) -> None:
        super().__init__()
        self.embedding = nn.Embedding(8, 4)
        self.layers = layers
        self.head = nn.Linear(4, 8)


def summary(model: nn.Module) -> list[tuple[str, str, int]]:
    return [(g.kind, g.container, len(g.modules)) for g in find_blocks(model)]


def paths_are_right(model: nn.Module, groups: list[BlockGroup]) -> bool:
    return all(model.get_submodule(n) is m for g in groups for n, m in zip(g.names, g.modules, strict=True))


@pytest.mark.parametrize(
    "layers",
    [
        nn.ModuleList(Layer() for _ in range(3)),
        nn.Sequential(*[Layer() for _ in range(3)]),
        nn.ModuleDict({str(i): Layer() for i in range(3)}),
    ],
    ids=["ModuleList", "Sequential", "ModuleDict"],
)
def test_plain_models(layers: nn.Module) -> None:
    model = Decoder(layers)
    (group,) = find_blocks(model)
    assert (group.kind, group.container) == ("Layer", "layers")
    assert group.names == ("layers.0", "layers.1", "layers.2")
    assert paths_are_right(model, [group])


def test_the_model_itself_may_be_the_sequence() -> None:
    assert summary(nn.Sequential(*[Layer() for _ in range(2)])) == [("Layer", "", 2)]


def test_a_dense_layer_among_layers_with_experts_is_a_block_and_experts_are_not() -> None:
    assert summary(Decoder(nn.ModuleList([Layer(), Layer(experts=4), Layer(experts=4)]))) == [("Layer", "layers", 3)]


def test_two_kinds_in_one_list() -> None:
    class Other(Layer):
        pass

    model = Decoder(nn.ModuleList([Layer(), Other(), Layer(), Other()]))
    groups = find_blocks(model)
    assert [(g.kind, g.names) for g in groups] == [
        ("Layer", ("layers.0", "layers.2")),
        ("Other", ("layers.1", "layers.3")),
    ]


def test_stages_of_different_width_are_looked_into() -> None:
    class Stage(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Layer(width) for _ in range(2))

    model = Decoder(nn.ModuleList([Stage(4), Stage(8)]))
    assert summary(model) == [("Layer", "layers.0.blocks", 2), ("Layer", "layers.1.blocks", 2)]


@pytest.mark.parametrize(
    "model",
    [
        nn.Linear(2, 2),
        nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)),
        Decoder(nn.ModuleList([Attention(4).heads[0]])),
        nn.ModuleList(),
    ],
    ids=["leaf", "mlp", "one layer", "empty"],
)
def test_models_without_blocks(model: nn.Module) -> None:
    assert find_blocks(model) == []
    assert recomputed_blocks(model) == (0, 0)


def test_a_shared_layer_is_one_block() -> None:
    layer = Layer()
    assert summary(Decoder(nn.ModuleList([layer, Layer(), layer]))) == [("Layer", "layers", 2)]


def test_an_empty_slot() -> None:
    model = Decoder(nn.ModuleList([Layer(), Layer()]))
    model.register_module("nothing", None)
    assert summary(model) == [("Layer", "layers", 2)]


def llama(**changes: int) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    settings = {"vocab_size": 16, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 3, **changes}
    return LlamaForCausalLM(LlamaConfig(num_attention_heads=2, num_key_value_heads=1, **settings))


class TestTransformers:
    def test_decoder(self) -> None:
        model = llama()
        groups = find_blocks(model)
        assert summary(model) == [("LlamaDecoderLayer", "model.layers", 3)]
        assert groups[0].names[0] == "model.layers.0"
        assert paths_are_right(model, groups)

    def test_a_single_layer_is_a_block_here(self) -> None:
        assert summary(llama(num_hidden_layers=1)) == [("LlamaDecoderLayer", "model.layers", 1)]

    def test_encoder_and_decoder_are_apart(self) -> None:
        from transformers import T5Config, T5ForConditionalGeneration

        config = T5Config(vocab_size=16, d_model=8, d_kv=4, d_ff=8, num_layers=2, num_decoder_layers=3, num_heads=2)
        model = T5ForConditionalGeneration(config)
        assert summary(model) == [("T5Block", "encoder.block", 2), ("T5Block", "decoder.block", 3)]

    def test_vision_and_text(self) -> None:
        from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

        small = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2}
        config = LlavaConfig(
            vision_config=CLIPVisionConfig(num_hidden_layers=2, image_size=4, patch_size=2, **small),
            text_config=LlamaConfig(vocab_size=16, num_hidden_layers=3, num_key_value_heads=1, **small),
        )
        found = {g.kind: len(g.modules) for g in find_blocks(LlavaForConditionalGeneration(config))}
        assert found == {"CLIPEncoderLayer": 2, "LlamaDecoderLayer": 3}

    @pytest.mark.parametrize("every", [1, 2])
    def test_recomputed_blocks(self, every: int) -> None:
        model = llama()
        assert recomputed_blocks(model) == (0, 3)
        model.activation_checkpointing_enable(every_n_layers=every)  # type: ignore[operator]
        assert recomputed_blocks(model) == ({1: 3, 2: 2}[every], 3)
        model.activation_checkpointing_disable()  # type: ignore[operator]
        assert recomputed_blocks(model) == (0, 3)

    def test_the_older_names_of_the_switch(self) -> None:
        model = llama()
        model.gradient_checkpointing_enable()  # type: ignore[operator]
        assert recomputed_blocks(model) == (3, 3)
        (group,) = find_blocks(model)
        group.modules[1].gradient_checkpointing = False  # type: ignore[assignment]
        assert recomputed_blocks(model) == (2, 3)


class TestWrappers:
    @pytest.fixture(autouse=True)
    def _group(self) -> Iterator[None]:
        torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
        yield
        torch.distributed.destroy_process_group()

    def test_ddp(self) -> None:
        inner = llama()
        model = DistributedDataParallel(inner)
        assert summary(model) == [("LlamaDecoderLayer", "module.model.layers", 3)]
        assert paths_are_right(model, find_blocks(model))
        assert (identify(model), unwrap(model)) == ("ddp", inner)

    def test_compiled_whole_and_per_block(self) -> None:
        inner = Decoder(nn.ModuleList(Layer() for _ in range(3)))
        inner.layers[1] = torch.compile(inner.layers[1], backend="eager")  # type: ignore[index,operator]
        model = torch.compile(inner, backend="eager")
        (group,) = find_blocks(model)
        assert group.names == ("_orig_mod.layers.0", "_orig_mod.layers.1._orig_mod", "_orig_mod.layers.2")
        assert {type(m) for m in group.modules} == {Layer}
        assert paths_are_right(model, [group])
        assert (identify(model), unwrap(model)) == ("plain", inner)

    def test_compiled_ddp_is_ddp(self) -> None:
        inner = Decoder(nn.ModuleList(Layer() for _ in range(2)))
        model = torch.compile(DistributedDataParallel(inner), backend="eager")
        assert (identify(model), unwrap(model)) == ("ddp", inner)

    def test_fsdp2_keeps_the_kind(self) -> None:
        model = llama()
        mesh = torch.distributed.init_device_mesh("cpu", (1,))
        for layer in model.model.layers:  # type: ignore[union-attr]
            fully_shard(layer, mesh=mesh)
        assert identify(model) == "fsdp"  # the root is not sharded yet
        fully_shard(model, mesh=mesh)
        assert identify(model) == "fsdp"
        assert summary(model) == [("LlamaDecoderLayer", "model.layers", 3)]
        assert kind_of(model) == "LlamaForCausalLM"
        assert unwrap(model) is model

    def test_torchs_checkpoint_wrapper(self) -> None:
        model = Decoder(nn.ModuleList(Layer() for _ in range(3)))
        model.layers[2] = checkpoint_wrapper(model.layers[2])  # type: ignore[index,operator]
        assert summary(model) == [("Layer", "layers", 3)]
        assert recomputed_blocks(model) == (1, 3)

    def test_classes_of_packages_that_are_not_here(self) -> None:
        class DeepSpeedEngine(nn.Module):
            def __init__(self, module: nn.Module) -> None:
                super().__init__()
                self.module = module

        class BaseTuner(nn.Module):
            def __init__(self, model: nn.Module) -> None:
                super().__init__()
                self.model = model

        class PeftModel(nn.Module):
            def __init__(self, model: nn.Module) -> None:
                super().__init__()
                self.base_model = BaseTuner(model)

        inner = llama()
        model = DeepSpeedEngine(PeftModel(inner))
        assert (identify(model), unwrap(model)) == ("deepspeed", inner)
        assert summary(model) == [("LlamaDecoderLayer", "module.base_model.model.model.layers", 3)]

    def test_a_users_attribute_called_module_is_no_wrapper(self) -> None:
        model = Decoder(nn.ModuleList(Layer() for _ in range(2)))
        model.module = nn.Linear(2, 2)
        assert unwrap(model) is model


def test_transformers_and_plain() -> None:
    assert identify(llama()) == "transformers"
    assert identify(nn.Linear(2, 2)) == "plain"


def test_what_is_published_belongs_to_the_model_with_and_without_wrappers_and_goes_with_it() -> None:
    from training_xpu import blocks

    inner = Decoder(nn.ModuleList(Layer() for _ in range(2)))
    compiled = torch.compile(inner, backend="eager")
    publish(compiled, "loss", "chunked")
    assert published(inner, "loss") == "chunked"
    publish(inner, "loss", "whole")
    assert published(compiled, "loss") == "whole"
    assert published(inner, "nothing") is None
    assert published(nn.Linear(2, 2), "loss", "default") == "default"
    before = len(blocks._published)
    del inner, compiled
    torch._dynamo.reset()
    gc.collect()
    assert len(blocks._published) == before - 1


def test_the_public_names_of_the_package() -> None:
    assert training_xpu.find_blocks is find_blocks
    assert training_xpu.identify is identify
    assert set(training_xpu.__all__) <= set(dir(training_xpu))
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = training_xpu.nonsense
