"""What a run was measured on: hardware, limits, driver, software and the variables that matter for training.

Records travel with reports, so they hold nothing personal (see `variables`). The host appears as a hash, keyed with the
machine's random id: enough to tell whether two runs shared a host, without publishing names of an internal network.
"""

from __future__ import annotations

import platform
import re
import resource
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Mapping
from importlib import metadata, util
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

import training_xpu
from training_xpu import device, envs
from training_xpu.device import peaks
from training_xpu.device.accelerators import Accelerator, TorchView
from training_xpu.device.files import ROOT, at, format_cpu_list, read_text
from training_xpu.device.peaks import Peak
from training_xpu.device.processes import host_id
from training_xpu.errors import CannotRunHere
from training_xpu.perf.variables import Variable, variables
from training_xpu.records import Record

PACKAGES = (
    *("torch", "torchvision", "torchaudio", "torchao", "transformers", "accelerate", "deepspeed", "datasets"),
    *("tokenizers", "safetensors", "huggingface-hub", "peft", "trl", "megatron-core", "transformer-engine", "apex"),
    *("triton", "flash-attn", "flash-attn-3", "flashinfer-python", "xformers", "liger-kernel", "bitsandbytes", "vllm"),
    *("sglang", "numpy", "pyarrow", "scipy", "pydantic", "ninja", "mkl", "intel-openmp", "intel-extension-for-pytorch"),
    *("nvidia-nccl-cu12", "nvidia-nccl-cu13", "nvidia-cudnn-cu12", "nvidia-cudnn-cu13", "tensorboard"),
    *("mlflow", "mlflow-skinny", "wandb"),
)


class Host(Record):
    """The machine and its operating system."""

    id: str  # see the module's docstring
    architecture: str
    os: str  # PRETTY_NAME of /etc/os-release
    kernel: str
    libc: str
    container: bool


class Node(Record):
    """One NUMA node."""

    number: int
    cpus: str  # e.g. "0-31,64-95"
    memory_bytes: int | None


class Hardware(Record):
    kind: str  # see `device.kind`
    cpu: str
    isa: list[str]
    logical_cores: int
    physical_cores: int
    numa: list[Node]
    memory_bytes: int
    accelerators: list[Accelerator]
    device_nodes: list[str]


class Limits(Record):
    """What of the hardware this process may use; null: no limit."""

    usable_cores: int  # hardware threads
    usable_physical_cores: int
    cpus_allowed: str
    cpu_quota: float | None  # in cores
    cpu_quota_source: str
    usable_memory_bytes: int
    memory_limit_bytes: int | None
    memory_limit_source: str
    shared_memory_bytes: int | None  # /dev/shm
    open_files: int | None  # soft limits of this process
    processes: int | None
    locked_memory_bytes: int | None
    address_space_bytes: int | None
    transparent_huge_pages: str  # the kernel's mode, "" unknown
    cpu_governor: str


class Python(Record):
    version: str
    implementation: str
    build: str  # build number, date and compiler
    executable: Literal["system", "virtual environment", "conda", "standalone"]
    optimised: bool  # built with profile-guided or link-time optimisation
    free_threaded: bool


class TorchBuild(Record):
    version: str
    git: str | None
    debug: bool
    cuda: str | None
    hip: str | None
    sail: str | None  # builds for PPU
    blas: str
    libraries: list[str]
    cpu_capability: str  # the CPU kernels torch chose
    threads: int | None  # intra-op threads in this environment
    dtypes: list[str]  # those this device can train in
    emulated: list[str] = Field(default_factory=list)  # of these, those without kernels, many times slower


class Fingerprint(Record):
    """Two runs whose fingerprints do not differ can be compared."""

    version: str  # of training-xpu-pytorch
    commit: str | None  # of this project when run from its checkout; "-dirty": with changes
    host: Host
    hardware: Hardware
    limits: Limits
    driver: str | None
    python: Python
    torch: TorchBuild | None
    packages: dict[str, str]  # installed ones only
    compiler: str | None  # first line of `$CXX --version` or `g++ --version`
    variables: list[Variable] = Field(default_factory=list)
    peaks: list[Peak] = Field(default_factory=list)  # those known, or measured now or earlier
    notes: list[str] = Field(default_factory=list)  # what looks wrong, and what could not be found out


