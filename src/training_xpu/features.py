"""The one list of features, and what asking for one in the environment does.

A feature is data: its variable, a probe that says whether it can run here, and the callbacks it wants called at the
seams. All code of a feature is named by strings, "package.module:function", and imported when it is first called, so
that neither `import torch` nor the command line pays for features that nobody asked for.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from training_xpu import envs, report
from training_xpu.errors import UserError, nearest

State = Literal["subscribed", "stepped-aside", "off"]


@dataclass(frozen=True)
class Feature:
    """Something that makes training faster and can be switched alone."""

    name: str
    variable: str  # takes true, false or auto
    meaning: str  # for the reference page
    since: str
    available: str  # () -> str | None: why it cannot run here, or None
    seams: Mapping[str, str] = field(default_factory=dict)  # name of a seam -> callback(event)
    start: str = ""  # () -> None: called in each process of `roles` while torch is being imported
    roles: frozenset[report.Role] = frozenset({"rank", "single"})


@dataclass(frozen=True)
class Outcome:
    """What became of one feature in this process when torch was imported."""

    feature: str
    asked: str
    state: State
    reason: str = ""


_FEATURES: dict[str, Feature] = {}


def register(feature: Feature) -> None:
    """Adds a feature to the list and declares its variable.

    Raises:
        ValueError: the name or the variable is taken, or autoload would not notice the variable.
    """
    if not feature.variable.startswith(envs.PREFIXES):
        raise ValueError(f"{feature.variable} begins with none of {', '.join(envs.PREFIXES)}")
    if _FEATURES.get(feature.name, feature) != feature:
        raise ValueError(f"feature {feature.name} is registered twice")
    envs.declare(
        envs.Variable(feature.variable, "true, false or auto", "", feature.meaning, feature.since, section="feature")
    )
    _FEATURES[feature.name] = feature


def unregister(name: str) -> None:
    """Takes a feature off the list, and its variable with it."""
    feature = _FEATURES.pop(name, None)
    if feature is not None:
        envs.withdraw(feature.variable)


def known() -> list[Feature]:
    return list(_FEATURES.values())


def find(name: str) -> Feature:
    """
    Raises:
        UserError: there is no such feature.
    """
    if name in _FEATURES:
        return _FEATURES[name]
    raise UserError(f"unknown feature {name!r}", nearest(name, [*_FEATURES, "base"]))


def parse_names(text: str) -> list[str]:
    """Reads `a,b` as typed by a user, and `base` or nothing as no feature, in the order of the list.

    Raises:
        UserError: a name is unknown, or base stands beside others.
    """
    names = [n.strip() for n in text.replace("+", ",").split(",") if n.strip()]
    if "base" in names:
        if len(set(names)) > 1:
            raise UserError("base means no feature and cannot be combined", "Leave base out.")
        return []
    chosen = {find(n).name for n in names}
    return [n for n in _FEATURES if n in chosen]


def environment_for(names: Iterable[str]) -> dict[str, str]:
    """The variables of an arm: every known feature explicitly on or off, so that an arm inherits none from its user.

    Raises:
        UserError: a name is unknown.
    """
    chosen = {find(n).name for n in names}
    return {f.variable: "true" if f.name in chosen else "false" for f in _FEATURES.values()}


def asked_for() -> dict[str, str]:
    """Feature -> true, false or auto for each whose variable is set; a value that is none of these as it stands."""
    values = {f.name: envs.get(f.variable) for f in _FEATURES.values()}
    return {name: value for name, value in values.items() if value is not None}


def load(path: str) -> Callable[..., Any]:
    """Imports "package.module:function"."""
    module, _, name = path.partition(":")
    function: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return function


def activate(role: report.Role, print_warnings: bool = True) -> list[Outcome]:
    """Subscribes the features that the environment asks for, in a process of this role.

    A feature that cannot run steps aside: with `true` that is a warning, with `auto` only a line of the report.
    Whatever a feature raises ends that feature, never the process.

    Args:
        print_warnings: False where another process of the same node prints the same.
    """
    outcomes = []
    for feature in known():
        value = envs.get(feature.variable)
        if value is not None and role in feature.roles:
            outcome = _activate(feature, value)
            outcomes.append(outcome)
            _report(outcome, print_warnings)
    return outcomes


def _activate(feature: Feature, value: str) -> Outcome:
    try:
        asked = envs.parse_asked(feature.variable, value)
    except envs.BadValue as error:
        return Outcome(feature.name, value, "stepped-aside", error.problem)
    if asked == "false":
        return Outcome(feature.name, asked, "off")
    try:
        reason: str | None = load(feature.available)()
        if reason is not None:
            return Outcome(feature.name, asked, "stepped-aside", reason)
        _subscribe(feature)
    except Exception as error:
        return Outcome(feature.name, asked, "stepped-aside", f"{type(error).__name__}: {error}")
    return Outcome(feature.name, asked, "subscribed")


def _subscribe(feature: Feature) -> None:
    from training_xpu import seams

    seams.set_fault_handler(_report_fault)
    subscriptions = []
    try:
        for name, path in feature.seams.items():
            subscriptions.append(seams.by_name(name).subscribe(_Lazy(path), owner=feature.name))
        if feature.start:
            load(feature.start)()
    except BaseException:
        for subscription in subscriptions:
            subscription.cancel()
        raise


class _Lazy:
    """A callback that is imported with its first event."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._function: Callable[..., Any] | None = None

    def __call__(self, event: Any) -> Any:
        if self._function is None:
            self._function = load(self.path)
        return self._function(event)


def _report(outcome: Outcome, print_warning: bool) -> None:
    if outcome.state == "off":
        return
    report.write(outcome.feature, outcome.state, outcome.reason, outcome.asked)
    if outcome.state == "stepped-aside":
        level = report.logger.info if outcome.asked == "auto" or not print_warning else report.logger.warning
        level("%s steps aside: %s", outcome.feature, outcome.reason)


def _report_fault(feature: str, seam: str, error: Exception) -> None:
    reason = f"{type(error).__name__} at the {seam} seam: {error}"
    report.logger.warning("%s steps aside: %s", feature, reason)
    report.write(feature, "fault", reason)


register(
    Feature(
        name="compile",
        variable="TRAINING_XPU_COMPILE",
        meaning="Compiles each block of the model by itself, where that gains, and goes on in plain Python elsewhere; "
        "a script's own calls of torch.compile for such a model get this path too.",
        since="0.1.0",
        available="training_xpu.compiler.feature:available",
        seams={
            "compile": "training_xpu.compiler.feature:on_compile",
            "module-compile": "training_xpu.compiler.feature:on_module_compile",
            "root-forward": "training_xpu.compiler.feature:on_root_forward",
            "step": "training_xpu.compiler.feature:on_step",
        },
    )
)
register(
    Feature(
        name="recompute",
        variable="CHECKPOINT_OPTIMIZATION",
        meaning="Recomputes the fewest layers in backward whose activations do not fit the memory budget, chosen from "
        "measurements of the first steps.",
        since="0.1.0",
        available="training_xpu.recompute.feature:available",
        seams={
            "root-forward": "training_xpu.recompute.feature:on_root_forward",
            "step": "training_xpu.recompute.feature:on_step",
        },
    )
)
