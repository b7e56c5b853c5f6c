"""The environment variables that matter for training: those that are set, by whom, and without anything personal."""

from __future__ import annotations

import getpass
import re
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from training_xpu import envs, features
from training_xpu.errors import nearest
from training_xpu.recompute import budget
from training_xpu.records import Record

# Variables of others that change what is computed, how fast, or where; a name with "*" is a prefix.
THEIRS = (
    *("OMP_*", "KMP_*", "GOMP_*", "MKL_*", "ONEDNN_*", "DNNL_*", "OPENBLAS_*", "NUMEXPR_*", "LD_PRELOAD"),
    *("LD_LIBRARY_PATH", "MALLOC_*", "GLIBC_TUNABLES", "TCMALLOC_*", "CUDA_*", "NVIDIA_*", "CUBLAS_*", "CUDNN_*"),
    *("NCCL_*", "PCCL_*", "RCCL_*", "ACCL_*", "GLOO_*", "UCX_*", "FI_*", "HIP_*", "ROCR_*", "HSA_*", "PPU_*", "SAIL_*"),
    *("TORCH_*", "TORCHINDUCTOR_*", "TORCHDYNAMO_*", "PYTORCH_*", "INDUCTOR_*", "TRITON_*", "NVTE_*", "EIC_VSOLAR"),
    *("DS_*", "DEEPSPEED_*", "ACCELERATE_*", "FSDP_*", "MEGATRON_*", "HF_*", "TRANSFORMERS_*", "TOKENIZERS_*"),
    *("VLLM_*", "XFORMERS_*", "FLASH_ATTENTION_*", "PYTHONHASHSEED", "PYTHONPATH", "PYTHONOPTIMIZE", "CXX", "CC"),
)
OURS = ("TRAINING_XPU_*", "CHECKPOINT_OPTIMIZATION")

_SECRET_WORDS = {"token", "tokens", "key", "keys", "apikey", "password", "passwd", "pass", "secret", "secrets"}
_SECRET_WORDS |= {"credential", "credentials", "auth", "authorization", "cookie", "dsn"}
MASK = "***"
_SOME_MEMORY = 1 << 40  # bytes that a percentage may be of, while only its form is checked

SetBy = Literal["user", "image", "ours"]


class Variable(Record):
    name: str
    value: str
    set_by: SetBy | None  # null: cannot be told


def variables() -> list[Variable]:
    """The variables of this process that matter for training, by name.

    They go into records that people pass on: values of variables that look like a secret are masked, and so are
    passwords in URLs; this user's home folder is written "~".
    """
    found = []
    for name, value in sorted(envs.snapshot().items()):
        if name == "TRAINING_XPU_SET":  # the bookkeeping behind `set_by`
            continue
        if any(name == p or (p.endswith("*") and name.startswith(p[:-1])) for p in (*OURS, *THEIRS)):
            readable = value.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
            shown = MASK if is_secret(name) and value else without_personal(readable)
            found.append(Variable(name=name, value=shown, set_by=envs.who_set(name)))
    return found


def check_ours(say: Callable[[str], None]) -> None:
    """Refuses what the project's own variables cannot mean, before any process starts that would trip over it.

    Args:
        say: is given a line for each variable whose name begins as ours do and is none of them.

    Raises:
        UserError: a variable holds something it cannot mean.
    """
    features.known()  # they declare their variables
    for variable in envs.VARIABLES.values():
        value = envs.get(variable.name)
        if value is None or variable.section not in ("project", "feature"):
            continue
        match variable.kind:
            case "boolean":
                envs.parse_boolean(variable.name, value)
            case "true, false or auto":
                envs.parse_asked(variable.name, value)
            case "path":
                envs.expand(variable.name, value)
            case "level":
                envs.log_level()
            case _ if variable.name == budget.VARIABLE:
                budget.read_budget(value, budget.Budget(_SOME_MEMORY, "any"), variable.name)
    envs.distributed()
    for name in sorted(envs.snapshot()):
        if name.startswith(envs.PREFIX) and name not in envs.VARIABLES:
            # What all names begin with would make any two of them alike.
            known = [v.removeprefix(envs.PREFIX) for v in envs.VARIABLES if v.startswith(envs.PREFIX)]
            near = nearest(name.removeprefix(envs.PREFIX), known, limit=1)
            hint = f" {near.replace('mean ', 'mean ' + envs.PREFIX)}" if near.startswith("Did you mean") else ""
            say(f"{name} is set, and no variable of that name is known.{hint}")


def is_secret(name: str) -> bool:
    """Whether a variable's name looks as if its value should not be shown."""
    return any(word in _SECRET_WORDS for word in re.split(r"[^a-z]+", name.lower()))


def without_personal(value: str) -> str:
    """The text without this user's home folder and name, and without passwords in URLs."""
    value = re.sub(r"(?<=://)[^/\s@]+@", MASK + "@", value)
    try:
        home = str(Path.home())
    except RuntimeError:  # a user without a home folder
        home = ""
    if home not in ("/", ""):
        value = re.sub(rf"(?<![\w/]){re.escape(home)}(?![\w.-])", "~", value)
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a uid without a name, as in many containers
        return value
    if len(user) < 3 or user == "root":
        return value
    return re.sub(rf"(?<=/){re.escape(user)}(?=/|$|:)", "<user>", value)
