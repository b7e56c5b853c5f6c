"""Every environment variable the project reads, declared once; `os.environ` is touched in this file only.

`autoload` alone glances at it first, to see whether there is any reason to import this. Runs inside `import torch`,
hence imports nothing but small parts of the standard library, and uses named tuples: a dataclass takes five times as
long to define. The reference page of the variables is made from the declarations.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Literal, NamedTuple

from training_xpu.errors import UserError, nearest

Asked = Literal["true", "false", "auto"]
Setter = Literal["user", "image", "ours"]

PREFIX = "TRAINING_XPU_"  # what the names of the project's own variables begin with
PREFIXES = (PREFIX, "CHECKPOINT_OPTIMIZATION")  # what autoload looks for

_TRUE = ("true", "1", "yes", "on")
_FALSE = ("false", "0", "no", "off")
_LEVELS = {"debug": 10, "info": 20, "warning": 30, "error": 40}  # the numbers of the logging module


class Variable(NamedTuple):
    """One environment variable: what the reference page says about it."""

    name: str
    kind: Literal["boolean", "true, false or auto", "level", "path", "integer", "text"]
    default: str  # for people; "" where the variable simply is not set
    meaning: str
    since: str  # the first version of this project that reads it
    section: Literal["project", "feature", "system", "launcher"] = "project"


class BadValue(UserError):
    """A variable holds something it cannot mean."""


_VERSION = "0.1.0"
_DECLARED = (
    Variable(
        "TRAINING_XPU_DISABLE",
        "boolean",
        "false",
        "Switches the whole package off inside training processes: no feature, no report, nothing patched. Backends "
        "of other packages still load.",
        _VERSION,
    ),
    Variable(
        "TRAINING_XPU_REPORT",
        "path",
        "",
        "Folder in which each training process writes `<role>-<rank>-<pid>.jsonl`: what was asked for, what was "
        "decided and why. Made if it is missing.",
        _VERSION,
    ),
    Variable(
        "TRAINING_XPU_LOG",
        "level",
        "warning",
        "Least severe message that is printed on stderr: `debug`, `info`, `warning` or `error`.",
        _VERSION,
    ),
    Variable(
        "TRAINING_XPU_CACHE",
        "path",
        "~/.cache/training-xpu",
        "Folder for what can be computed again: prepared data, measured peaks. Without it `training-xpu` inside "
        "`XDG_CACHE_HOME`.",
        _VERSION,
    ),
    Variable("TRAINING_XPU_RUNS", "path", "runs", "Folder in which `ljperf` keeps its runs.", _VERSION),
    Variable(
        "TRAINING_XPU_IMAGE_DEFAULTS",
        "path",
        "",
        "File of `NAME=VALUE` lines that a container image has preset. A variable that still has the value of the "
        "file counts as set by the image, not by the user.",
        _VERSION,
    ),
    Variable(
        "TRAINING_XPU_MEMORY_BUDGET",
        "text",
        "",
        "Memory that one rank may use: bytes, a size such as `6GiB`, or a share such as `80%` of the limit; after "
        "`live:` a budget of live tensor bytes alone, such as `live:4GiB`. Without it what the device has free, or on "
        "CPUs the smallest limit of machine and control groups divided among the ranks.",
        _VERSION,
    ),
    Variable(
        "TRAINING_XPU_SET",
        "text",
        "",
        "Written by the project itself for its child processes: the variables it has set, as a JSON object. Tells "
        "them from the user's own.",
        _VERSION,
    ),
    Variable(
        "XDG_CACHE_HOME", "path", "~/.cache", "Caches go here, unless `TRAINING_XPU_CACHE` is set.", _VERSION, "system"
    ),
    Variable("PATH", "text", "", "Where `ljperf run` looks for the command.", _VERSION, "system"),
    Variable("CXX", "text", "g++", "The C++ compiler that `ljperf env` names.", _VERSION, "system"),
    Variable(
        "OMP_NUM_THREADS", "integer", "", "Threads of a rank; `ljperf` sets it where you have not.", _VERSION, "system"
    ),
    Variable(
        "TORCH_EXTENSIONS_DIR",
        "path",
        "",
        "Where native operations are built, as torch defines it.",
        _VERSION,
        "system",
    ),
    Variable(
        "WANDB_MODE", "text", "offline", "How `--report-to wandb` reports, as wandb defines it.", _VERSION, "system"
    ),
    Variable("RANK", "integer", "0", "Rank of this process among all.", _VERSION, "launcher"),
    Variable("WORLD_SIZE", "integer", "1", "Number of ranks on all nodes.", _VERSION, "launcher"),
    Variable("LOCAL_RANK", "integer", "0", "Rank of this process on its node.", _VERSION, "launcher"),
    Variable("LOCAL_WORLD_SIZE", "integer", "1", "Number of ranks on this node.", _VERSION, "launcher"),
    Variable("GROUP_RANK", "integer", "0", "Rank of this node.", _VERSION, "launcher"),
    Variable("MASTER_ADDR", "text", "", "Host of the process group's store.", _VERSION, "launcher"),
    Variable("MASTER_PORT", "integer", "", "Port of the process group's store.", _VERSION, "launcher"),
    Variable("TORCHELASTIC_RUN_ID", "text", "", "Name that torchrun gives the job.", _VERSION, "launcher"),
    Variable("OMPI_COMM_WORLD_RANK", "integer", "", "Rank under Open MPI.", _VERSION, "launcher"),
    Variable("OMPI_COMM_WORLD_SIZE", "integer", "", "Number of ranks under Open MPI.", _VERSION, "launcher"),
    Variable("OMPI_COMM_WORLD_LOCAL_RANK", "integer", "", "Rank on the node under Open MPI.", _VERSION, "launcher"),
    Variable("OMPI_COMM_WORLD_LOCAL_SIZE", "integer", "", "Ranks on the node under Open MPI.", _VERSION, "launcher"),
    Variable("PMI_RANK", "integer", "", "Rank under MPICH or Intel MPI.", _VERSION, "launcher"),
    Variable("PMI_SIZE", "integer", "", "Number of ranks under MPICH or Intel MPI.", _VERSION, "launcher"),
    Variable("MPI_LOCALRANKID", "integer", "", "Rank on the node under Intel MPI.", _VERSION, "launcher"),
    Variable("MPI_LOCALNRANKS", "integer", "", "Ranks on the node under Intel MPI.", _VERSION, "launcher"),
)

VARIABLES: dict[str, Variable] = {v.name: v for v in _DECLARED}


def declare(variable: Variable) -> None:
    """Adds a variable, as each feature does for its own switch.

    Raises:
        ValueError: the name is taken by another declaration.
    """
    known = VARIABLES.setdefault(variable.name, variable)
    if known != variable:
        raise ValueError(f"{variable.name} is declared twice")


def withdraw(name: str) -> None:
    """Takes a declaration back."""
    VARIABLES.pop(name, None)


def get(name: str) -> str | None:
    """The value of a declared variable; None where it is not set, or empty.

    Raises:
        KeyError: nobody declared it.
    """
    if name not in VARIABLES:
        raise KeyError(f"{name} is not declared in envs.py")
    return os.environ.get(name, "").strip() or None


def snapshot() -> dict[str, str]:
    """A copy of the whole process environment."""
    return dict(os.environ)


def parse_boolean(name: str, text: str) -> bool:
    """Reads true, false, 1, 0, yes, no, on, off in any case.

    Raises:
        BadValue: it is none of these.
    """
    word = text.strip().lower()
    if word in _TRUE:
        return True
    if word in _FALSE:
        return False
    raise BadValue(
        f"{name} is {text!r}, which is neither true nor false", "Use true or false (or 1/0, yes/no, on/off)."
    )


def parse_asked(name: str, text: str) -> Asked:
    """Reads what `parse_boolean` reads, and auto.

    Raises:
        BadValue: it is none of these.
    """
    if text.strip().lower() == "auto":
        return "auto"
    try:
        return "true" if parse_boolean(name, text) else "false"
    except BadValue:
        raise BadValue(
            f"{name} is {text!r}, which is none of true, false and auto",
            "Use true, false or auto (or 1/0, yes/no, on/off).",
        ) from None


def asked(name: str) -> Asked | None:
    """What the variable of a feature asks for; None where it is not set."""
    value = get(name)
    return None if value is None else parse_asked(name, value)


def program() -> str:
    """The script or module this process runs, without its arguments."""
    return " ".join(argument for argument in sys.orig_argv[:3] if not argument.startswith("--"))


def disabled() -> bool:
    return parse_boolean("TRAINING_XPU_DISABLE", get("TRAINING_XPU_DISABLE") or "false")


def report_folder() -> Path | None:
    value = get("TRAINING_XPU_REPORT")
    return None if value is None else expand("TRAINING_XPU_REPORT", value)


def log_level() -> int:
    """The level of the project's logger, as a number of the logging module.

    Raises:
        BadValue: it is no known level.
    """
    value = get("TRAINING_XPU_LOG") or "warning"
    if value.lower() not in _LEVELS:
        raise BadValue(f"TRAINING_XPU_LOG is {value!r}, which is no level", nearest(value, _LEVELS))
    return _LEVELS[value.lower()]


def cache_folder() -> Path:
    own = get("TRAINING_XPU_CACHE")
    if own is not None:
        return expand("TRAINING_XPU_CACHE", own)
    shared = get("XDG_CACHE_HOME")
    # The XDG specification calls relative paths invalid and has them ignored.
    if shared is not None and Path(shared).is_absolute():
        return Path(shared) / "training-xpu"
    try:
        return Path("~/.cache/training-xpu").expanduser()
    except RuntimeError:  # a user without a home folder, as in many containers
        import tempfile  # rarely needed, and dear while torch is being imported

        return Path(tempfile.gettempdir()) / f"training-xpu-{os.getuid()}"


def expand(name: str, text: str) -> Path:
    """The path with `~` resolved.

    Raises:
        BadValue: there is no such home folder.
    """
    try:
        return Path(text).expanduser()
    except RuntimeError:
        raise BadValue(f"{name} is {text!r}, and there is no such home folder", "Write the whole path.") from None


def runs_folder() -> Path:
    return expand("TRAINING_XPU_RUNS", get("TRAINING_XPU_RUNS") or "runs")


class Distributed(NamedTuple):
    """This process's place among the ranks of its job; a process without a launcher is rank 0 of 1."""

    launched: bool  # a launcher has set the place
    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    node_rank: int = 0
    master_address: str | None = None
    master_port: int | None = None
    run_id: str | None = None


