"""seams: what subscribers hear, and that nothing of a seam stays behind."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed.device_mesh as device_mesh
import torch.distributed.distributed_c10d as c10d
from torch.nn.modules import module as torch_module
from torch.optim import optimizer as torch_optimizer

from training_xpu import seams
from training_xpu.seams.base import Patch

ORIGINALS = {
    "compile": torch.compile,
    "module": torch.nn.Module.__dict__["compile"],
    "init": c10d.init_process_group,
    "group": c10d.new_group,
    "backward": torch.autograd.backward,
}


def current() -> dict[str, Any]:
    return {
        "compile": torch.compile,
        "module": torch.nn.Module.__dict__["compile"],
        "init": c10d.init_process_group,
        "group": c10d.new_group,
        "backward": torch.autograd.backward,
    }


def hooks() -> int:
    return (
        len(torch_module._global_forward_pre_hooks)
        + len(torch_optimizer._global_optimizer_pre_hooks)
        + len(torch_optimizer._global_optimizer_post_hooks)
    )


@pytest.fixture(autouse=True)
def _nothing_stays_behind() -> Iterator[None]:
    assert current() == ORIGINALS
    yield
    for seam in seams.SEAMS.values():
        for subscription in seam.subscriptions:
            subscription.cancel()
    seams.set_fault_handler(None)
    assert all(now is ORIGINALS[name] for name, now in current().items())
    assert torch.distributed.init_process_group is device_mesh.init_process_group is ORIGINALS["init"]
    assert hooks() == 0


def tiny() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))


class Own(torch.nn.Module):
    """torch.compile does not look into torch's own containers when they are the root."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = tiny()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x) + 1


X = torch.ones(2, 4)


def test_unknown_seam() -> None:
    with pytest.raises(Exception, match=r"unknown seam 'steps'\nDid you mean step\?"):
        seams.by_name("steps")


def test_patches_are_counted() -> None:
    first = seams.COMPILE.subscribe(lambda call: None, "a")
    wrapper = torch.compile
    second = seams.COMPILE.subscribe(lambda call: None, "b")
    assert torch.compile is wrapper is not ORIGINALS["compile"]
    first.cancel()
    first.cancel()
    assert torch.compile is wrapper
    second.cancel()
    assert torch.compile is ORIGINALS["compile"]


def test_an_attribute_has_one_owner() -> None:
    subscription = seams.COMPILE.subscribe(lambda call: None, "a")
    rival = Patch(lambda: [(torch, "compile")], lambda original: original)
    with pytest.raises(RuntimeError, match="owner"):
        rival.install()
    subscription.cancel()
    rival.install()
    rival.uninstall()


def test_a_later_patch_of_somebody_else_survives_and_ours_goes_silent() -> None:
    heard: list[object] = []
    subscription = seams.COMPILE.subscribe(heard.append, "a")
    ours = torch.compile

    def theirs(*args: Any, **kwargs: Any) -> Any:
        return ours(*args, **kwargs)

    torch.compile = theirs  # type: ignore[assignment]
    try:
        subscription.cancel()
        assert torch.compile is theirs
        torch.compile(torch.relu, backend="eager")
        assert heard == []
        again = seams.COMPILE.subscribe(heard.append, "a")
        torch.compile(torch.relu, backend="eager")
        assert len(heard) == 1  # once, though subscribed anew
        again.cancel()
    finally:
        torch.compile = ours
        seams.COMPILE.subscribe(heard.append, "a").cancel()


