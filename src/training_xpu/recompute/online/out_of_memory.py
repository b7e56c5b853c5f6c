"""When memory runs out all the same: recognising it, and a tighter plan for the job's next start."""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch

from training_xpu import envs
from training_xpu.blocks import kind_of
from training_xpu.errors import UserError
from training_xpu.records import Record

_MESSAGES = (
    "out of memory",
    "can't allocate memory",  # torch's CPU allocator, as a plain RuntimeError
    "not enough memory",  # the same on other systems
    "std::bad_alloc",
    "cannot allocate memory",
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception, or what it was raised from, says that memory ran out, on an accelerator or on the CPU."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, MemoryError | torch.OutOfMemoryError):
            return True
        if isinstance(seen, RuntimeError) and any(text in str(seen).lower() for text in _MESSAGES):
            return True
        seen = seen.__cause__ or seen.__context__
    return False


class TighterPlan(Record):
    """What the next start of a job that ran out of memory must heed."""

    layers_at_least: int  # to recompute
    layers_total: int
    reason: str
    times: int = 1  # it has happened


def job_key(model: torch.nn.Module, blocks: list[torch.nn.Module]) -> str:
    """The same for every start of a job: model, sizes, world size and program; another for any other job."""
    place = envs.distributed()
    parts = [
        type(model).__name__,
        *(kind_of(block) for block in blocks),
        *(str(tuple(getattr(p, "ds_shape", p.shape))) for p in model.parameters()),
        str(place.world_size),
        str(place.rank),
        envs.program(),
    ]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:20]


def record_path(key: str) -> Path:
    return envs.cache_folder() / "recompute" / f"{key}.json"


def remembered(key: str) -> TighterPlan | None:
    """The tighter plan that an earlier start left; None where there is none that can be read."""
    path = record_path(key)
    if not path.exists():
        return None
    try:
        return TighterPlan.read(path)
    except UserError:
        return None


def remember(key: str, recomputed: int, total: int, reason: str) -> TighterPlan:
    """Keeps a plan with an eighth of the layers more recomputed, at least one, for the next start.

    Raises:
        OSError: the cache cannot be written.
    """
    before = remembered(key)
    plan = TighterPlan(
        layers_at_least=min(total, recomputed + max(1, total // 8)),
        layers_total=total,
        reason=reason,
        times=1 if before is None else before.times + 1,
    )
    path = record_path(key)
    path.parent.mkdir(parents=True, exist_ok=True)
    plan.write(path)
    return plan


def forget(key: str) -> None:
    record_path(key).unlink(missing_ok=True)
