"""The newer form of the release notes, `ljperf --action train --model_name M`, rewritten into verbs and options."""

from __future__ import annotations

from training_xpu.errors import UserError, nearest

ACTIONS = ("benchmark", "train")
RENAMED = {"--model-name": "--model"}


def action_form(arguments: list[str]) -> list[str]:
    """Rewrites `--action VERB --some_option x` into `VERB --some-option x`; anything else is returned as it is.

    Raises:
        UserError: the action is missing or unknown.
    """
    if not arguments or not (arguments[0] == "--action" or arguments[0].startswith("--action=")):
        return arguments
    if arguments[0] == "--action":
        if len(arguments) < 2:
            raise UserError("--action needs a value", "Known: " + ", ".join(ACTIONS))
        verb, rest = arguments[1], arguments[2:]
    else:
        verb, rest = arguments[0].removeprefix("--action="), arguments[1:]
    if verb not in ACTIONS:
        raise UserError(f"unknown action {verb!r}", nearest(verb, ACTIONS))
    return [verb, *(_dashed(a) for a in rest)]


def _dashed(argument: str) -> str:
    if not argument.startswith("--"):
        return argument
    option, equals, value = argument.partition("=")
    option = option.replace("_", "-")
    return RENAMED.get(option, option) + equals + value