class TestCompile:
    def test_function_decorator_and_module(self) -> None:
        heard: list[tuple[object, dict[str, Any]]] = []
        seams.COMPILE.subscribe(lambda call: heard.append((call.model, dict(call.arguments))), "t")

        @torch.compile(backend="eager", dynamic=False)
        def double(x: torch.Tensor) -> torch.Tensor:
            return x * 2

        model = tiny()
        torch.compile(model, backend="eager")
        assert torch.equal(double(X), X * 2)
        assert len(heard) == 2
        assert heard[0][0].__name__ == "double"  # type: ignore[attr-defined]
        assert heard[0][1]["dynamic"] is False
        assert heard[1][0] is model

    def test_a_subscriber_may_change_arguments_or_replace_the_result(self) -> None:
        def to_eager(call: seams.CompileCall) -> None:
            call.arguments["backend"] = "eager"

        seams.COMPILE.subscribe(to_eager, "first")
        compiled = torch.compile(lambda x: x + 1, backend="no such backend")
        assert torch.equal(compiled(X), X + 1)
        later: list[object] = []
        seams.COMPILE.subscribe(lambda call: "instead", "second")
        seams.COMPILE.subscribe(later.append, "third")
        assert torch.compile(torch.relu) == "instead"
        assert later == []

    def test_calls_of_a_subscriber_are_its_own(self) -> None:
        calls = []

        def compile_it_myself(call: seams.CompileCall) -> object:
            calls.append(call)
            return torch.compile(call.model, backend="eager")

        seams.COMPILE.subscribe(compile_it_myself, "t")
        assert torch.equal(torch.compile(torch.relu)(X), X)
        assert len(calls) == 1

    def test_module_compile_is_its_own_seam(self) -> None:
        plain: list[object] = []
        modules: list[torch.nn.Module] = []
        seams.COMPILE.subscribe(plain.append, "t")
        seams.MODULE_COMPILE.subscribe(lambda call: modules.append(call.module), "t")
        model = tiny()
        model.compile(backend="eager")
        assert modules == [model]
        assert plain == []
        assert model._compiled_call_impl is not None

    def test_a_subscriber_may_compile_the_module_itself(self) -> None:
        seams.MODULE_COMPILE.subscribe(lambda call: True, "t")
        model = tiny()
        model.compile(backend="eager")
        assert model._compiled_call_impl is None

    def test_wrappers_look_like_the_originals(self) -> None:
        import inspect
        import pickle

        before = inspect.signature(torch.compile)
        seams.COMPILE.subscribe(lambda call: None, "t")
        assert inspect.signature(torch.compile) == before
        assert pickle.loads(pickle.dumps(torch.compile)) is torch.compile


class TestFaults:
    def test_a_subscriber_that_raises_is_dropped_and_named(self) -> None:
        faults: list[tuple[str, str, str]] = []
        seams.set_fault_handler(lambda owner, seam, error: faults.append((owner, seam, str(error))))

        def broken(call: seams.CompileCall) -> None:
            call.arguments["backend"] = "half changed"
            raise RuntimeError("broken")

        heard: list[object] = []
        seams.COMPILE.subscribe(broken, "bad")
        seams.COMPILE.subscribe(heard.append, "good")
        for _ in range(2):
            assert torch.equal(torch.compile(torch.relu, backend="eager")(X), X)
        assert faults == [("bad", "compile", "broken")]
        assert len(heard) == 2

    def test_without_a_handler_one_line_says_so(self, caplog: pytest.LogCaptureFixture) -> None:
        import logging

        logging.getLogger("training_xpu").propagate = True
        seams.STEP.subscribe(lambda step: 1 / 0, "bad")
        train(tiny(), 2)
        assert [r.getMessage() for r in caplog.records] == [
            "bad left the step seam: ZeroDivisionError: division by zero"
        ]


class TestProcessGroup:
    @pytest.fixture(autouse=True)
    def _group(self) -> Iterator[None]:
        yield
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()

    def test_arguments_may_be_changed_before_the_call(self) -> None:
        heard: list[tuple[str, list[str]]] = []

        def use_gloo(call: seams.ProcessGroupCall) -> None:
            heard.append((call.function, sorted(call.arguments)))
            if call.function == "init_process_group":
                call.arguments["backend"] = "gloo"

        seams.PROCESS_GROUP.subscribe(use_gloo, "t")
        store = torch.distributed.HashStore()
        torch.distributed.init_process_group("no such backend", store=store, rank=0, world_size=1)
        assert torch.distributed.get_backend() == "gloo"
        torch.distributed.new_group([0])
        mesh = device_mesh.init_device_mesh("cpu", (1, 1))
        assert mesh.ndim == 2
        assert heard[0] == ("init_process_group", ["backend", "rank", "store", "world_size"])
        assert [name for name, _ in heard[1:]].count("new_group") >= 1

    def test_wrong_arguments_get_torchs_own_message(self) -> None:
        seams.PROCESS_GROUP.subscribe(lambda call: None, "t")
        with pytest.raises(TypeError, match="unexpected keyword argument 'bakend'"):
            torch.distributed.init_process_group(bakend="gloo")

    def test_a_subscriber_may_go_and_bring_another_within_the_call(self) -> None:
        def last(call: seams.ProcessGroupCall) -> None:
            call.arguments["backend"] = "gloo"

        def first(call: seams.ProcessGroupCall) -> None:
            subscription.cancel()
            seams.PROCESS_GROUP.subscribe(last, "last")

        subscription = seams.PROCESS_GROUP.subscribe(first, "first")
        torch.distributed.init_process_group("no", store=torch.distributed.HashStore(), rank=0, world_size=1)
        assert torch.distributed.get_backend() == "gloo"


