"""Recompute in a running job, without processes: amounts, batches, budgets, measured steps, plans, retries."""

from __future__ import annotations

import copy
import io
import math
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._C._distributed_c10d import HashStore

from training_xpu import features, seams
from training_xpu.engines.joint_start import NothingToDo, decide
from training_xpu.errors import UserError
from training_xpu.recompute import optimize
from training_xpu.recompute.budget import Budget, memory_budget, parse_size
from training_xpu.recompute.online import out_of_memory, recovery
from training_xpu.recompute.online.amounts import Amount, BatchShape, classify
from training_xpu.recompute.online.batch_shape import batch_shape
from training_xpu.recompute.online.controller import Controller, State
from training_xpu.recompute.online.measure import LiveTensors, StepMeasurement
from training_xpu.recompute.online.overhead import Overhead
from training_xpu.recompute.online.profile import MemoryProfile
from training_xpu.recompute.switching.switch import BlockSwitch, Mode
from training_xpu.workloads.live_bytes import measure_live_bytes

GIB = 2**30


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TRAINING_XPU_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("TRAINING_XPU_MEMORY_BUDGET", raising=False)
    yield
    for seam in seams.SEAMS.values():
        for subscription in seam.subscriptions:
            subscription.cancel()


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("6442450944", 6442450944),
        ("6GiB", 6 * GIB),
        ("6 gib", 6 * GIB),
        ("1.5GiB", 3 * GIB // 2),
        ("80GB", 80 * 10**9),
        ("512MiB", 512 * 2**20),
        ("512M", 512 * 2**20),
        ("80%", 8 * GIB),
    ],
)
def test_sizes_as_users_write_them(text: str, size: int) -> None:
    assert parse_size(text, 10 * GIB) == size


@pytest.mark.parametrize("text", ["", "much", "-1GiB", "0", "0%", "101%", "6GiB/s", "nan", "1e3", "9EiB", "6 6"])
def test_what_is_no_size_is_refused_with_the_forms_that_are(text: str) -> None:
    with pytest.raises(UserError) as caught:
        parse_size(text, 10 * GIB)
    assert caught.value.remedy is not None
    assert "6GiB" in caught.value.remedy


def test_the_budget_is_divided_among_the_ranks_of_a_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = memory_budget(1).bytes
    assert memory_budget(4).bytes == whole // 4
    monkeypatch.setenv("TRAINING_XPU_MEMORY_BUDGET", "50%")
    assert memory_budget(2).bytes == pytest.approx(whole / 4, rel=1e-6)
    monkeypatch.setenv("TRAINING_XPU_MEMORY_BUDGET", "3GiB")
    assert memory_budget(2).bytes == 3 * GIB


WEIGHTS = frozenset({(64, 192), (192, 64), (512, 64), (64, 512), (64,)})


@pytest.mark.parametrize(
    ("shape", "part"),
    [
        ((2, 100, 64), "linear"),
        ((200, 192), "linear"),
        ((2, 4, 100, 16), "linear"),
        ((198, 512), "linear"),  # logits of the tokens that have a next one
        ((2, 4, 100, 100), "quadratic"),
        ((8, 100, 100), "quadratic"),
        ((2, 1, 100, 100), "quadratic"),
        ((512, 64), "constant"),  # a gradient
        ((64,), "constant"),
        ((), "constant"),
        ((100_000,), "constant"),  # a bucket of gradients
        ((2, 100), "linear"),
    ],
)
def test_tensors_are_told_apart_by_how_they_grow(shape: tuple[int, ...], part: str) -> None:
    assert classify(shape, BatchShape(2, 100), WEIGHTS) == part


def test_a_shape_that_could_be_either_counts_as_the_larger() -> None:
    assert classify((64, 192), BatchShape(1, 64), WEIGHTS) == "unclear"
    amount = Amount(unclear=1000)
    assert amount.at(BatchShape(1, 64), BatchShape(1, 128)) == 2000
    assert amount.at(BatchShape(1, 64), BatchShape(1, 32)) == 1000