def distributed() -> Distributed:
    """The place that torchrun, DeepSpeed, accelerate or an MPI launcher gave this process.

    RANK and WORLD_SIZE come first, then those of Open MPI, MPICH and Intel MPI. Where the launcher leaves the local
    rank unset, the global one stands in, which is right on a single node.

    Raises:
        BadValue: a number is none, or a rank lies outside its world.
    """
    for rank_name, size_name, local_name, local_size_name in (
        ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
        ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
        ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    ):
        rank, size = _integer(rank_name), _integer(size_name)
        if rank is None or size is None:
            continue
        if not 0 <= rank < size:
            raise BadValue(f"{rank_name} is {rank} with {size_name} {size}", f"{rank_name} counts from 0.")
        local_rank, local_size = _integer(local_name), _integer(local_size_name)
        return Distributed(
            launched=True,
            rank=rank,
            world_size=size,
            local_rank=rank if local_rank is None else local_rank,
            local_world_size=size if local_size is None else local_size,
            node_rank=_integer("GROUP_RANK") or 0,
            master_address=get("MASTER_ADDR"),
            master_port=_integer("MASTER_PORT"),
            run_id=get("TORCHELASTIC_RUN_ID"),
        )
    return Distributed(launched=False)


def _integer(name: str) -> int | None:
    value = get(name)
    if value is None:
        return None
    try:
        return int(value)
    except ValueError:
        raise BadValue(f"{name} is {value!r}, which is no whole number") from None


