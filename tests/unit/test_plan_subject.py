"""What `ljperf plan` is asked about: defaults, the user's own functions, and step time by FLOPs."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from training_xpu.errors import UserError
from training_xpu.perf import plan_time
from training_xpu.perf.plan_subject import PlanRequest, build_subject, call_function, meta_model
from training_xpu.workloads.flops import ModelFlops

TINY = {"model_type": "llama", "hidden_size": 256, "intermediate_size": 160, "num_hidden_layers": 3}
TINY |= {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 256, "max_position_embeddings": 128}
FUNCTIONS = """
import sys
import torch


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = torch.nn.Linear(8, 32), torch.nn.Linear(32, 8)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList([Block() for _ in range(4)])
        self.head = torch.nn.Linear(8, 16)

    def forward(self, x, scale=None):
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def build():
    print("building")
    return Net(), {"x": torch.zeros(6, 5, 8)}


def with_a_tensor():
    return Net().eval(), torch.zeros(2, 5, 8)


def without_inputs():
    return Net()


def reads_a_value():
    rates = [x.item() for x in torch.full((4,), 0.1)]
    return Net(), torch.zeros(2, 5, 8)


def wants_a_width(width):
    return Net()


def fails():
    raise RuntimeError("no weights here\\nand more")


def ends():
    sys.exit(3)


def text():
    return "a model"


def too_many():
    return Net(), (torch.zeros(1, 8), torch.zeros(1), torch.zeros(1))