def test_amounts_grow_with_tokens_and_with_tokens_times_length() -> None:
    amount = Amount(constant=7, linear=100, quadratic=1000)
    assert amount.at(BatchShape(2, 10), BatchShape(2, 10)) == 1107
    assert amount.at(BatchShape(2, 10), BatchShape(2, 30)) == 7 + 300 + 9000
    assert amount.at(BatchShape(2, 10), BatchShape(6, 10)) == 7 + 300 + 3000


def test_rounded_shapes_are_few_and_never_smaller() -> None:
    shapes = {BatchShape(2, length).rounded() for length in range(1000, 2000)}
    assert len(shapes) <= 18
    assert all(BatchShape(2, n).rounded().length >= n for n in range(1, 3000))
    assert all(BatchShape(2, n).rounded().length <= math.ceil(n * 1.125) for n in range(8, 3000))


@pytest.mark.parametrize(
    ("args", "kwargs", "shape"),
    [
        ((), {"input_ids": torch.zeros(2, 5, dtype=torch.long), "labels": torch.zeros(2, 9)}, (2, 5)),
        ((), {"inputs_embeds": torch.zeros(2, 5, 64)}, (2, 5)),
        ((torch.zeros(3, 7, dtype=torch.long),), {}, (3, 7)),
        ((torch.zeros(8, 16),), {}, (8, 1)),
        ((torch.zeros(2, 3, 32, 32),), {}, (2, 96)),
        (({"x": [torch.zeros(4, 6, dtype=torch.long)]},), {}, (4, 6)),
        ((), {}, (1, 1)),
        ((torch.zeros(()),), {"flag": True}, (1, 1)),
    ],
)
def test_the_shape_of_a_batch(args: Any, kwargs: Any, shape: tuple[int, int]) -> None:
    assert batch_shape(args, kwargs) == shape


def test_live_tensors_follow_what_is_made_freed_and_resized() -> None:
    counter = LiveTensors(frozenset())
    with counter:
        kept = torch.zeros(1000)
        freed = torch.zeros(500)
        view = kept[10:]
        assert view.data_ptr() != 0
        del freed
        peak, live = counter.take_peak()
        kept.untyped_storage().resize_(400)
        counter.look_again()
        _, smaller = counter.take_peak()
    assert (peak.total, live.total, smaller.total) == (6000, 4000, 400)


class Block(torch.nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up = torch.nn.Linear(width, hidden)
        self.down = torch.nn.Linear(hidden, width)
        self.dropout = torch.nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.dropout(self.down(torch.nn.functional.gelu(self.up(x))))


class Model(torch.nn.Module):
    """Blocks of two kinds of size, the first half wider inside."""

    def __init__(self, hidden: tuple[int, ...] = (96,) * 6) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(128, 32)
        self.blocks = torch.nn.ModuleList(Block(32, h) for h in hidden)
        self.head = torch.nn.Linear(32, 128)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return torch.nn.functional.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten())


class Job:
    """A model trained step by step."""

    def __init__(self, model: torch.nn.Module | None = None) -> None:
        torch.manual_seed(0)
        self.model = model or Model()
        self.optimizer = torch.optim.AdamW(self.model.parameters())

    def step(self, batch: int = 4, length: int = 64, accumulate: int = 1) -> float:
        generator = torch.Generator().manual_seed(length)
        for _ in range(accumulate):
            loss = self.model(torch.randint(0, 128, (batch, length), generator=generator))
            loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(loss.detach())