def collect(measure_peak: bool = False) -> Fingerprint:
    """Takes the fingerprint of this process's machine and environment.

    Args:
        measure_peak: measure the peak of each dtype where it is neither known nor cached (some seconds);
            otherwise only what is cached is shown.
    """
    notes: list[str] = []
    view = None
    try:
        view = peaks.torch_view() if util.find_spec("torch") is not None else None
    except CannotRunHere as error:
        notes.append(error.problem)
    nodes = device.device_nodes()
    accelerators = view.accelerators if view is not None else []
    hardware_nodes = [node for vendor, found in nodes.items() if vendor != "graphics" for node in found]
    if hardware_nodes and view is not None and not accelerators:
        notes.append(
            f"device nodes of an accelerator are present ({', '.join(hardware_nodes[:4])}), "
            f"but this torch ({view.torch}) does not use it"
        )
    elif hardware_nodes and accelerators and device.driver() is None:
        notes.append("the accelerator's driver version could not be read")
    found_peaks: list[Peak] = []
    if view is not None:
        try:
            found_peaks = _peaks(view, measure_peak)
        except CannotRunHere as error:
            notes.append(error.problem)
    return Fingerprint(
        version=training_xpu.__version__,
        commit=_commit(),
        host=_host(),
        hardware=_hardware(view.kind if view is not None else "cpu", accelerators, nodes),
        limits=_limits(),
        driver=device.driver(),
        python=_python(),
        torch=_torch_build(view),
        packages=_packages(),
        compiler=_compiler(),
        variables=variables(),
        peaks=found_peaks,
        notes=notes,
    )


