"""What `ljperf plan` is asked about: a model without weights, and how and where it would be trained."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from training_xpu import envs
from training_xpu.errors import UserError, nearest
from training_xpu.recompute import budget
from training_xpu.workloads import catalogue

if TYPE_CHECKING:
    import torch

    from training_xpu.workloads.flops import ModelFlops

MODULE_ENGINES = ("deepspeed", "fsdp", "ddp", "plain")
DTYPES = ("bf16", "fp16", "fp32")
DEVICES = ("accelerator", "cpu")
THIS_MACHINE = "this"
_DEFAULT_STAGE = 3
_DEFAULT_LENGTH = 4096
_LARGEST = {
    "--seq-len": 2**27,
    "--micro-batch": 2**20,
    "--world-size": 2**20,
    "--gradient-accumulation": 2**20,
}


@dataclass(frozen=True)
class PlanRequest:
    """The options of `ljperf plan`; None means the default that fits."""

    model: str | None = None  # engine/model
    module: str | None = None  # module:function
    engine: str | None = None  # for `module` only
    seq_len: int | None = None
    micro_batch: int | None = None
    world_size: int | None = None
    zero: int | None = None
    dtype: str | None = None
    gradient_accumulation: int = 1
    optimizer: str = "adamw"
    device_memory: str | None = None  # what `read_budget` reads, or "this"
    device: str | None = None  # "cpu" or "accelerator"


@dataclass(frozen=True)
class Subject:
    """A model on the meta device and its setting, all defaults filled in."""

    name: str
    engine: str  # as the user calls it
    model: torch.nn.Module
    inputs: dict[str, torch.Tensor] | None  # None: token ids and labels, as a HF causal language model takes them
    counts: ModelFlops | None  # None: FLOPs are traced
    world_size: int
    micro_batch: int
    sequence_length: int | None
    zero_stage: int | None
    dtype: str
    device_kind: str  # "cpu" or "accelerator"
    budget: budget.Budget
    defaults: tuple[str, ...]  # for people: what was assumed, for it was not given and the model does not say it


def build_subject(request: PlanRequest) -> Subject:
    """Checks a request, fills in what was left open and builds the model without weights.

    Raises:
        UserError: an option is wrong, the model is unknown, or the user's function builds none.
    """
    _check(request)
    if request.module is not None:
        return _from_function(request, request.module)
    assert request.model is not None
    if ":" in request.model and not Path(request.model.partition("/")[2]).is_dir():
        engine, _, function = request.model.rpartition("/")
        remedy = f"Write --module {function}" + (f" --engine {engine}." if engine in MODULE_ENGINES else ".")
        raise UserError(f"--model {request.model} names a function", remedy)
    workload = catalogue.resolve(request.model)
    model = workload.model

    from training_xpu.workloads.flops import ModelFlops

    counts = ModelFlops.from_config(model.config)
    length = request.seq_len or model.sequence_length
    positions = counts.architecture.max_positions
    if positions is not None and length > positions:
        raise UserError(
            f"--seq-len {length}: {model.name} goes up to {positions} positions", f"Such as: --seq-len {positions}"
        )
    target = catalogue.targets()[model.target_device]
    meant = "the default device of a folder" if model.is_folder else "the device the model is meant for"
    kind, limit = _budget(request, budget.Budget(target.memory_bytes, f"{target.name}, {meant}"))
    world_size, ranks_said = _world_size(request, model.target_world_size, "a folder" if model.is_folder else None)
    dtype, dtype_said = _dtype(request, kind)
    return Subject(
        name=workload.name,
        engine=workload.engine,
        model=meta_model(model.config),
        inputs=None,
        counts=counts,
        world_size=world_size,
        micro_batch=request.micro_batch or model.target_micro_batch,
        sequence_length=length,
        zero_stage=_stage(request, workload.engine),
        dtype=dtype,
        device_kind=kind,
        budget=limit,
        defaults=(*ranks_said, *dtype_said),
    )


def meta_model(config: Mapping[str, Any]) -> torch.nn.Module:
    """A transformers causal language model of this config in fp32, on the meta device and in training mode."""
    import torch

    from training_xpu.engines.model import build_model

    with torch.random.fork_rng(devices=[]), torch.device("meta"):
        return build_model(dict(config), None, seed=0)


def _check(request: PlanRequest) -> None:
    if (request.model is None) == (request.module is None):
        raise UserError(
            "a plan needs one of --model and --module" if request.model is None else "--model and --module exclude",
            "Such as: --model deepspeed/llama3-8b, or --module mymodel:build for a function of your own",
        )
    if request.engine is not None:
        if request.module is None:
            raise UserError(f"--engine {request.engine} goes with --module", "--model names its engine: engine/model.")
        if request.engine not in MODULE_ENGINES:
            raise UserError(f"--engine {request.engine}: unknown", nearest(request.engine, MODULE_ENGINES))
    if request.device is not None and request.device not in DEVICES:
        raise UserError(f"--device {request.device}: unknown", "Known: " + ", ".join(DEVICES))
    if request.dtype is not None and request.dtype not in DTYPES:
        raise UserError(f"--dtype {request.dtype}: unknown", nearest(request.dtype, DTYPES))
    if request.zero is not None and not 0 <= request.zero <= 3:
        raise UserError(f"--zero {request.zero}: DeepSpeed has ZeRO stages 0, 1, 2 and 3", "Such as: --zero 3")
    for option, value in (
        ("--seq-len", request.seq_len),
        ("--micro-batch", request.micro_batch),
        ("--world-size", request.world_size),
        ("--gradient-accumulation", request.gradient_accumulation),
    ):
        least = 2 if option == "--seq-len" else 1
        if value is not None and not least <= value <= _LARGEST[option]:
            raise UserError(
                f"{option} {value}: must be {least} to {_LARGEST[option]}",
                f"Such as: {option} {8 if least == 1 else 4096}",
            )


def _stage(request: PlanRequest, engine: str) -> int | None:
    if engine == "deepspeed":
        return _DEFAULT_STAGE if request.zero is None else request.zero
    if request.zero is not None:
        raise UserError(f"--zero {request.zero}: {engine} has no ZeRO stages", "Leave it out, or use deepspeed.")
    return None


def _world_size(request: PlanRequest, target: int, undecided: str | None) -> tuple[int, list[str]]:
    """The ranks, and what to say where they are a default.

    Args:
        undecided: what the model is from, where nobody has said how many ranks it is meant for.
    """
    if request.world_size is not None:
        return request.world_size, []
    if request.device_memory == THIS_MACHINE:
        from training_xpu.workloads.listing import this_machine

        ranks = this_machine().ranks
        return ranks, [f"{_ranks(ranks)}, as a benchmark starts here"]
    return target, [] if undecided is None else [f"{_ranks(target)}, the default of {undecided}"]


def _ranks(count: int) -> str:
    return "1 rank" if count == 1 else f"{count} ranks"


def _dtype(request: PlanRequest, kind: str) -> tuple[str, list[str]]:
    """As a benchmark chooses it where this machine is planned for, and what to say where it is not the usual one."""
    if request.dtype is not None:
        return request.dtype, []
    if kind == "cpu":
        from training_xpu import device

        return (DTYPES[0], []) if device.has_bf16_kernels() else ("fp32", ["fp32, for this CPU has no bf16 kernels"])
    if request.device_memory == THIS_MACHINE:
        from training_xpu.workloads.listing import this_machine

        dtype = this_machine().dtype
        return dtype, [] if dtype == DTYPES[0] else [f"{dtype}, for the accelerators here have no bf16"]
    return DTYPES[0], []


def _budget(request: PlanRequest, target: budget.Budget | None) -> tuple[str, budget.Budget]:
    """The kind of device, and what a rank may use of it: --device-memory, else the variable, else the target's memory.

    Raises:
        UserError: the amount is malformed, or there is neither an amount nor a target.
    """
    if request.device_memory == THIS_MACHINE:
        return _here(request)
    kind = request.device or DEVICES[0]
    if kind == "cpu":
        target = None  # the devices that models are meant for are accelerators
    if request.device_memory is not None:
        return kind, budget.read_budget(request.device_memory, target, "--device-memory")
    found = _from_variable(target) or target
    if found is None:
        raise UserError(
            "how much memory a rank has is not known", "Such as: --device-memory 80GiB; --device-memory this: as here"
        )
    return kind, found


def _here(request: PlanRequest) -> tuple[str, budget.Budget]:
    """This machine, shared by as many ranks as a benchmark would start on it, or --world-size if those are fewer."""
    from training_xpu import device
    from training_xpu.workloads.listing import this_machine

    machine = this_machine()
    if device.kind() == "cpu" or request.device == "cpu":
        if request.device == "accelerator":
            raise UserError(
                "--device accelerator --device-memory this: this machine has none", "Such as: --device-memory 80GiB"
            )
        return "cpu", budget.memory_budget(min(request.world_size or machine.ranks, machine.ranks))
    limit = budget.Budget(machine.memory_bytes_per_rank, "the accelerators of this machine")
    return "accelerator", _from_variable(limit) or limit


def _from_variable(limit: budget.Budget | None) -> budget.Budget | None:
    text = envs.get(budget.VARIABLE)
    return None if text is None else budget.read_budget(text, limit)


def _from_function(request: PlanRequest, spelled: str) -> Subject:
    model, inputs = call_function(spelled)
    engine = request.engine or catalogue.DEFAULT_ENGINE
    hf_language_model = inputs is None and hasattr(model, "config") and "labels" in _forward_parameters(model)
    if inputs is None and not hf_language_model:
        raise UserError(
            f"{spelled} gives a {type(model).__name__} and no inputs for it",
            "Return (module, inputs), inputs being a dict of tensors for its forward, or a tensor.",
        )
    if inputs is not None:
        for option, value in (("--seq-len", request.seq_len), ("--micro-batch", request.micro_batch)):
            if value is not None:
                raise UserError(f"{option}: the inputs that {spelled} returns say what a batch is", "Leave it out.")
    length = None if inputs is not None else (request.seq_len or _DEFAULT_LENGTH)
    batch = request.micro_batch or 1
    if inputs:
        batch = max((t.shape[0] for t in inputs.values() if t.dim() > 0), default=1)
    kind, limit = _budget(request, None)
    world_size, ranks_said = _world_size(request, 1, "a function")
    dtype, dtype_said = _dtype(request, kind)
    return Subject(
        name=spelled,
        engine=engine,
        model=model,
        inputs=inputs,
        counts=None,
        world_size=world_size,
        micro_batch=batch,
        sequence_length=length,
        zero_stage=_stage(request, engine),
        dtype=dtype,
        device_kind=kind,
        budget=limit,
        defaults=(*ranks_said, *dtype_said),
    )


def call_function(spelled: str) -> tuple[torch.nn.Module, dict[str, torch.Tensor] | None]:
    """Calls the user's `module:function` on the meta device, with the current folder importable.

    What it prints goes to stderr, for stdout holds the document.

    Returns:
        The module in training mode, and the inputs of its forward by parameter name if the function gave any.

    Raises:
        UserError: there is no such function, it fails, or it returns something else.
    """
    import torch

    function = _import_function(spelled)
    try:
        with contextlib.redirect_stdout(sys.stderr), torch.device("meta"):
            made = function()
    except (Exception, SystemExit) as error:
        raise UserError(f"{spelled} failed: {_in_a_line(error)}", _how_it_is_called(error)) from error
    inputs: Any = None
    if isinstance(made, tuple) and len(made) == 2:
        made, inputs = made
    if not isinstance(made, torch.nn.Module):
        raise UserError(
            f"{spelled} returns a {type(made).__name__}, not a torch.nn.Module",
            "Return the module, or (module, inputs).",
        )
    made.train()
    return made, None if inputs is None else _named_inputs(spelled, made, inputs)


def _how_it_is_called(error: BaseException) -> str:
    """What an author of a building function may not have reckoned with."""
    text = str(error)
    if isinstance(error, TypeError) and "required" in text and "argument" in text:
        return "It is called without arguments."
    if "meta" in text:
        return "It is called on the meta device, where tensors have shapes and no values."
    return "It is called without arguments, on the meta device, where tensors have shapes and no values."


def _import_function(spelled: str) -> Callable[[], Any]:
    name, colon, attribute = spelled.partition(":")
    if not (name and colon and attribute):
        raise UserError(f"--module {spelled} is not of the form module:function", "Such as: --module mymodel:build")
    if name.endswith(".py") or "/" in name:
        dotted = name.removesuffix(".py").strip("./").replace("/", ".")
        raise UserError(f"--module {spelled}: {name} is a file, not a module", f"Write --module {dotted}:{attribute}")
    folder = str(Path.cwd())
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(error.name + ".")):
            raise UserError(
                f"there is no module {name}", "Modules are looked for in the current folder and among the installed."
            ) from error
        raise UserError(f"{name} cannot be imported: {_in_a_line(error)}") from error
    except (Exception, SystemExit) as error:
        raise UserError(f"{name} cannot be imported: {_in_a_line(error)}") from error
    found: Any = module
    for part in attribute.split("."):
        if not hasattr(found, part):
            functions = [n for n, v in vars(module).items() if callable(v) and not n.startswith("_")]
            raise UserError(f"{name} has no {attribute}", nearest(attribute, functions) if functions else "")
        found = getattr(found, part)
    if not callable(found):
        raise UserError(f"{spelled} is a {type(found).__name__} and cannot be called", "Name a function.")
    return found  # type: ignore[no-any-return]


def _named_inputs(spelled: str, module: torch.nn.Module, inputs: Any) -> dict[str, torch.Tensor]:
    import torch

    if isinstance(inputs, torch.Tensor):
        inputs = (inputs,)
    if isinstance(inputs, list | tuple):
        names = _forward_parameters(module)
        if len(inputs) > len(names):
            raise UserError(
                f"{spelled} returns {len(inputs)} inputs, and forward has parameters for {len(names)}",
                "Return a dict from parameter names to tensors.",
            )
        inputs = dict(zip(names, inputs, strict=False))
    if not isinstance(inputs, dict) or not all(isinstance(v, torch.Tensor) for v in inputs.values()):
        raise UserError(
            f"{spelled} returns inputs that are no tensors", "Return (module, inputs), inputs a dict of tensors."
        )
    return {str(name): tensor for name, tensor in inputs.items()}


def _forward_parameters(module: torch.nn.Module) -> list[str]:
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return [name for name, p in inspect.signature(module.forward).parameters.items() if p.kind in kinds]


def _in_a_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
