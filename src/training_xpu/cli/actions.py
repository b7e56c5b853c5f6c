"""The newer form of the release notes, `ljperf --action train --model_name M`, rewritten into verbs and options."""

from __future__ import annotations

from training_xpu.errors import UserError, nearest

ACTIONS = ("benchmark", "train")
RENAMED = {"--model-name": "--model"}


def action_form(arguments: list[str]) -> list[str]:
    """Rewrites `--action VERB --some_option x` into `VERB --some-option x`; anything else is returned as it is.

    The action may stand anywhere among the options, as long as no verb stands in front of them.

    Raises:
        UserError: the action is missing or unknown.
    """
    if not arguments or not arguments[0].startswith("-"):
        return arguments
    at = next((i for i, a in enumerate(arguments) if a == "--action" or a.startswith("--action=")), None)
    if at is None:
        return arguments
    before, found, after = arguments[:at], arguments[at], arguments[at + 1 :]
    if found == "--action":
        if not after:
            raise UserError("--action needs a value", "Known: " + ", ".join(ACTIONS))
        verb, rest = after[0], [*before, *after[1:]]
    else:
        verb, rest = found.removeprefix("--action="), [*before, *after]
    if verb not in ACTIONS:
        raise UserError(f"unknown action {verb!r}", nearest(verb, ACTIONS))
    return [verb, *(_dashed(a) for a in rest)]


def _dashed(argument: str) -> str:
    if not argument.startswith("--"):
        return argument
    option, equals, value = argument.partition("=")
    option = option.replace("_", "-")
    return RENAMED.get(option, option) + equals + value
