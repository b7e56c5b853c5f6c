"""Ranks train small models under each engine, with the plain loss and with the chunked one.

`chunked_loss.py FILE CASE...`, a case being ENGINE/MODEL, writes {case: {"losses": ..., ...}} on rank 0: the largest
differences of losses, gradients, weights and logits between the two, relative to the plain ones, and how often the
chunked loss was used.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from training_xpu.compiler.loss.deferred import DeferredLogits
from training_xpu.compiler.loss.standard_loss import Installed, install

UPDATES, MICRO_BATCHES, VOCABULARY = 3, 2, 96
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCABULARY,
    "use_cache": False,
    "initializer_range": 0.1,
}


def model_of(name: str) -> Any:
    from transformers import AutoModelForCausalLM, Gemma2Config, LlamaConfig, MixtralConfig

    torch.manual_seed(0)
    if name == "moe":
        return AutoModelForCausalLM.from_config(
            MixtralConfig(**SIZES, num_local_experts=4, output_router_logits=True, router_jitter_noise=0.0)
        )
    if name == "softcap":
        return AutoModelForCausalLM.from_config(
            Gemma2Config(**SIZES, head_dim=8, query_pre_attn_scalar=8, final_logit_softcapping=2.0)
        )
    model = AutoModelForCausalLM.from_config(LlamaConfig(**SIZES, tie_word_embeddings=name == "tied"))
    if name == "frozen":
        model.lm_head.weight.requires_grad_(False)
    return model


class Engine:
    """One engine around a model: forward, backward, gradients and update."""

    def __init__(self, name: str, model: Any) -> None:
        self.model = model
        self.zero = name.startswith("zero")
        self.autocast = name == "ddp-bf16"
        trained = [p for p in model.parameters() if p.requires_grad]
        if self.zero:
            import deepspeed

            config: dict[str, Any] = {
                "train_micro_batch_size_per_gpu": 2,
                "gradient_accumulation_steps": MICRO_BATCHES,
                "zero_optimization": {"stage": int(name[4]), "stage3_param_persistence_threshold": 40},
                "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
                "steps_per_print": 2**31,
            }
            if name.endswith("bf16"):
                config["bf16"] = {"enabled": True}
            self.root, *_ = deepspeed.initialize(model=model, model_parameters=trained, config=config)
            return
        if name.startswith("fsdp"):
            policy = MixedPrecisionPolicy()
            if name.endswith("bf16"):
                policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
            for layer in model.model.layers:
                fully_shard(layer, mp_policy=policy)
            if name.startswith("fsdp-head"):
                fully_shard(model.lm_head)
            reshard = True if name == "fsdp-reshard" else None
            self.root = fully_shard(model, mp_policy=policy, reshard_after_forward=reshard)
        else:
            self.root = DistributedDataParallel(model, find_unused_parameters=True)
        self.optimizer = torch.optim.AdamW(trained, lr=1e-2)

    def forward(self, **inputs: Any) -> Any:
        with torch.autocast("cpu", torch.bfloat16, enabled=self.autocast):
            return self.root(**inputs)

    def backward(self, loss: torch.Tensor) -> None:
        if self.zero:
            self.root.backward(loss)
        else:
            (loss / MICRO_BATCHES).backward()

    def gradients(self) -> list[torch.Tensor]:
        if self.zero:
            from deepspeed.utils import safe_get_full_grad

            return [g for p in self.model.parameters() if (g := safe_get_full_grad(p)) is not None]
        found = [p.grad for p in self.model.parameters() if p.grad is not None]
        return [g.full_tensor() if hasattr(g, "full_tensor") else g for g in found]

    def update(self, last: bool) -> None:
        if self.zero:
            self.root.step()
        elif last:
            self.optimizer.step()
            self.optimizer.zero_grad()


def train(engine_name: str, model_name: str, chunked: bool, before: bool) -> dict[str, Any]:
    """
    Args:
        before: the chunked loss is there before the engine, whose hooks so come later.
    """
    model = model_of(model_name)
    installed: Any = install(model) if chunked and before else None
    engine = Engine(engine_name, model)
    if chunked and not before:
        installed = install(engine.root)
    assert not chunked or isinstance(installed, Installed), installed
    model.train()
    generator = torch.Generator().manual_seed(17 + dist.get_rank())
    trace: dict[str, Any] = {"losses": [], "gradients": [], "logits": [], "used": 0}
    for step in range(UPDATES):
        for micro in range(MICRO_BATCHES):
            tokens = torch.randint(0, VOCABULARY, (2, 12), generator=generator)
            labels = tokens.masked_fill(torch.rand(2, 12, generator=generator) < 0.3, -100)
            more = {"num_items_in_batch": torch.tensor(17)} if step == 1 else {}
            last = micro == MICRO_BATCHES - 1
            hold = engine.root.no_sync() if engine_name.startswith("ddp") and not last else contextlib.nullcontext()
            with hold:
                output = engine.forward(input_ids=tokens, labels=labels, **more)
                trace["used"] += type(output.logits) is DeferredLogits
                if step == 1 and not micro:  # between a forward and its backward
                    if not engine_name.startswith("fsdp"):
                        trace["logits"].append(output.logits.detach().float().clone())
                    model.eval()
                    with torch.no_grad():
                        seen = engine.forward(input_ids=tokens, labels=labels)
                        trace["losses"].append(seen.loss.detach().reshape(1).float())
                        trace["logits"].append(engine.forward(input_ids=tokens).logits.float())
                    model.train()
                loss = output.loss
                # A loss of the user's own beside the standard one, with a gradient through the logits.
                if step == 2 and not micro:
                    loss = loss + 0.1 * output.logits.float().square().mean()
                engine.backward(loss)
                if step == 1 and not micro and engine_name.startswith("fsdp"):  # its weights are sharded again
                    trace["logits"].append(output.logits.detach().float().clone())
            trace["losses"].append(loss.detach().reshape(1).float())
            if last:
                trace["gradients"].append([g.detach().float().clone() for g in engine.gradients()])
            engine.update(last)
    if chunked:
        trace["off"] = installed.off
        installed.uninstall()
    return trace


def furthest(ours: list[torch.Tensor], plain: list[torch.Tensor]) -> float:
    assert len(ours) == len(plain)
    return max(float((a - b).norm() / (b.norm() + 1e-6)) for a, b in zip(ours, plain, strict=True))


def compare(case: str) -> dict[str, Any]:
    engine, model = case.split("/")
    plain = train(engine, model, chunked=False, before=False)
    found: dict[str, Any] = {}
    for before in (False, True) if model == "tied" else (False,):
        ours = train(engine, model, chunked=True, before=before)
        found["before" if before else "after"] = {
            "losses": furthest(ours["losses"], plain["losses"]),
            "logits": furthest(ours["logits"], plain["logits"]),
            "first gradients": furthest(ours["gradients"][0], plain["gradients"][0]),
            "all gradients": max(furthest(a, b) for a, b in zip(ours["gradients"], plain["gradients"], strict=True)),
            "used": ours["used"],
            "off": ours["off"],
            "gradients": len(ours["gradients"][0]),
        }
    return found


def main(file: Path, cases: list[str]) -> None:
    if any(case.startswith("zero") for case in cases):
        import deepspeed

        deepspeed.init_distributed("gloo")
    else:
        dist.init_process_group("gloo")
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    for case in cases:
        try:
            found[case] = compare(case)
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