number = 3
"""


@pytest.fixture
def functions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> str:
    """A module with the functions above in the current folder; every test has one of its own."""
    name = f"own_{abs(hash(request.node.name))}"
    (tmp_path / f"{name}.py").write_text(FUNCTIONS, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return name


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(TINY), encoding="utf-8")
    return tmp_path


def test_a_catalogue_model_has_the_setting_it_is_meant_for() -> None:
    subject = build_subject(PlanRequest(model="deepspeed/llama3.2-1b"))
    assert (subject.engine, subject.zero_stage, subject.device_kind) == ("deepspeed", 3, "accelerator")
    assert subject.budget.bytes == 85_520_809_984  # 81,559 MiB
    assert subject.budget.source == "nvidia-h100-80gb, the device the model is meant for"
    assert (subject.dtype, subject.defaults) == ("bf16", ())
    assert sum(p.numel() for p in subject.model.parameters()) == 1_235_814_400
    assert {p.device.type for p in subject.model.parameters()} == {"meta"}
    assert subject.model.training


def test_a_local_folder(folder: Path) -> None:
    subject = build_subject(
        PlanRequest(model=f"fsdp/{folder}", seq_len=32, micro_batch=5, world_size=6, device_memory="3GiB")
    )
    assert (subject.sequence_length, subject.micro_batch, subject.world_size) == (32, 5, 6)
    assert subject.zero_stage is None
    assert subject.budget.bytes == 3 * 2**30


def test_what_nobody_has_decided_for_a_folder_is_called_a_default(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TRAINING_XPU_MEMORY_BUDGET", raising=False)
    subject = build_subject(PlanRequest(model=f"fsdp/{folder}"))
    assert subject.budget.source == "nvidia-h100-80gb, the default device of a folder"
    assert subject.defaults == ("8 ranks, the default of a folder",)
    assert build_subject(PlanRequest(model=f"fsdp/{folder}", world_size=8)).defaults == ()


def test_a_share_says_of_what(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    share = build_subject(PlanRequest(model="ddp/llama3.2-1b", device_memory="90%")).budget
    expected = "90% of 79.65 GiB, nvidia-h100-80gb, the device the model is meant for"
    assert share.source == f"--device-memory={expected}"
    monkeypatch.setenv("TRAINING_XPU_MEMORY_BUDGET", "90%")
    assert build_subject(PlanRequest(model="ddp/llama3.2-1b")).budget.source == f"TRAINING_XPU_MEMORY_BUDGET={expected}"


@pytest.mark.parametrize("memory", ["this", "1GiB"])
def test_the_dtype_on_cpus_is_the_one_it_has_kernels_for(
    folder: Path, monkeypatch: pytest.MonkeyPatch, memory: str
) -> None:
    request = PlanRequest(model=f"ddp/{folder}", device="cpu", device_memory=memory, world_size=1)
    for kernels, dtype, said in ((False, "fp32", ("fp32, for this CPU has no bf16 kernels",)), (True, "bf16", ())):
        monkeypatch.setattr("training_xpu.device.has_bf16_kernels", lambda kernels=kernels: kernels)
        subject = build_subject(request)
        assert (subject.dtype, subject.defaults) == (dtype, said)
        explicit = build_subject(replace(request, dtype="bf16"))
        assert (explicit.dtype, explicit.defaults) == ("bf16", ())
    monkeypatch.setattr("training_xpu.device.has_bf16_kernels", lambda: False)
    assert build_subject(PlanRequest(model=f"ddp/{folder}")).dtype == "bf16"


def test_building_without_weights_leaves_the_random_numbers_alone() -> None:
    before = torch.random.get_rng_state()
    meta_model(TINY)
    assert torch.equal(before, torch.random.get_rng_state())


def test_a_budget_is_the_option_else_the_variable_else_the_target(monkeypatch: pytest.MonkeyPatch) -> None:
    request = PlanRequest(model="ddp/llama3.2-1b")
    monkeypatch.setenv("TRAINING_XPU_MEMORY_BUDGET", "50%")
    assert build_subject(request).budget.bytes == 85_520_809_984 // 2
    monkeypatch.setenv("TRAINING_XPU_MEMORY_BUDGET", "6GiB")
    assert build_subject(request).budget.bytes == 6 * 2**30
    assert not build_subject(request).budget.live
    given = PlanRequest(model="ddp/llama3.2-1b", device_memory="5000000")
    assert build_subject(given).budget.bytes == 5_000_000
    monkeypatch.setenv("TRAINING_XPU_MEMORY_BUDGET", "live:6GiB")
    for live in (request, replace(given, device_memory="live:6GiB"), replace(request, device_memory="this")):
        limit = build_subject(live).budget
        assert (limit.bytes, limit.live) == (6 * 2**30, True)


def test_a_plan_for_cpus_knows_no_target(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRAINING_XPU_MEMORY_BUDGET", raising=False)
    request = PlanRequest(model=f"ddp/{folder}", device="cpu")
    with pytest.raises(UserError, match="how much memory a rank has is not known"):
        build_subject(request)
    monkeypatch.setenv("TRAINING_XPU_MEMORY_BUDGET", "6GiB")
    subject = build_subject(request)
    assert (subject.device_kind, subject.budget.bytes) == ("cpu", 6 * 2**30)


def test_this_machine_is_shared_by_its_ranks(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRAINING_XPU_MEMORY_BUDGET", raising=False)
    one, many = (
        build_subject(PlanRequest(model=f"ddp/{folder}", device_memory="this", world_size=n)) for n in (1, 1024)
    )
    assert one.budget.bytes >= many.budget.bytes > 0
    if one.device_kind == "cpu":
        from training_xpu import device
        from training_xpu.workloads.listing import this_machine

        assert one.budget.bytes == device.usable_memory()
        assert many.budget.bytes == device.usable_memory() // this_machine().ranks


@pytest.mark.parametrize(
    ("request_", "said"),
    [
        (PlanRequest(), "needs one of --model and --module"),
        (PlanRequest(model="ddp/llama3-8b", module="a:b"), "exclude"),
        (PlanRequest(model="ddp/llama3-8b", engine="ddp"), "goes with --module"),
        (PlanRequest(module="a:b", engine="dpp"), "Did you mean ddp"),
        (PlanRequest(model="ddp/llama3-8b", device="gpu"), "Known: accelerator, cpu"),
        (PlanRequest(model="ddp/llama3-8b", dtype="bf17"), "Did you mean bf16"),
        (PlanRequest(model="ddp/llama3-8b", zero=2), "ddp has no ZeRO stages"),
        (PlanRequest(model="deepspeed/llama3-8b", zero=4), "ZeRO stages 0, 1, 2 and 3"),
        (PlanRequest(model="ddp/llama3-8b", micro_batch=0), "--micro-batch 0"),
        (PlanRequest(model="ddp/llama3-8b", seq_len=1), "--seq-len 1"),
        (PlanRequest(model="ddp/llama3-8b", world_size=10**12), "--world-size 1000000000000"),
        (PlanRequest(model="ddp/llama3-8b", gradient_accumulation=0), "--gradient-accumulation 0"),
        (PlanRequest(model="ddp/llama3-8b", seq_len=8193), "up to 8192 positions"),
        (PlanRequest(model="ddp/lama3-8b"), "Did you mean ddp/llama3-8b"),
        (PlanRequest(model="ddp/train:build"), "Write --module train:build --engine ddp."),
        (PlanRequest(model="ddp/llama3-8b", device_memory="80 gigs"), "6GiB, 512MiB, 80GB"),
        (PlanRequest(model="ddp/llama3-8b", device_memory="80 gigs"), "live:6GiB"),
        (PlanRequest(model="ddp/llama3-8b", device_memory="0"), "at least one byte"),
        (PlanRequest(model="ddp/llama3-8b", device_memory="80"), "is a unit missing?\nSuch as: 80GiB"),
        (PlanRequest(model="ddp/llama3-8b", device_memory="101%"), "at most 100%"),
        (PlanRequest(model="ddp/llama3-8b", device_memory="nan"), "no amount of memory"),
        (PlanRequest(model="ddp/llama3-8b", device_memory="-1GiB"), "no amount of memory"),
    ],
)
def test_wrong_requests_are_refused_with_what_would_be_right(request_: PlanRequest, said: str) -> None:
    with pytest.raises(UserError) as refused:
        build_subject(request_)
    assert said in str(refused.value)
    assert refused.value.exit_code == 2


def test_a_function_gives_a_module_and_inputs(functions: str, capsys: pytest.CaptureFixture[str]) -> None:
    subject = build_subject(PlanRequest(module=f"{functions}:build", device_memory="1GiB"))
    assert capsys.readouterr().out == ""  # a document may follow there
    assert (subject.name, subject.engine, subject.micro_batch) == (f"{functions}:build", "deepspeed", 6)
    assert subject.sequence_length is None
    assert subject.defaults == ("1 rank, the default of a function",)
    assert subject.inputs is not None
    assert subject.inputs["x"].device.type == "meta"
    assert {p.device.type for p in subject.model.parameters()} == {"meta"}


def test_a_tensor_is_the_first_parameter_of_forward(functions: str) -> None:
    module, inputs = call_function(f"{functions}:with_a_tensor")
    assert inputs is not None
    assert list(inputs) == ["x"]
    assert module.training


@pytest.mark.parametrize(
    ("function", "said"),
    [
        ("nothing", "has no nothing"),
        ("biuld", "Did you mean build"),
        ("number", "cannot be called"),
        ("fails", "RuntimeError: no weights here"),
        ("fails", "It is called without arguments, on the meta device"),
        ("reads_a_value", "\nIt is called on the meta device, where tensors have shapes and no values."),
        ("wants_a_width", "\nIt is called without arguments."),
        ("ends", "SystemExit: 3"),
        ("text", "returns a str, not a torch.nn.Module"),
        ("too_many", "3 inputs, and forward has parameters for 2"),
        ("without_inputs", "no inputs for it"),
    ],
)
def test_functions_that_build_no_model(functions: str, function: str, said: str) -> None:
    with pytest.raises(UserError) as refused:
        build_subject(PlanRequest(module=f"{functions}:{function}", device_memory="1GiB"))
    assert said in str(refused.value)
    assert len(str(refused.value).splitlines()) <= 2


@pytest.mark.parametrize(
    ("spelled", "said"),
    [
        ("no_such_module:build", "there is no module no_such_module"),
        ("models/train.py:build", "Write --module models.train:build"),
        ("train", "not of the form module:function"),
        (":build", "not of the form module:function"),
    ],
)
def test_modules_that_are_not_there(spelled: str, said: str, functions: str) -> None:
    with pytest.raises(UserError) as refused:
        call_function(spelled)
    assert said in str(refused.value)


def test_a_module_that_does_not_import(tmp_path: Path, functions: str) -> None:
    (tmp_path / "broken_own.py").write_text("import no_such_package_at_all\n", encoding="utf-8")
    with pytest.raises(
        UserError, match=r"broken_own cannot be imported: ModuleNotFoundError: .*no_such_package_at_all"
    ):
        call_function("broken_own:build")


def test_the_function_says_what_a_batch_is(functions: str) -> None:
    with pytest.raises(UserError, match="say what a batch is"):
        build_subject(PlanRequest(module=f"{functions}:build", micro_batch=2, device_memory="1GiB"))


def test_without_a_target_the_memory_must_be_given(functions: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRAINING_XPU_MEMORY_BUDGET", raising=False)
    with pytest.raises(UserError, match="how much memory a rank has is not known"):
        build_subject(PlanRequest(module=f"{functions}:build"))
    with pytest.raises(UserError, match="a share of what"):
        build_subject(PlanRequest(module=f"{functions}:build", device_memory="80%"))


def test_recomputing_every_block_adds_its_forward_once() -> None:
    counts = ModelFlops.from_config(TINY)
    flops = plan_time.flops_from_counts(counts, 64)
    # Per token and layer: projections 256 x (256 + 128 + 128 + 256), MLP 3 x 256 x 160; scores of 64 x 65 / 2 pairs.
    block = 2 * 64 * (256 * 768 + 3 * 256 * 160) + 4 * 256 * (64 * 65 // 2)
    head = 2 * 64 * 256 * 256
    assert flops.blocks == (float(block),) * 3
    assert flops.time_ratio(0) == 1.0
    assert flops.time_ratio(2) == pytest.approx(1 + 2 * block / (3 * (3 * block + head)))


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2},
        {"model_type": "mistral", "sliding_window": 16},
    ],
)
def test_traced_flops_agree_with_those_counted_from_the_config(change: dict[str, Any]) -> None:
    config = {**TINY, **change}
    model = meta_model(config)
    tokens = torch.zeros(2, 64, dtype=torch.long, device="meta")
    names = [f"model.layers.{i}" for i in range(3)]
    traced = plan_time.flops_from_trace(model, {"input_ids": tokens, "labels": tokens}, names)
    assert traced is not None
    counted = plan_time.flops_from_counts(ModelFlops.from_config(config), 64)
    if "sliding_window" in change:  # torch counts what a mask hides
        assert traced.forward >= 2 * counted.forward
        return
    assert traced.blocks == pytest.approx([2 * b for b in counted.blocks])
    assert traced.total == pytest.approx(2 * counted.total)


def test_frozen_layers_need_no_products_for_their_weights(functions: str) -> None:
    module, inputs = call_function(f"{functions}:build")
    assert inputs is not None
    names = [f"layers.{i}" for i in range(4)]
    whole = plan_time.flops_from_trace(module, inputs, names)
    for parameter in module.parameters():
        parameter.requires_grad_(False)
    module.head.weight.requires_grad_(True)  # type: ignore[union-attr, operator]
    frozen = plan_time.flops_from_trace(module, inputs, names)
    assert whole is not None
    assert frozen is not None
    block, head = 2 * 30 * 8 * 32 * 2, 2 * 30 * 8 * 16
    assert whole.blocks == frozen.blocks == (float(block),) * 4
    assert whole.forward == frozen.forward == 4 * block + head
    # The first layer's input needs no gradient; of a frozen model only the head's weight does.
    assert whole.total == 3 * whole.forward - block / 2
    assert frozen.total == frozen.forward + head


def test_a_model_that_cannot_be_traced_has_no_ratio() -> None:
    class Peeks(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * float(x.sum())

    assert plan_time.flops_from_trace(Peeks(), {"x": torch.zeros(3)}, []) is None
    ratios, source = plan_time.time_ratios(2, None, None)
    assert ratios == [None, None, None]
    assert source.startswith("unknown")


def test_measured_steps_count_only_the_forward_of_recomputed_blocks() -> None:
    flops = plan_time.StepFlops(blocks=(3.0, 3.0), total=30.0, forward=10.0)
    ratios, source = plan_time.time_ratios(2, flops, plan_time.MeasuredStep(step_s=5.0, forward_s=1.0, run="a run"))
    assert ratios == pytest.approx([1.0, 1 + 0.2 * 0.3, 1 + 0.2 * 0.6])
    assert "a run" in source