class TestRootForward:
    def watch(self) -> list[torch.nn.Module]:
        roots: list[torch.nn.Module] = []
        seams.ROOT_FORWARD.subscribe(lambda event: roots.append(event.module), "t")
        return roots

    def test_once_before_the_forward_and_then_nothing_is_left(self) -> None:
        roots = self.watch()
        model = tiny()
        seen_before_forward: list[int] = []
        model[0].register_forward_pre_hook(lambda module, args: seen_before_forward.append(len(roots)))
        model(X)
        model(X)
        assert roots == [model]
        assert seen_before_forward == [1, 1]
        assert hooks() == 0
        assert torch.compile is ORIGINALS["compile"]

    def test_what_is_no_training_does_not_count(self) -> None:
        roots = self.watch()
        model = tiny()
        model.eval()
        model(X)
        model.train()
        with torch.no_grad():
            model(X)
        with torch.inference_mode():
            model(X)
        tiny().requires_grad_(False)(X)
        torch.nn.Dropout()(X)
        torch.nn.Embedding(3, 4)(torch.tensor([1]))
        with torch.device("meta"):
            tiny()(torch.ones(2, 4))
        torch.jit.trace(model, X)
        assert roots == []
        model(X)
        assert roots == [model]

    @pytest.mark.parametrize("evaluate_first", [False, True])
    def test_compiled_by_torch_compile_without_a_warning(self, evaluate_first: bool) -> None:
        roots = self.watch()
        model = torch.compile(tiny(), backend="eager")
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            if evaluate_first:
                model.eval()
                model(X)
                assert roots == []
                model.train()
            model(X)
        assert roots == [model]
        assert "__call__" in type(model).__dict__
        assert type(model).__call__.__module__ == "torch._dynamo.eval_frame"

    def test_compiled_before_the_seam_was_subscribed(self) -> None:
        model = torch.compile(tiny(), backend="eager")
        roots = self.watch()
        model(X)
        assert roots == [model]

    @pytest.mark.parametrize("evaluate_first", [False, True])
    def test_compiled_in_place_with_a_full_graph(self, evaluate_first: bool) -> None:
        roots = self.watch()
        model = Own()
        model.compile(backend="eager", fullgraph=True)
        if evaluate_first:
            with torch.no_grad():
                model(X)
            assert roots == []
        model(X)
        assert roots == [model]
        assert model._compiled_call_impl.__module__ != "training_xpu.seams.root_forward"

    def test_cancelling_gives_a_module_compiled_in_place_back_as_it_was(self) -> None:
        subscription = seams.ROOT_FORWARD.subscribe(lambda event: None, "t")
        model = tiny()
        model.compile(backend="eager")
        assert model._compiled_call_impl.__module__ == "training_xpu.seams.root_forward"
        subscription.cancel()
        assert model._compiled_call_impl.__module__ != "training_xpu.seams.root_forward"

    def test_a_function_compiled_around_the_model_still_runs_whole(self) -> None:
        self.watch()
        model = Own()

        @torch.compile(backend="eager", fullgraph=True)
        def loss(x: torch.Tensor) -> torch.Tensor:
            return model(x).sum()

        loss(X).backward()

    def test_each_subscriber_hears_of_one_root(self) -> None:
        first = self.watch()
        a, b = tiny(), tiny()
        a(X)
        second = self.watch()
        b(X)
        assert (first, second) == ([a], [b])

    def test_a_broken_subscriber_does_not_hide_the_root_from_others(self) -> None:
        seams.set_fault_handler(lambda *args: None)
        seams.ROOT_FORWARD.subscribe(lambda event: 1 / 0, "bad")
        roots = self.watch()
        tiny()(X)
        assert len(roots) == 1

    def test_an_engine_whose_own_flag_does_not_follow_eval(self) -> None:
        class DeepSpeedEngine(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.module = tiny()

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return self.module(x)

        roots = self.watch()
        engine = DeepSpeedEngine()
        engine.module.eval()
        engine(X)
        assert roots == []
        engine.module.train()
        engine(X)
        assert roots == [engine]


def train(model: torch.nn.Module, steps: int, optimizer: torch.optim.Optimizer | None = None) -> None:
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        model(X).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
