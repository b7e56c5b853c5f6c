"""Predicted peaks of live tensor bytes against measured ones, for models without an engine, in one process.

Predicted on fake tensors (`training_xpu.recompute.predict`), measured by torch's profiler over a real step with
AdamW's states in place. A fixed fraction of families x dtypes x layers x widths x sequences x batches x recomputed
blocks: every level of every factor occurs, drawn with a fixed seed.
"""

from __future__ import annotations

import random
import statistics
import sys
from contextlib import nullcontext
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, MixtralConfig, Qwen3Config

from common import finish, parser
from training_xpu.blocks import find_blocks
from training_xpu.recompute.predict import predict_peaks
from training_xpu.workloads.live_bytes import measure_live_bytes

FAMILIES: dict[str, Any] = {"llama": LlamaConfig, "qwen3": Qwen3Config, "mixtral": MixtralConfig, "gpt2": GPT2Config}
LEVELS: dict[str, list[Any]] = {
    "family": list(FAMILIES),
    "dtype": ["fp32", "bf16"],
    "layers": [2, 4, 6],
    "width": [128, 256],
    "vocabulary": [1024, 4096],
    "sequence": [64, 128, 256],
    "batch": [1, 2, 4],
    "recomputed_share": [0.0, 0.5, 1.0],
}


def sample(count: int) -> list[dict[str, Any]]:
    """Cases in which each factor's levels come equally often, in an order of their own per factor."""
    generator = random.Random(0)
    columns = {}
    for name, levels in LEVELS.items():
        column = [levels[i % len(levels)] for i in range(count)]
        generator.shuffle(column)
        columns[name] = column
    return [{name: column[i] for name, column in columns.items()} for i in range(count)]


def config_of(case: dict[str, Any]) -> Any:
    width = case["width"]
    if case["family"] == "gpt2":
        return GPT2Config(
            n_layer=case["layers"], n_embd=width, n_head=width // 32, vocab_size=case["vocabulary"], n_positions=256
        )
    more = {"qwen3": {"head_dim": 32}, "mixtral": {"num_local_experts": 4}}.get(case["family"], {})
    return FAMILIES[case["family"]](
        num_hidden_layers=case["layers"],
        hidden_size=width,
        intermediate_size=3 * width,
        num_attention_heads=width // 32,
        num_key_value_heads=width // 64,
        vocab_size=case["vocabulary"],
        **more,
    )


def measured(config: Any, case: dict[str, Any], recomputed: int) -> int:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    model.config.use_cache = False
    model.train()
    model.activation_checkpointing_enable()
    for index, block in enumerate(b for group in find_blocks(model) for b in group.modules):
        block.gradient_checkpointing = index < recomputed
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    tokens = torch.randint(0, config.vocab_size, (case["batch"], case["sequence"]))

    def step() -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16) if case["dtype"] == "bf16" else nullcontext():
            loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    step()
    return measure_live_bytes(step).peak_bytes


def main() -> int:
    options = parser(__doc__ or "", rounds=60, quick_rounds=10).parse_args()
    cases = sample(options.rounds or (options.quick_rounds if options.quick else options.full_rounds))
    rows = []
    for number, case in enumerate(cases, start=1):
        recomputed = round(case["recomputed_share"] * case["layers"])
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config_of(case))
        predicted = predict_peaks(model, case["batch"], case["sequence"], dtype=case["dtype"]).peaks[recomputed]
        real = measured(config_of(case), case, recomputed)
        rows.append({**case, "predicted": predicted, "measured": real, "error": predicted / real - 1})
        print(
            f"{number:3} {case['family']:6} {case['dtype']} L{case['layers']} h{case['width']} v{case['vocabulary']} "
            f"B{case['batch']} S{case['sequence']} recompute {recomputed}: measured {real / 2**20:8.2f} MiB, "
            f"predicted {predicted / 2**20:8.2f} MiB, {predicted / real - 1:+.2%}",
            file=sys.stderr,
        )
    errors = sorted(abs(row["error"]) for row in rows)
    lowest = min(row["error"] for row in rows)
    at_95 = errors[min(len(errors) - 1, int(0.95 * len(errors)))]
    finish(
        options,
        {"cases": rows},
        f"{len(rows)} cases without an engine: median error {statistics.median(errors):.2%}, "
        f"95th percentile {at_95:.2%}, largest underestimate {min(0.0, lowest):.2%}",
    )
    return 0 if statistics.median(errors) <= 0.02 and at_95 <= 0.05 and lowest >= -0.03 else 1


if __name__ == "__main__":
    sys.exit(main())