def differences(a: Fingerprint | Mapping[str, Any], b: Fingerprint | Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """What differs, as (field, value in a, value in b); a missing entry is None.

    Fields are dotted paths such as "packages.torch", "variables.OMP_NUM_THREADS" or "hardware.accelerators.0.name".
    Fingerprints read from older or newer records may be given as mappings. Measured peaks that differ by less than a
    tenth, notes, and the folders reports and runs go to are no difference.
    """
    flat_a, flat_b = _flat(a), _flat(b)
    found = []
    for field in sorted({*flat_a, *flat_b}, key=_by_importance):
        left, right = flat_a.get(field), flat_b.get(field)
        if left != right and not _same_peak(field, left, right):
            found.append((field, left, right))
    return found


def _peaks(view: TorchView, measure: bool) -> list[Peak]:
    found = peaks.cached_peaks(view.dtypes, measure)
    for dtype in view.dtypes:
        if dtype not in found and view.accelerators:
            first = view.accelerators[0]
            known = device.known_peak(first.name, dtype, first.units)
            if known is not None:
                found[dtype] = known
    return [found[dtype] for dtype in view.dtypes if dtype in found]


def _host() -> Host:
    release = dict(
        line.split("=", 1) for line in (read_text(at(ROOT, "/etc/os-release")) or "").splitlines() if "=" in line
    )
    container = any(at(ROOT, p).exists() for p in ("/.dockerenv", "/run/.containerenv"))
    container = container or at(ROOT, "/var/run/secrets/kubernetes.io").exists()
    return Host(
        id=host_id(),
        architecture=platform.machine(),
        os=release.get("PRETTY_NAME", "unknown").strip("\"'"),
        kernel=platform.release(),
        libc=" ".join(platform.libc_ver()).strip() or "unknown",
        container=container,
    )


def _hardware(kind: str, accelerators: list[Accelerator], nodes: dict[str, list[str]]) -> Hardware:
    found = device.cores()
    return Hardware(
        kind=kind,
        cpu=device.cpu_model(),
        isa=device.isa_flags(),
        logical_cores=found.online_logical,
        physical_cores=found.online_physical,
        numa=[
            Node(number=n.number, cpus=format_cpu_list(n.cpus), memory_bytes=n.memory_bytes)
            for n in device.numa_nodes()
        ],
        memory_bytes=device.memory().total,
        accelerators=accelerators,
        device_nodes=[node for found_nodes in nodes.values() for node in found_nodes],
    )


def _limits() -> Limits:
    found, memory = device.cores(), device.memory()
    pages = read_text(at(ROOT, "/sys/kernel/mm/transparent_hugepage/enabled")) or ""
    chosen = re.search(r"\[(\w+)\]", pages)
    return Limits(
        usable_cores=found.usable_logical,
        usable_physical_cores=found.usable_physical,
        cpus_allowed=format_cpu_list(found.allowed),
        cpu_quota=found.quota,
        cpu_quota_source=found.quota_source,
        usable_memory_bytes=memory.usable,
        memory_limit_bytes=memory.limit,
        memory_limit_source=memory.limit_source,
        shared_memory_bytes=device.shared_memory_bytes(),
        open_files=_soft(resource.RLIMIT_NOFILE),
        processes=_soft(resource.RLIMIT_NPROC),
        locked_memory_bytes=_soft(resource.RLIMIT_MEMLOCK),
        address_space_bytes=_soft(resource.RLIMIT_AS),
        transparent_huge_pages=chosen[1] if chosen else "",
        cpu_governor=read_text(at(ROOT, "/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor")) or "",
    )


def _soft(which: int) -> int | None:
    soft, _ = resource.getrlimit(which)
    return None if soft == resource.RLIM_INFINITY else soft


def _python() -> Python:
    kind: Literal["system", "virtual environment", "conda", "standalone"] = "standalone"
    if sys.prefix != sys.base_prefix:
        kind = "virtual environment"
    elif (Path(sys.prefix) / "conda-meta").is_dir():
        kind = "conda"
    elif sys.prefix == "/usr":
        kind = "system"
    arguments = sysconfig.get_config_var("CONFIG_ARGS") or ""
    return Python(
        version=platform.python_version(),
        implementation=platform.python_implementation(),
        build=f"{' '.join(platform.python_build())}, {platform.python_compiler()}",
        executable=kind,
        optimised="--enable-optimizations" in arguments or "--with-lto" in arguments,
        free_threaded=bool(sysconfig.get_config_var("Py_GIL_DISABLED")),
    )


def _torch_build(view: TorchView | None) -> TorchBuild | None:
    spec = util.find_spec("torch")
    if view is None or spec is None or spec.origin is None:
        return None
    # torch/version.py imports nothing, so it can be run without importing torch.
    version: dict[str, Any] = {}
    source = Path(spec.origin).with_name("version.py")
    exec(compile(source.read_text(encoding="utf-8"), str(source), "exec"), version)
    return TorchBuild(
        version=view.torch,
        git=version.get("git_version"),
        debug=bool(version.get("debug")),
        cuda=version.get("cuda"),
        hip=version.get("hip"),
        sail=version.get("sail"),
        blas=view.blas,
        libraries=view.libraries,
        cpu_capability=view.cpu_capability,
        threads=_threads(view),
        dtypes=view.dtypes,
        emulated=view.emulated,
    )


def _threads(view: TorchView) -> int | None:
    """torch takes OMP_NUM_THREADS when it is set; a torch already imported has been asked itself."""
    first = envs.snapshot().get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    return int(first) if "torch" not in sys.modules and first.isdigit() and int(first) else view.threads


def _packages() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def _compiler() -> str | None:
    command = (envs.snapshot().get("CXX") or "g++").split()
    if not command or shutil.which(command[0]) is None:
        return None
    return _first_line([*command, "--version"])


def _commit() -> str | None:
    """The commit of this project's own checkout: a checkout around an installed copy would be somebody else's."""
    checkout = Path(training_xpu.__file__).resolve().parents[2]
    if not (checkout / ".git").exists() or not (checkout / "pyproject.toml").exists() or shutil.which("git") is None:
        return None
    environment = {name: value for name, value in envs.snapshot().items() if not name.startswith("GIT_")}
    describe = ["git", "-C", str(checkout), "describe", "--always", "--abbrev=12", "--dirty", "--exclude=*"]
    return _first_line(describe, environment)


def _first_line(command: list[str], environment: dict[str, str] | None = None) -> str | None:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=10, check=False, env=environment, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    lines = done.stdout.strip().splitlines()
    return lines[0] if done.returncode == 0 and lines else None


def _flat(fingerprint: Fingerprint | Mapping[str, Any]) -> dict[str, Any]:
    data = fingerprint.model_dump(mode="json") if isinstance(fingerprint, Fingerprint) else dict(fingerprint)
    data.pop("notes", None)
    flat: dict[str, Any] = {}
    _flatten("", data, flat)
    return flat


def _flatten(path: str, value: Any, into: dict[str, Any]) -> None:
    if path.rpartition(".")[2] in ("schema_version", "schema"):
        return
    if isinstance(value, Mapping):
        for name, below in value.items():
            _flatten(f"{path}.{name}" if path else name, below, into)
    elif isinstance(value, list) and value and all(isinstance(x, Mapping) for x in value):
        for index, below in enumerate(value):
            if path == "variables" and below.get("name") in _FOLDERS:
                continue
            if path == "variables":
                setter = below.get("set_by") or "unknown"
                into[f"{path}.{below.get('name')}"] = f"{below.get('value')} (set by {setter})"
            elif path == "peaks":
                into[f"{path}.{below.get('dtype')}"] = below.get("flops")
            else:
                _flatten(f"{path}.{index}", below, into)
    elif not (isinstance(value, list) and not value):
        into[path] = value


_FOLDERS = ("TRAINING_XPU_REPORT", "TRAINING_XPU_RUNS")
_ORDER = ("hardware", "limits", "driver", "torch", "packages", "variables", "python", "compiler", "peaks", "commit")


def _by_importance(field: str) -> tuple[int, str]:
    part = field.partition(".")[0]
    return (_ORDER.index(part) if part in _ORDER else len(_ORDER), field)


def _same_peak(field: str, a: Any, b: Any) -> bool:
    numbers = isinstance(a, float | int) and isinstance(b, float | int)
    return field.startswith("peaks.") and numbers and abs(a - b) < 0.1 * max(abs(a), abs(b))
