"""Real training steps of the memory benchmark's cases, on two ranks over Gloo: live tensor bytes and resident set."""

from __future__ import annotations

import ctypes
import gc
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import counting_allocator
from memory_cases import Case, build
from training_xpu.blocks import find_blocks
from training_xpu.perf.environment import extensions_folder
from training_xpu.recompute.prediction.optimizers import KINDS

WORLD_SIZE = 2
_LINEAR = torch.nn.functional.linear
MEASURED = 3  # steps; on a busy machine Gloo's thread may let go of its copies late
WARM_UP = 3  # steps before the one that is measured: ZeRO-3 looks ahead from its third forward on


def measure(cases: Sequence[Case], report: Callable[[int, dict[str, Any]], None]) -> None:
    """Runs the cases one after the other in one set of processes; `report` gets each result as it comes.

    A result has "live" (the peak of the rank that needs most), "resident" and "resident_before", in bytes, or "error".
    """
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder) / "results"
        os.mkfifo(results)
        environment = {
            "DS_ACCELERATOR": "cpu",
            "OMP_NUM_THREADS": "1",
            "MASTER_ADDR": "127.0.0.1",
            "TORCH_EXTENSIONS_DIR": os.environ.get("TORCH_EXTENSIONS_DIR", str(extensions_folder())),
            "PATH": str(Path(sys.executable).parent) + os.pathsep + os.environ.get("PATH", ""),
        }
        os.environ.update(environment)
        counting_allocator.build(Path(folder) / "counting_allocator")
        context = mp.start_processes(
            _rank,
            args=(folder, [c.as_dict() for c in cases]),
            nprocs=WORLD_SIZE,
            join=False,
            start_method="spawn",
        )
        assert context is not None
        for number, result in _read(results):
            report(number, result)
        while not context.join(timeout=60):
            pass


def _read(results: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    with results.open() as stream:
        for line in stream:
            number, result = json.loads(line)
            yield number, result


def _rank(rank: int, folder: str, cases: list[dict[str, Any]]) -> None:
    sys.stdout = Path(os.devnull).open("w")  # noqa: SIM115
    results = (Path(folder) / "results").open("w") if rank == 0 else None
    counting_allocator.install()
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(WORLD_SIZE))
    store = dist.FileStore(str(Path(folder) / "store"), WORLD_SIZE)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD_SIZE)
    for number, fields in enumerate(cases):
        mine = _measured(Case(**fields))
        everyone: list[Any] = [None] * WORLD_SIZE
        dist.all_gather_object(everyone, mine)
        if results is not None:
            worst = max(everyone, key=lambda r: r["live"])
            print(json.dumps([number, worst]), file=results, flush=True)
    dist.barrier()
    dist.destroy_process_group()


def _measured(case: Case) -> dict[str, Any]:
    _give_back()
    left_over = counting_allocator.live_bytes()  # of earlier cases
    before = _status("VmRSS")
    step, alive = _stepper(case)
    for _ in range(WARM_UP):
        step()
    lives, residents = [], []
    for _ in range(MEASURED):
        gc.collect()
        counting_allocator.restart_peak()
        Path("/proc/self/clear_refs").write_text("5")
        step()
        lives.append(counting_allocator.peak_bytes() - left_over)
        residents.append(_status("VmHWM"))
    _destroy(alive)
    return {
        "live": int(statistics.median(lives)),
        "resident": int(statistics.median(residents)),
        "resident_before": before,
    }


def _destroy(alive: list[Any]) -> None:
    torch.nn.functional.linear = _LINEAR  # DeepSpeed puts one of its own there under ZeRO-3, for ever
    for thing in alive:
        if hasattr(thing, "destroy"):
            thing.destroy()
    alive.clear()


def _give_back() -> None:
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)


def _status(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise OSError(f"no {field} in /proc/self/status")


def _stepper(case: Case) -> tuple[Callable[[], None], list[Any]]:
    """A function that makes one whole step, and what it works on."""
    torch.manual_seed(0)
    model = build(case)
    model.activation_checkpointing_enable()
    for index, block in enumerate(b for group in find_blocks(model) for b in group.modules):
        block.gradient_checkpointing = index < case.recomputed
    shape = (case.batch, case.sequence)
    batches = [
        {"input_ids": tokens, "labels": tokens.clone()}
        for tokens in (torch.randint(0, case.vocabulary, shape) for _ in range(case.accumulation))
    ]
    if case.engine.startswith("zero"):
        return _deepspeed(case, model, batches)
    return _torch(case, model, batches)


def _deepspeed(case: Case, model: Any, batches: list[Any]) -> tuple[Callable[[], None], list[Any]]:
    import deepspeed

    optimizer: dict[str, Any] = {"type": "AdamW", "params": {"lr": 1e-3}}
    if case.optimizer == "sgd-momentum":
        optimizer = {"type": "SGD", "params": {"lr": 1e-3, "momentum": 0.9}}
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": case.batch,
        "gradient_accumulation_steps": case.accumulation,
        "gradient_clipping": 1.0,
        "steps_per_print": 2**31,
        "optimizer": optimizer,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {
            "stage": case.zero_stage,
            "reduce_bucket_size": case.bucket,
            "allgather_bucket_size": case.bucket,
            "stage3_param_persistence_threshold": case.persistence,
            "stage3_prefetch_bucket_size": case.prefetch,
            "stage3_max_reuse_distance": case.reuse,
        },
    }
    if case.dtype == "bf16":
        config["bf16"] = {"enabled": True}
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=[p for p in model.parameters() if p.requires_grad], config=config
    )

    def step() -> None:
        for batch in batches:
            engine.backward(engine(**batch).loss)
            engine.step()

    return step, [engine]


def _torch(case: Case, model: Any, batches: list[Any]) -> tuple[Callable[[], None], list[Any]]:
    wrapped: Any
    if case.engine == "ddp":
        wrapped = torch.nn.parallel.DistributedDataParallel(model)
    else:
        wrapped = _fully_sharded(case, model)
    fused = {"fused": True} if case.optimizer == "adamw" else {}
    optimizer = KINDS[case.optimizer]([p for p in model.parameters() if p.requires_grad], **fused)

    def step() -> None:
        for number, batch in enumerate(batches):
            last = number == len(batches) - 1
            if case.engine == "fsdp":
                wrapped.set_requires_gradient_sync(last)
            with wrapped.no_sync() if case.engine == "ddp" and not last else nullcontext():
                low = case.engine == "ddp" and case.dtype == "bf16"
                with torch.autocast("cpu", dtype=torch.bfloat16) if low else nullcontext():
                    loss = wrapped(**batch).loss
                (loss / len(batches)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step, [wrapped, optimizer]


def _fully_sharded(case: Case, model: Any) -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = init_device_mesh("cpu", (WORLD_SIZE,))
    low = torch.bfloat16 if case.dtype == "bf16" else torch.float32
    policy = MixedPrecisionPolicy(param_dtype=low, reduce_dtype=torch.float32)
    for group in find_blocks(model):
        for block in group.modules:
            fully_shard(block, mesh=mesh, mp_policy=policy)
    return fully_shard(model, mesh=mesh, mp_policy=policy)
