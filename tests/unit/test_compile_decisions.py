"""Which calls of a script are taken, what a trial concludes, and how ranks come to the same answer in the same step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from recompute_models import Plain, llama, text
from torch._C._distributed_c10d import HashStore

from training_xpu.compiler import trial
from training_xpu.compiler.agreement import AHEAD, Question
from training_xpu.compiler.controller import MOST_TRIAL_STEPS, Controller, State
from training_xpu.compiler.loss_region import LossRegion
from training_xpu.compiler.optimizer_step import fuse
from training_xpu.compiler.requests import SAME_RANDOM_NUMBERS, Request, request_of, take_compile, take_module_compile
from training_xpu.compiler.trial import PAIRS, RegionClock, Trial, mean_gain
from training_xpu.engines.joint_start import NothingToDo
from training_xpu.seams import CompileCall, ModuleCompileCall


class TestRequests:
    def test_a_model_with_blocks_in_training_is_taken(self) -> None:
        model = llama(layers=2)
        assert take_compile(CompileCall(model, {"dynamic": True, "options": {"max_fusion_size": 8}})) is model
        asked = request_of(model)
        assert asked.dynamic is True
        assert asked.options == {**SAME_RANDOM_NUMBERS, "max_fusion_size": 8}

    def test_a_mode_becomes_its_options(self) -> None:
        model = llama(layers=2)
        assert take_module_compile(ModuleCompileCall(model, {"mode": "max-autotune-no-cudagraphs"}))
        assert request_of(model).options["max_autotune"] is True

    @pytest.mark.parametrize(
        "arguments", [{"backend": "eager"}, {"backend": "aot_eager"}, {"backend": lambda g, i: g}, {"disable": True}]
    )
    def test_other_backends_are_torchs(self, arguments: dict[str, Any]) -> None:
        model = llama(layers=2)
        assert take_compile(CompileCall(model, arguments)) is None
        assert request_of(model) == Request()

    @pytest.mark.parametrize(
        "model",
        [
            lambda: torch.relu,
            lambda: torch.nn.Linear(2, 2),
            lambda: Plain().eval(),
            lambda: Plain().requires_grad_(False),
        ],
    )
    def test_what_is_no_model_in_training_with_blocks_is_torchs(self, model: Any) -> None:
        assert take_compile(CompileCall(model(), {})) is None

    def test_nothing_asked(self) -> None:
        assert request_of(llama(layers=2)) == Request()


class TestTrial:
    def test_the_gain_is_the_median_of_pairs(self) -> None:
        made = Trial()
        for compiled, plain in [(1.0, 2.0), (1.0, 1.2), (1.0, 1.5), (1.0, 40.0)]:
            made.add("block", compiled, True)
            made.add("block", plain, False)
        assert made.pairs("block") == 4
        assert made.gain("block") == pytest.approx(1.75)

    def test_what_was_not_seen_has_none(self) -> None:
        made = Trial()
        made.add("block", None, True)
        made.add("block", 1.0, True)
        assert made.gain("block") is None
        assert made.pairs("block") == 0

    def test_ranks_have_one_gain(self) -> None:
        assert mean_gain([2.0, 0.5]) == pytest.approx(1.0)
        assert mean_gain([1.2]) == pytest.approx(1.2)

    def test_forward_and_backward_are_timed_per_element(self, monkeypatch: pytest.MonkeyPatch) -> None:
        now = iter(range(100))
        monkeypatch.setattr(trial.time, "perf_counter", lambda: float(next(now)))
        clock = RegionClock()
        hidden = torch.ones(2, 5, requires_grad=True) * 1.0
        out = clock.timed(lambda: hidden.tanh(), (hidden,))
        out.sum().backward()
        assert clock.take() == pytest.approx(1 / 10 + 1 / 10)
        assert clock.take() is None

    def test_without_a_gradient_the_forward_counts_alone(self, monkeypatch: pytest.MonkeyPatch) -> None:
        now = iter(range(100))
        monkeypatch.setattr(trial.time, "perf_counter", lambda: float(next(now)))
        clock = RegionClock()
        clock.timed(lambda: torch.ones(4), (torch.ones(4),))
        assert clock.take() == pytest.approx(1 / 4)


def questions(of_all: bool, ranks: int = 3) -> list[Question]:
    store = HashStore()
    return [Question((store, rank, ranks), "gains", sorted, of_all) for rank in range(ranks)]


class TestQuestions:
    def test_alone_the_answer_is_there_at_once(self) -> None:
        question = Question(None, "open", lambda said: said[0], of_all=True)
        assert question.answer(1) is None
        question.say("yes")
        assert question.answer(1) == ("yes",)

    def test_all_ranks_hear_it_in_the_same_step(self) -> None:
        asked = questions(of_all=True)
        for step, speaker in ((5, 2), (6, 0), (7, 1)):
            assert [q.answer(step) for q in asked] == [None] * 3
            asked[speaker].say(speaker)
        assert [q.answer(8) for q in asked] == [None] * 3  # rank 0 has written what holds from step 8 + AHEAD on
        assert [q.answer(8 + AHEAD - 1) for q in asked] == [None] * 3
        assert [q.answer(8 + AHEAD) for q in asked] == [([0, 1, 2],)] * 3

    def test_one_is_enough_where_any_may_ask(self) -> None:
        asked = questions(of_all=False)
        asked[1].say(True)
        assert [q.answer(4) for q in asked] == [None] * 3
        assert [q.answer(4 + AHEAD) for q in asked] == [([True],)] * 3

    def test_what_is_said_first_stays(self) -> None:
        (question,) = questions(of_all=True, ranks=1)
        question.say(1)
        question.say(2)
        question.answer(0)
        assert question.answer(AHEAD) == ([1],)


class TestController:
    def test_a_model_without_blocks_is_left_alone(self) -> None:
        with pytest.raises(NothingToDo, match="no repeated blocks"):
            Controller(torch.nn.Linear(2, 2), Request())

    @pytest.mark.parametrize("how", ["function", "in place"])
    def test_a_model_compiled_as_a_whole_is_left_alone(self, how: str) -> None:
        model: Any = Plain()
        if how == "function":
            model = torch.compile(model, backend="eager")
        else:
            model.compile(backend="eager")
        with pytest.raises(NothingToDo, match=r"leave torch\.compile out"):
            Controller(model, Request())

    def test_a_model_has_one_controller(self) -> None:
        model = llama(layers=2)
        first = Controller(model, Request())
        with pytest.raises(NothingToDo, match="in hand"):
            Controller(model, Request())
        first.close()
        Controller(model, Request()).close()

    def test_a_trial_ends_though_the_blocks_do_not_run(self) -> None:
        controller = Controller(Plain(), Request())
        for _ in range(2 + MOST_TRIAL_STEPS):
            controller.after_step()
        assert controller.state is State.SETTLED
        controller.close()

    def test_from_compiling_to_settled_and_back(self) -> None:
        model = Plain(dropout=0.1)
        plain = Plain(dropout=0.1)
        controller = Controller(model, Request())
        states = []
        for step in range(1 + 1 + 2 * PAIRS + 1):
            losses = []
            for one in (model, plain):
                torch.manual_seed(step)
                loss = one(**text()).loss
                loss.backward()
                losses.append(loss.item())
            assert losses[0] == pytest.approx(losses[1], rel=1e-5)  # with the same dropout
            controller.after_step()
            states.append(controller.state)
        assert states[0] is State.WARMING
        assert State.TRIAL in states
        assert states[-1] is State.SETTLED
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, theirs.grad)
        assert [r.name for r in controller.regions if r.is_block] == ["PlainBlock"]
        controller.close()
        assert not any("forward" in m.__dict__ for m in model.modules())


class TestLossAndOptimizer:
    def test_the_chunked_loss_is_a_region_of_its_own(self) -> None:
        model = llama(layers=2)
        region = LossRegion(model)
        assert region.compiled
        region.clock = RegionClock()
        model(**text()).loss.backward()
        spent = region.clock.take()
        assert spent is not None
        assert spent > 0
        region.use(False)
        assert not region.compiled
        assert region.row(0.9)["reason"] == ""
        model(**text()).loss.backward()
        assert region.clock.take() is not None  # the plain loss is timed alike
        region.use(True)
        assert region.compiled
        keys = set(model.state_dict())
        region.close()
        assert set(model.state_dict()) == keys
        assert not region.compiled

    def test_another_loss_is_left_alone_and_said(self) -> None:
        region = LossRegion(Plain())
        assert not region.compiled
        assert region.row(None)["reason"]
        region.use(True)
        region.close()

    def test_an_optimizer_is_fused_where_the_script_has_no_wish(self) -> None:
        ours, theirs = Plain(), Plain()
        pairs = [(model, torch.optim.AdamW(model.parameters(), lr=1e-2)) for model in (ours, theirs)]
        for step in range(3):
            for model, optimizer in pairs:
                torch.manual_seed(step)
                model(**text()).loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            assert fuse(pairs[0][1]) == (step == 0)
        assert pairs[0][1].param_groups[0]["fused"] is True
        for mine, its in zip(ours.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(mine, its)

    @pytest.mark.parametrize(
        "wish", [{"fused": False}, {"foreach": False}, {"foreach": True}, {"differentiable": True}]
    )
    def test_a_wish_of_the_script_stands(self, wish: dict[str, bool]) -> None:
        optimizer = torch.optim.AdamW(Plain().parameters(), **wish)
        assert not fuse(optimizer)
        assert optimizer.param_groups[0]["fused"] == wish.get("fused")

    def test_others_are_left_alone(self) -> None:
        class Own(torch.optim.AdamW):
            pass

        assert not fuse(Own(Plain().parameters()))
        assert not fuse(torch.optim.Adamax(Plain().parameters()))
