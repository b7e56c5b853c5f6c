"""Two ranks train small models under each engine, without and with blocks that are switched at every micro batch.

`recompute_engines.py FILE ENGINE...` writes {case: {"without": trace, "with": trace, ...}} on rank 0, in which a trace
has digests of every loss, every gradient and, at the end, every weight, the same for both if nothing differs in a bit.
"""

import contextlib
import hashlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "unit"))

import torch
import torch.distributed as dist
from recompute_models import VOCABULARY, LoraLinear, Plain, blocks_of, count_runs, llama
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from training_xpu.recompute.switching.switch import BlockSwitch, Mode

UPDATES, MICRO_BATCHES = 3, 2
KEEP, SELECTIVE, RECOMPUTE = Mode.KEEP, Mode.SELECTIVE, Mode.RECOMPUTE
PLANS = [
    [RECOMPUTE, RECOMPUTE, RECOMPUTE],
    [RECOMPUTE, KEEP, KEEP],
    [KEEP, KEEP, KEEP],
    [SELECTIVE, SELECTIVE, SELECTIVE],
    [KEEP, RECOMPUTE, SELECTIVE],
    [RECOMPUTE, RECOMPUTE, KEEP],
]


def lora() -> Any:
    """All but low-rank additions is frozen, embeddings and norms as well."""
    model = llama(layers=3)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    for name in ("q_proj", "down_proj"):
        LoraLinear.replace_in(model, name)
    return model


def frozen_norms() -> Any:
    model = llama(layers=3)
    for name, parameter in model.named_parameters():
        if "norm" in name or "embed" in name:
            parameter.requires_grad_(False)
    return model


def moe() -> Any:
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    config = MixtralConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=VOCABULARY,
        num_local_experts=4,
        output_router_logits=True,
        router_jitter_noise=0.0,  # transformers draws it in place, which ZeRO-3 refuses
        attention_dropout=0.2,
        use_cache=False,
    )
    return MixtralForCausalLM(config).train()