def profile_of(job: Job, batch: int, length: int) -> tuple[MemoryProfile, BlockSwitch]:
    blocks = list(job.model.get_submodule("blocks"))  # type: ignore[call-overload]
    switch = BlockSwitch(job.model, blocks)
    switch.apply([Mode.RECOMPUTE] * len(blocks))
    job.step(batch, length)
    measurement = StepMeasurement(job.model, blocks)
    switch.listener = measurement
    switch.measuring = True
    measurement.start()
    measurement.begin_micro_batch(BatchShape(batch, length))
    job.step(batch, length)
    measured = measurement.stop()
    switch.listener = None
    switch.measuring = False
    assert measured is not None
    return MemoryProfile(measured), switch


@pytest.mark.parametrize("shape", [(4, 64), (4, 160), (2, 40)])
def test_one_measured_step_tells_the_peak_of_every_count_and_batch(shape: tuple[int, int]) -> None:
    job = Job()
    profile, switch = profile_of(job, 4, 64)
    assert profile.order == (0, 1, 2, 3, 4, 5)
    for count in (0, 2, 6):
        modes = [Mode.RECOMPUTE if i < count else Mode.KEEP for i in range(6)]
        switch.apply(modes)
        job.step(*shape)
        real = measure_live_bytes(lambda: job.step(*shape)).peak_bytes
        # torch keeps 5 KB of its generator's state for each recomputed block, made where no operation shows it.
        assert real - count * 5056 - 100 <= profile.peak(modes, BatchShape(*shape)) <= real + 100


