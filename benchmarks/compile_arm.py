"""One rank of one arm of `compile.py`: builds a model under an engine and trains on request.

Reads lines on standard input, "N" for N steps and nothing else for the end, and answers each on standard output with a
line of JSON: seconds of each step, the losses, and on the first request the gradients' norm of the first step.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import time
from typing import Any

import torch
import torch.distributed as dist

from training_xpu.blocks import find_blocks
from training_xpu.engines.base import AdamWSettings, EngineSettings
from training_xpu.engines.model import build_model

ADAM = AdamWSettings(1e-4, 0.9, 0.95, 1e-8, 0.1, 1.0)
BREAKS = ("none", "print", "item", "branch")


def config_of(family: str, hidden: int, layers: int, vocabulary: int) -> dict[str, Any]:
    heads = hidden // 64
    config: dict[str, Any] = {
        "model_type": family,
        "hidden_size": hidden,
        "intermediate_size": 3 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": max(1, heads // 2),
        "vocab_size": vocabulary,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": False,
    }
    if family == "qwen3":
        config["head_dim"] = 64
    if family == "mixtral":
        config |= {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": hidden}
    return config


class Arm:
    """A model under an engine, compiled as the arm says."""

    def __init__(self, asked: argparse.Namespace) -> None:
        self.asked = asked
        config = config_of(asked.family, asked.hidden, asked.layers, asked.vocabulary)
        stage = int(asked.engine[-1]) if asked.engine.startswith("zero") else 0
        settings = EngineSettings(asked.dtype, asked.batch, 1, stage, ADAM)
        device = torch.device("cpu")

        def build() -> torch.nn.Module:
            model = build_model(config, None, 0)
            plant_break(model, asked.planted)
            if asked.arm == "regional" and asked.engine != "fsdp":
                return in_regions(model, in_place=stage > 0)
            return model

        if asked.engine == "ddp":
            from training_xpu.engines.ddp import DdpTraining

            self.engine: Any = DdpTraining(build, settings, device)
            if asked.arm == "stock":
                self.engine.wrapped = torch.compile(self.engine.wrapped)
        elif asked.engine == "fsdp":
            from training_xpu.engines.fsdp import FsdpTraining

            self.engine = FsdpTraining(build, lambda: build_model(config, None, 0), settings, device)
            if asked.arm == "stock":
                self.engine.model.compile()
            elif asked.arm == "regional":
                in_regions(self.engine.model, in_place=True)
        else:
            from training_xpu.engines.deepspeed import DeepSpeedTraining

            self.engine = DeepSpeedTraining(build, settings, device, False)
            if asked.arm == "stock":
                self.engine.engine.compile()
        self.chance = random.Random(1)
        self.generator = torch.Generator().manual_seed(2 + dist.get_rank())
        self.vocabulary = asked.vocabulary

    def step(self) -> tuple[float, float]:
        """Seconds and loss of one step."""
        length = self.asked.length
        if self.asked.lengths == "variable":
            length = self.chance.randrange(length // 2, length + 1)
        tokens = torch.randint(0, self.vocabulary, (self.asked.batch, length), generator=self.generator)
        dist.barrier()
        begun = time.perf_counter()
        with self.engine.micro_batch(True):
            loss = self.engine.forward({"input_ids": tokens, "labels": tokens}).loss
            self.engine.backward(loss)
        self.engine.update(1e-4)
        value = float(loss.detach())
        return time.perf_counter() - begun, value


def in_regions(model: torch.nn.Module, in_place: bool) -> torch.nn.Module:
    """Accelerate's regional compilation, in its two ways."""
    from accelerate.utils import compile_regions

    if not in_place:
        compiled: torch.nn.Module = compile_regions(model)
        return compiled
    for group in find_blocks(model):
        for block in group.modules:
            block.compile()
    return model


def plant_break(model: torch.nn.Module, kind: str) -> None:
    """Something in every attention that no graph can hold."""
    if kind == "none":
        return
    for group in find_blocks(model):
        for block in group.modules:
            cls = type(block.self_attn)
            if cls.__name__.startswith("Breaking"):
                continue
            block.self_attn.__class__ = _breaking(cls, kind)


_made: dict[type, type] = {}


def _breaking(cls: type, kind: str) -> type:
    if cls not in _made:

        def forward(self: Any, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if kind == "print":
                print("", end="", file=sys.stderr)
            elif kind == "item":
                hidden_states = hidden_states * (1.0 if hidden_states[0, 0, 0].item() < 1e9 else 0.0)
            elif hidden_states.detach().abs().max() > 1e9:
                hidden_states = hidden_states * 0.0
            return cls.forward(self, hidden_states, *args, **kwargs)  # type: ignore[attr-defined]

        _made[cls] = type(f"Breaking{cls.__name__}", (cls,), {"forward": forward})
    return _made[cls]


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--arm", choices=["eager", "stock", "regional", "ours"])
    options.add_argument("--engine")
    options.add_argument("--family")
    options.add_argument("--dtype")
    options.add_argument("--lengths", choices=["fixed", "variable"])
    options.add_argument("--planted", choices=BREAKS, default="none")
    for name in ("hidden", "layers", "vocabulary", "batch", "length"):
        options.add_argument(f"--{name}", type=int)
    asked = options.parse_args()
    # The answers go where standard output was: what a model or a compiler prints must not get among them.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    dist.init_process_group("gloo")
    arm = Arm(asked)
    for line in sys.stdin:
        if not line.strip():
            break
        steps = [arm.step() for _ in range(int(line))]
        print(json.dumps({"seconds": [s for s, _ in steps], "losses": [loss for _, loss in steps]}), file=answers)
        answers.flush()
    from torch._dynamo.utils import counters

    graphs = counters["stats"].get("unique_graphs", 0)
    print(json.dumps({"graphs": graphs, "breaks": sum(counters["graph_break"].values())}), file=answers)
    answers.flush()
    os._exit(0)  # Gloo's threads now and then abort the interpreter's own end


if __name__ == "__main__":
    main()