def who_set(name: str) -> Setter | None:
    """Who gave any variable of this process its present value; None where it is not set.

    "ours": this project, here or in a parent process. "image": the value equals the image's preset. Everything else is
    the user's, the defaults of foreign launchers included: torchrun's OMP_NUM_THREADS=1 looks like a user's wish in a
    rank, and can only be told from one inside torchrun itself.
    """
    value = os.environ.get(name)
    if value is None:
        return None
    if _set_by_us().get(name) == value:
        return "ours"
    if image_defaults().get(name) == value:
        return "image"
    return "user"


def image_defaults() -> dict[str, str]:
    """The presets of the image; none without such a file. Blank lines, comments and `export` are passed over."""
    path = get("TRAINING_XPU_IMAGE_DEFAULTS")
    if path is None:
        return {}
    try:
        lines = Path(path).expanduser().read_text(encoding="utf-8", errors="replace").splitlines()
    except (OSError, RuntimeError):
        return {}
    presets: dict[str, str] = {}
    for line in lines:
        name, equals, value = line.strip().removeprefix("export ").partition("=")
        if not equals or name.lstrip().startswith("#"):
            continue
        value = value.strip()
        if len(value) >= 2 and value[0] == value[-1] and value[0] in "'\"":
            value = value[1:-1]
        presets[name.strip()] = value
    return presets


def set_for_children(settings: Mapping[str, str]) -> None:
    """Sets variables of this process, and thereby of the ones it starts, and remembers that they are ours."""
    os.environ.update(settings)
    os.environ["TRAINING_XPU_SET"] = _remembered(settings)


def child_environment(settings: Mapping[str, str]) -> dict[str, str]:
    """A copy of this process's environment with more variables, remembered as ours; this process keeps its own."""
    return {**os.environ, **settings, "TRAINING_XPU_SET": _remembered(settings)}


def _remembered(settings: Mapping[str, str]) -> str:
    return json.dumps({**_set_by_us(), **settings}, sort_keys=True)


def _set_by_us() -> dict[str, str]:
    try:
        found = json.loads(os.environ.get("TRAINING_XPU_SET", "{}"))
    except ValueError:
        return {}
    return {str(k): str(v) for k, v in found.items()} if isinstance(found, dict) else {}


def of_process(pid: int, names: Iterable[str]) -> dict[str, str]:
    """Variables another process was started with; what it set later itself is not seen.

    Raises:
        UserError: there is no such process, or it belongs to somebody else.
    """
    try:
        content = Path(f"/proc/{pid}/environ").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        raise UserError(f"there is no process {pid}", "ps or ljperf explain RUN finds the right one.") from None
    except PermissionError:
        raise UserError(f"process {pid} belongs to another user", "Run ljperf explain as that user.") from None
    wanted = set(names)
    pairs = (entry.decode(errors="surrogateescape").partition("=") for entry in content.split(b"\0"))
    return {name: value for name, _, value in pairs if name in wanted}