@pytest.fixture
def measured_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process holds nothing but its live tensors, so that budgets are exact."""
    monkeypatch.setattr("training_xpu.device.PeakMemory.read", lambda self: None)


def trained(controller: Controller, job: Job, steps: int, **batch: int) -> None:
    for _ in range(steps):
        job.step(**batch)
        controller.after_step()


def test_a_plan_holds_from_the_third_step_and_is_the_fewest_that_fit(measured_steps: None) -> None:
    job = Job()
    profile, switch = profile_of(job, 4, 64)
    peaks = [profile.peak([Mode.RECOMPUTE if i < n else Mode.KEEP for i in range(6)]) for n in range(7)]
    switch.restore()
    controller = Controller(job.model, Budget((peaks[2] + peaks[1]) // 2, "test"))
    trained(controller, job, 2)
    assert controller.state is State.CHECKING
    trained(controller, job, 1)
    assert controller.state is State.STEADY
    assert controller.replans == 0
    assert sum(mode is Mode.RECOMPUTE for mode in controller.switch.modes) <= 2
    assert measure_live_bytes(job.step).peak_bytes <= (peaks[2] + peaks[1]) // 2
    controller.close()


def test_everything_is_kept_where_everything_fits(measured_steps: None) -> None:
    job = Job()
    controller = Controller(job.model, Budget(2**40, "test"))
    trained(controller, job, 3)
    assert set(controller.switch.modes) == {Mode.KEEP}
    controller.close()


def test_a_larger_batch_is_planned_before_its_forward(measured_steps: None) -> None:
    job = Job()
    controller = Controller(job.model, Budget(2_500_000, "test"))
    trained(controller, job, 3, length=32)
    assert set(controller.switch.modes) == {Mode.KEEP}
    seen: list[int] = []
    job.model.register_forward_pre_hook(
        lambda module, args: seen.append(sum(m is not Mode.KEEP for m in controller.switch.modes))
    )
    job.step(length=256)
    assert seen[0] > 0
    job.step(length=32)
    assert seen[1] == 0
    controller.close()


def test_losses_and_random_numbers_are_those_of_the_plain_job(measured_steps: None) -> None:
    plain = Job()
    losses = [plain.step(length=n, accumulate=2) for n in (64, 64, 64, 200, 40)]
    job = Job()
    controller = Controller(job.model, Budget(1_200_000, "test"))
    found = []
    for n in (64, 64, 64, 200, 40):
        found.append(job.step(length=n, accumulate=2))
        controller.after_step()
    controller.close()
    assert found == losses


def test_taking_it_back_leaves_the_model_as_it_was() -> None:
    job = Job()
    before = {name: dict(module.__dict__) for name, module in job.model.named_modules()}
    keys = list(job.model.state_dict())
    controller = Controller(job.model, Budget(GIB, "test"))
    assert list(job.model.state_dict()) == keys
    trained(controller, job, 4)
    controller.close()
    after = {name: dict(module.__dict__) for name, module in job.model.named_modules()}
    for name, content in before.items():
        assert after[name].keys() == content.keys()


def test_a_model_in_hand_can_be_copied_and_saved_whole() -> None:
    job = Job()
    controller = Controller(job.model, Budget(GIB, "test"))
    trained(controller, job, 3)
    buffer = io.BytesIO()
    torch.save(job.model, buffer)
    buffer.seek(0)
    for other in (copy.deepcopy(job.model), torch.load(buffer, weights_only=False)):
        tokens = torch.randint(0, 128, (2, 8))
        torch.manual_seed(1)
        expected = job.model(tokens).item()
        torch.manual_seed(1)
        assert other(tokens).item() == expected
        assert other.forward.__self__ is other
    controller.close()


def test_a_model_without_repeated_blocks_is_left_alone() -> None:
    with pytest.raises(NothingToDo, match="no repeated blocks"):
        Controller(torch.nn.Linear(2, 2), Budget(GIB, "test"))


def test_a_fault_inside_never_reaches_the_training(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job()
    controller = Controller(job.model, Budget(GIB, "test"))
    trained(controller, job, 2)

    def broken(*args: Any) -> None:
        raise ZeroDivisionError("planned")

    assert controller.planner is not None
    monkeypatch.setattr(controller.planner, "plan_for", broken)
    trained(controller, job, 2)
    assert controller.state is State.GIVEN_UP
    assert not isinstance(job.model.__dict__.get("forward"), recovery.GuardedForward)


@pytest.mark.parametrize(
    ("error", "yes"),
    [
        (MemoryError(), True),
        (torch.OutOfMemoryError("CUDA out of memory"), True),
        (RuntimeError("[enforce fail at alloc_cpu.cpp:127] . DefaultCPUAllocator: can't allocate memory"), True),
        (RuntimeError("shape mismatch"), False),
        (ValueError("out of memory"), False),
    ],
)
def test_running_out_of_memory_is_recognised(error: Exception, yes: bool) -> None:
    assert out_of_memory.is_out_of_memory(error) is yes


def failing_once(model: torch.nn.Module, on_call: int) -> Callable[..., Any]:
    """A forward of the last block that runs out of memory at one of its calls."""
    calls = 0
    own = type(model.blocks[-1]).forward  # type: ignore[index, union-attr]

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls == on_call:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        return own(self, x)  # type: ignore[no-any-return]

    return forward


def test_a_forward_that_runs_out_of_memory_runs_again_with_a_tighter_plan(
    measured_steps: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = Job()
    losses = [plain.step() for _ in range(5)]
    job = Job()
    controller = Controller(job.model, Budget(GIB, "test"))
    found = []
    for step in range(5):
        if step == 4:
            monkeypatch.setattr(Block, "forward", failing_once(job.model, 6))
        found.append(job.step())
        controller.after_step()
    assert found == losses
    assert sum(mode is Mode.RECOMPUTE for mode in controller.switch.modes) == 1
    controller.close()


def test_a_backward_that_runs_out_of_memory_is_heeded_at_the_next_start(measured_steps: None) -> None:
    seams.STEP.subscribe(lambda step: None, owner="test")  # as the feature does, which watches backwards too
    job = Job()
    controller = Controller(job.model, Budget(GIB, "test"))
    trained(controller, job, 3)

    def fail(gradient: torch.Tensor) -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    loss = job.model(torch.randint(0, 128, (4, 64)))
    loss.register_hook(fail)
    with pytest.raises(RuntimeError, match="can't allocate") as caught:
        loss.backward()
    assert "next start will recompute at least 1" in caught.value.__notes__[0]
    controller.close()
    again = Job()
    controller = Controller(again.model, Budget(GIB, "test"))
    trained(controller, again, 3)
    assert sum(mode is Mode.RECOMPUTE for mode in controller.switch.modes) == 1
    controller.close()


def test_a_start_after_the_kernel_killed_the_last_one_recomputes_more(monkeypatch: pytest.MonkeyPatch) -> None:
    kills = 3
    monkeypatch.setattr("training_xpu.device.oom_kill_count", lambda: kills)
    recovery.leave_running_plan("job", 2, 16)
    path = out_of_memory.record_path("job").with_suffix(".running.json")
    left = recovery.RunningPlan.read(path)
    left.model_copy(update={"pid": 2**22 + 1}).write(path)
    assert recovery.heed_last_start("job", 16) is None  # it ended some other way
    left.model_copy(update={"pid": 2**22 + 1}).write(path)
    kills = 4
    plan = recovery.heed_last_start("job", 16)
    assert plan is not None
    assert plan.layers_at_least == 4
    assert not path.exists()


@pytest.mark.parametrize("at_least", [-5, 0, 5, 99])
def test_a_note_that_does_not_go_with_the_model_is_passed_over(at_least: int) -> None:
    path = out_of_memory.record_path("odd")
    path.parent.mkdir(parents=True, exist_ok=True)
    out_of_memory.TighterPlan(layers_at_least=at_least, layers_total=4, reason="edited").write(path)
    assert recovery.heed_last_start("odd", 4) is None


def test_a_note_that_cannot_be_removed_does_no_harm() -> None:
    path = out_of_memory.record_path("stuck").with_suffix(".running.json")
    (path / "inside").mkdir(parents=True)
    assert recovery.heed_last_start("stuck", 4) is None


@pytest.mark.parametrize("given", [None, "model", [torch.nn.Linear(2, 2)], torch.nn.Linear, {}])
def test_only_modules_are_optimized(given: Any) -> None:
    with pytest.raises(UserError, match=r"optimize takes a torch\.nn\.Module, not"):
        optimize(given)


def test_a_model_has_one_controller_at_a_time() -> None:
    job = Job()
    first = Controller(job.model, Budget(GIB, "test"))
    with pytest.raises(NothingToDo, match="in hand already"):
        Controller(job.model, Budget(GIB, "test"))
    first.close()
    Controller(job.model, Budget(GIB, "test")).close()


def starts(world_size: int, reasons: dict[int, str | None]) -> set[str | None]:
    """What the ranks that take part are told."""
    store = HashStore()
    with ThreadPoolExecutor(world_size) as ranks:
        told = [ranks.submit(decide, store, rank, world_size, reason, 0.5, "X") for rank, reason in reasons.items()]
    return {answer.result() for answer in told}


def test_ranks_start_together_or_not_at_all() -> None:
    assert starts(3, {0: None, 1: None, 2: None}) == {None}
    assert starts(3, {0: None, 1: "its budget is malformed", 2: None}) == {"rank 1: its budget is malformed"}
    (missing,) = starts(3, {0: None, 2: None})
    assert missing is not None
    assert missing == "rank 1: not heard of within 0 s; is X set on all ranks alike?"


def test_the_allocator_comes_on_top_of_live_bytes() -> None:
    overhead = Overhead.measured(live=100, total=160, device_type="cpu")
    assert overhead.total(100) == 160
    assert overhead.total(200) == 200 + 60 + 10
    assert overhead.live_budget(160) == 100
    assert overhead.total(overhead.live_budget(1000)) <= 1000
    assert overhead.live_budget(50) == -10


def test_the_variable_is_declared_and_read() -> None:
    assert features.find("recompute").variable == "CHECKPOINT_OPTIMIZATION"