class OwningBlock(torch.nn.Module):
    """A block with a parameter of its own, outside of its submodules, and one that is never used."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.scale = torch.nn.Parameter(torch.full((32,), 0.7))
        self.unused = torch.nn.Linear(4, 4)

    def forward(self, hidden: torch.Tensor, *, scale: float) -> torch.Tensor:
        return torch.tanh(self.inner(hidden, scale=scale) * self.scale)


def owning() -> Any:
    model = Plain(dropout=0.2)
    model.layers = torch.nn.ModuleList(OwningBlock(block) for block in model.layers)
    return model


MODELS = {
    "llama": lambda: llama(layers=3),
    "lora": lora,
    "frozen norms": frozen_norms,
    "moe": moe,
    "own weights": owning,
}


class Ddp:
    def __init__(self, model: torch.nn.Module, dtype: str) -> None:
        self.model, self.dtype = model, dtype
        self.root = DistributedDataParallel(model, find_unused_parameters=hasattr(model, "run_block"))
        self.optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=self.dtype == "bf16"):
            return self.root(input_ids=tokens, labels=tokens).loss

    def backward(self, loss: torch.Tensor, last: bool) -> None:
        loss.backward()

    def accumulating(self, last: bool) -> Any:
        return contextlib.nullcontext() if last else self.root.no_sync()

    def gradients(self) -> list[torch.Tensor]:
        return [p.grad for p in self.model.parameters() if p.grad is not None]

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def weights(self) -> list[torch.Tensor]:
        return list(self.model.parameters())


class Fsdp(Ddp):
    def __init__(self, model: torch.nn.Module, dtype: str) -> None:
        self.model = model
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if dtype == "bf16" else MixedPrecisionPolicy()
        for block in blocks_of(model):
            fully_shard(block, mp_policy=policy)
        self.root: Any = fully_shard(model, mp_policy=policy)
        self.optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.root(input_ids=tokens, labels=tokens).loss

    def accumulating(self, last: bool) -> Any:
        self.root.set_requires_gradient_sync(last)
        return contextlib.nullcontext()

    def gradients(self) -> list[torch.Tensor]:
        return [p.grad.to_local() for p in self.model.parameters() if p.grad is not None]

    def weights(self) -> list[torch.Tensor]:
        return [p.to_local() for p in self.model.parameters()]


class Zero(Ddp):
    def __init__(self, model: torch.nn.Module, dtype: str, stage: int) -> None:
        import deepspeed

        self.model = model
        config = {
            "train_micro_batch_size_per_gpu": 2,
            "gradient_accumulation_steps": MICRO_BATCHES,
            "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 40},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
            "steps_per_print": 2**31,
        }
        if dtype == "bf16":
            config["bf16"] = {"enabled": True}
        trained = [p for p in model.parameters() if p.requires_grad]
        self.root, *_ = deepspeed.initialize(model=model, model_parameters=trained, config=config)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.root(input_ids=tokens, labels=tokens).loss

    def backward(self, loss: torch.Tensor, last: bool) -> None:
        self.root.backward(loss)
        if not last:
            self.root.step()

    def accumulating(self, last: bool) -> Any:
        return contextlib.nullcontext()

    def gradients(self) -> list[torch.Tensor]:
        from deepspeed.utils import safe_get_full_grad

        found = [safe_get_full_grad(p) for p in self.model.parameters() if p.requires_grad]
        return [g for g in found if g is not None]

    def update(self) -> None:
        self.root.step()

    def weights(self) -> list[torch.Tensor]:
        from deepspeed.utils import safe_get_full_fp32_param

        return [
            w for p in self.model.parameters() if p.requires_grad and (w := safe_get_full_fp32_param(p)) is not None
        ]


def make(engine: str, model: torch.nn.Module, dtype: str) -> Any:
    if engine == "ddp":
        return Ddp(model, dtype)
    return Fsdp(model, dtype) if engine == "fsdp" else Zero(model, dtype, int(engine[-1]))


def digest(tensors: list[torch.Tensor]) -> str:
    sums = hashlib.sha256()
    for tensor in tensors:
        sums.update(tensor.detach().float().contiguous().numpy().tobytes())
    return f"{len(tensors)} {sums.hexdigest()[:16]}"


@contextlib.contextmanager
def evaluating(model: torch.nn.Module) -> Iterator[None]:
    model.eval()
    with torch.no_grad():
        yield
    model.train()


def train(name: str, engine_name: str, dtype: str, switched: bool) -> dict[str, Any]:
    model = MODELS[name]()
    engine = make(engine_name, model, dtype)
    blocks = blocks_of(model)
    switch = BlockSwitch(engine.root, blocks) if switched else None
    generator = torch.Generator().manual_seed(17 + dist.get_rank())
    trace: dict[str, Any] = {"losses": [], "gradients": [], "runs": [], "evaluations": []}
    torch.manual_seed(23)
    for step in range(UPDATES):
        for micro in range(MICRO_BATCHES):
            if switch is not None:
                assert switch.apply(PLANS[step * MICRO_BATCHES + micro])
            last = micro == MICRO_BATCHES - 1
            tokens = torch.randint(0, VOCABULARY, (2, 12), generator=generator)
            with engine.accumulating(last), count_runs(blocks) as runs:
                loss = engine.forward(tokens)
                if last and step == 0:  # between a forward and its backward, where it is hardest
                    state = torch.get_rng_state()
                    with evaluating(model):
                        trace["evaluations"].append(digest([engine.forward(tokens)]))
                    torch.set_rng_state(state)
                engine.backward(loss, last)
            trace["losses"].append(digest([loss]))
            trace["runs"].append(runs.total)
        trace["gradients"].append(digest(engine.gradients()))
        engine.update()
    trace["weights"] = digest(engine.weights())
    trace["generator"] = digest([torch.get_rng_state()])
    if switch is not None:
        trace["matched"] = list(switch.selective_matched)
    return trace


def main(file: Path, engines: list[str]) -> None:
    if any(engine.startswith("zero") for engine in engines):
        import deepspeed

        deepspeed.init_distributed("gloo")
    else:
        dist.init_process_group("gloo")
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    for engine in engines:
        for name in MODELS:
            for dtype in ("fp32", "bf16") if name == "llama" else ("bf16",):
                case = f"{engine} {name} {dtype}"
                try:
                    found[case] = {
                        "without": train(name, engine, dtype, switched=False),
                        "with": train(name, engine, dtype, switched=True),
                    }
                except Exception as error:  # of one case, so that the others are told too
                    if "--debug" in sys.argv:
                        raise
                    found[case] = {"error": f"{type(error).__name__}: {error}"}
                dist.barrier()
    if dist.get_rank() == 0:
        file.write_text(json.dumps(found, indent=1))
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # Gloo's threads abort the interpreter's own end now and then


if __name__ == "__main__":
    main(Path(sys.argv[1]), [a for a in sys.argv[2:] if not a.startswith("--")])
