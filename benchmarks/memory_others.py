"""What other tools say about the same training steps: torch's MemTracker, DeepSpeed's estimators, accelerate's."""

from __future__ import annotations

import contextlib
import io
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from memory_cases import Case, build
from training_xpu.blocks import find_blocks
from training_xpu.recompute.prediction.fake_model import use_causal_attention
from training_xpu.recompute.prediction.optimizers import KINDS


def mem_tracker(case: Case) -> int | None:
    """Peak of `torch.distributed._tools.mem_tracker.MemTracker` over one step on fake tensors, in one process.

    As its documentation shows it: model and optimizer are built and tracked under fake tensors, two steps are made and
    the statistics reset between them. It knows no sharding of DeepSpeed's. None where it fails.
    """
    from torch.distributed._tools.mem_tracker import MemTracker

    try:
        with FakeTensorMode(allow_non_fake_inputs=True), contextlib.redirect_stdout(io.StringIO()):
            model = build(case, torch.bfloat16 if case.dtype == "bf16" and case.engine != "ddp" else torch.float32)
            use_causal_attention(model)
            model.activation_checkpointing_enable()
            for index, block in enumerate(b for group in find_blocks(model) for b in group.modules):
                block.gradient_checkpointing = index < case.recomputed
            fused = {"foreach": False} if case.optimizer == "adamw" else {}
            optimizer = KINDS[case.optimizer]([p for p in model.parameters() if p.requires_grad], **fused)
            tokens = torch.zeros((case.batch, case.sequence), dtype=torch.long)
            tracker = MemTracker()
            tracker.track_external(model, optimizer)
            low = case.dtype == "bf16" and case.engine == "ddp"
            with tracker:
                for number in range(2):
                    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=low):
                        loss = model(input_ids=tokens, labels=tokens).loss
                    loss.backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    if number == 0:
                        tracker.reset_mod_stats()
            snapshot: Any = tracker.get_tracker_snapshot("peak")
        return max(int(sizes["Total"]) for sizes in snapshot.values())
    except Exception:  # whatever the tool does not like about a model
        return None


def deepspeed_estimate(case: Case, world_size: int) -> int | None:
    """DeepSpeed's estimator of model states per device, without offload; it has one for ZeRO-2 and one for ZeRO-3."""
    if case.zero_stage < 2:
        return None
    from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs, model_to_params
    from deepspeed.runtime.zero.stage_1_and_2 import estimate_zero2_model_states_mem_needs

    with torch.device("meta"):
        model = build(case)
    total, largest = model_to_params(model)
    if case.zero_stage == 2:
        return int(estimate_zero2_model_states_mem_needs(total, num_gpus_per_node=world_size, cpu_offload=False)[1])
    answer = estimate_zero3_model_states_mem_needs(
        total, largest, num_gpus_per_node=world_size, cpu_offload=False, cpu_offload_params=False
    )
    return int(answer[1])


def accelerate_estimate(case: Case) -> int:
    """`accelerate estimate-memory`: the largest of its columns for training with Adam."""
    from accelerate.commands.estimate import estimate_training_usage
    from accelerate.utils import calculate_maximum_sizes

    with torch.device("meta"):
        model = build(case)
    size = calculate_maximum_sizes(model)[0]
    return int(max(estimate_training_usage(size, "float32" if case.dtype == "fp32" else "bfloat16").values()))
