"""features: asking, probing, stepping aside, and the variables of an arm."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from training_xpu import envs, features, report, seams
from training_xpu.errors import UserError
from training_xpu.features import Feature

VARIABLE = "TRAINING_XPU_PLAYTHING"


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """A module of a feature: what it lacks has to be put there by the test."""
    module = ModuleType("toy_for_features")
    module.available = lambda: None  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "toy_for_features", module)
    monkeypatch.delenv(VARIABLE, raising=False)
    yield module
    features.unregister("plaything")
    for seam in seams.SEAMS.values():
        for subscription in seam.subscriptions:
            subscription.cancel()
    seams.set_fault_handler(None)
    report.begin(None, "single", 0)


def register(**changes: Any) -> Feature:
    settings: dict[str, Any] = {
        "name": "plaything",
        "variable": VARIABLE,
        "meaning": "Plays.",
        "since": "0.1.0",
        "available": "toy_for_features:available",
        **changes,
    }
    feature = Feature(**settings)
    features.register(feature)
    return feature


def events(folder: Path) -> list[tuple[str, str, str]]:
    return [(line.feature, line.event, line.reason) for line in report.read(folder)]


def test_the_features_of_this_version() -> None:
    assert [feature.name for feature in features.known()] == ["compile", "recompute"]
    assert features.environment_for([]) == {
        "TRAINING_XPU_COMPILE": "false",
        "CHECKPOINT_OPTIMIZATION": "false",
    }
    assert features.environment_for(["recompute"]) == {
        "TRAINING_XPU_COMPILE": "false",
        "CHECKPOINT_OPTIMIZATION": "true",
    }


@pytest.mark.parametrize("feature", features.known(), ids=lambda f: f.name)
def test_whatever_a_feature_names_is_there(feature: Feature) -> None:
    paths = [feature.available, *feature.seams.values(), *([feature.start] if feature.start else [])]
    assert all(callable(features.load(path)) for path in paths)
    assert set(feature.seams) <= set(seams.SEAMS)


def test_an_unknown_name_gets_the_nearest(toy: ModuleType) -> None:
    register()
    with pytest.raises(UserError) as caught:
        features.parse_names("playthin")
    assert caught.value.remedy == "Did you mean plaything?"


@pytest.mark.parametrize(
    ("text", "names"), [("plaything", ["plaything"]), ("base", []), ("", []), (" plaything,", ["plaything"])]
)
def test_names_as_users_type_them(toy: ModuleType, text: str, names: list[str]) -> None:
    register()
    assert features.parse_names(text) == names


def test_base_stands_alone(toy: ModuleType) -> None:
    register()
    with pytest.raises(UserError, match="cannot be combined"):
        features.parse_names("base,plaything")


def test_an_arm_says_true_or_false_for_every_feature(toy: ModuleType) -> None:
    register()
    assert features.environment_for(["plaything"]) == {
        "TRAINING_XPU_COMPILE": "false",
        "CHECKPOINT_OPTIMIZATION": "false",
        VARIABLE: "true",
    }
    assert set(features.environment_for([]).values()) == {"false"}


def test_the_variable_is_declared_with_the_feature(toy: ModuleType) -> None:
    register()
    assert envs.VARIABLES[VARIABLE].meaning == "Plays."
    register()  # the same again is no contradiction
    with pytest.raises(ValueError, match="registered twice"):
        register(meaning="Works.")
    features.unregister("plaything")
    assert VARIABLE not in envs.VARIABLES


def test_nothing_asked_nothing_done(toy: ModuleType) -> None:
    register(available="no.such.module:function")
    assert features.asked_for() == {}
    assert features.activate("rank") == []


def test_false_is_off(toy: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    register(available="no.such.module:function")
    monkeypatch.setenv(VARIABLE, "off")
    assert [o.state for o in features.activate("rank")] == ["off"]


def test_subscribed_and_called_at_its_seams(toy: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    roots: list[torch.nn.Module] = []
    toy.on_root = lambda event: roots.append(event.module)  # type: ignore[attr-defined]
    register(seams={"root-forward": "toy_for_features:on_root"})
    monkeypatch.setenv(VARIABLE, "1")
    report.begin(tmp_path, "single", 0)
    (outcome,) = features.activate("single")
    assert (outcome.state, outcome.asked) == ("subscribed", "true")
    model = torch.nn.Linear(2, 2)
    model(torch.ones(1, 2))
    assert roots == [model]
    assert events(tmp_path) == [("plaything", "subscribed", "")]


def test_code_of_a_feature_is_imported_with_its_first_event(toy: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    register(seams={"step": "no_such_module_yet:on_step"})
    monkeypatch.setenv(VARIABLE, "true")
    assert [o.state for o in features.activate("single")] == ["subscribed"]


@pytest.mark.parametrize(("value", "warnings"), [("true", 1), ("auto", 0)])
def test_stepping_aside_is_a_warning_only_where_it_was_asked_for(
    toy: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    value: str,
    warnings: int,
) -> None:
    toy.available = lambda: "this machine has no toys"  # type: ignore[attr-defined]
    register(seams={"step": "toy_for_features:on_step"})
    monkeypatch.setenv(VARIABLE, value)
    report.begin(tmp_path, "single", 0)
    report.logger.propagate = True
    with caplog.at_level(logging.WARNING, logger="training_xpu"):
        features.activate("single")
    assert len(caplog.records) == warnings
    assert events(tmp_path) == [("plaything", "stepped-aside", "this machine has no toys")]
    assert not seams.STEP.subscriptions


def raises() -> None:
    raise OSError("driver too old")


@pytest.mark.parametrize(
    ("changes", "value", "reason"),
    [
        ({"available": "toy_for_features:raises"}, "true", "OSError: driver too old"),
        ({"available": "toy_for_features:missing"}, "true", "AttributeError"),
        ({"seams": {"step": "x:y", "no seam": "x:y"}}, "true", "unknown seam"),
        ({"seams": {"step": "x:y"}, "start": "toy_for_features:raises"}, "true", "OSError: driver too old"),
        ({}, "sometimes", "none of true, false and auto"),
    ],
)
def test_whatever_goes_wrong_ends_the_feature_alone(
    toy: ModuleType, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], value: str, reason: str
) -> None:
    toy.raises = raises  # type: ignore[attr-defined]
    register(**changes)
    monkeypatch.setenv(VARIABLE, value)
    (outcome,) = features.activate("single")
    assert outcome.state == "stepped-aside"
    assert reason in outcome.reason
    assert not seams.STEP.subscriptions


def test_a_callback_that_raises_is_reported_as_a_fault(
    toy: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    toy.on_compile = lambda call: raises()  # type: ignore[attr-defined]
    register(seams={"compile": "toy_for_features:on_compile"})
    monkeypatch.setenv(VARIABLE, "true")
    report.begin(tmp_path, "single", 0)
    features.activate("single")
    torch.compile(torch.relu, backend="eager")
    assert events(tmp_path)[1:] == [("plaything", "fault", "OSError at the compile seam: driver too old")]


def test_only_in_its_roles(toy: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[str] = []
    toy.start = lambda: started.append("x")  # type: ignore[attr-defined]
    register(roles=frozenset({"launcher"}), start="toy_for_features:start")
    monkeypatch.setenv(VARIABLE, "true")
    assert features.activate("rank") == []
    assert [o.state for o in features.activate("launcher")] == ["subscribed"]
    assert started == ["x"]
