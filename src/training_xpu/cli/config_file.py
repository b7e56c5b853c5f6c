"""`--config FILE`: a YAML file that holds any option of the verb; the command line wins."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from training_xpu.errors import UserError, nearest


def load(context: typer.Context, value: Path | None) -> Path | None:
    """Makes the file's options the defaults of the running command.

    Raises:
        UserError: the file cannot be read, is no mapping, names an option the verb does not have, or gives one a value
            that could not be written on the command line.
    """
    if value is None:
        return None
    import yaml

    try:
        content = yaml.safe_load(value.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"cannot read --config {value}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        first = str(error).splitlines()[0]
        raise UserError(f"--config {value} is not valid YAML: {first}", "Write lines such as 'steps: 20'.") from error
    if content is None:
        content = {}
    if not isinstance(content, dict):
        raise UserError(f"--config {value} must be a mapping of options, such as 'steps: 20'")
    known = _option_names(context)
    defaults: dict[str, Any] = {}
    for key, setting in content.items():
        name = str(key).lstrip("-").replace("_", "-")
        if name not in known:
            raise UserError(f"--config {value}: unknown option {key!r}", nearest(name, known))
        option = known[name]
        if option.parameter in defaults:
            raise UserError(f"--config {value}: {key} is there twice", "Keep one of the two.")
        if setting is not None:
            defaults[option.parameter] = _as_given(option, setting, f"--config {value}: {key}")
    context.default_map = {**(context.default_map or {}), **defaults}
    return value


@dataclass(frozen=True)
class _Option:
    parameter: str
    flag: bool
    inverted: bool  # written as --no-...
    many: bool


def _option_names(context: typer.Context) -> dict[str, _Option]:
    """Long option name without dashes -> what it sets, for the running command."""
    names: dict[str, _Option] = {}
    for parameter in context.command.params:
        if not parameter.name or parameter.name == "config":
            continue
        for inverted, options in ((False, parameter.opts), (True, parameter.secondary_opts)):
            for option in options:
                if option.startswith("--"):
                    names[option.removeprefix("--")] = _Option(
                        parameter.name,
                        getattr(parameter, "is_flag", False),
                        inverted,
                        getattr(parameter, "multiple", False),
                    )
    return names


def _as_given(option: _Option, setting: Any, where: str) -> Any:
    """The value as the command line would have it, so that the option's own parser checks it: text, or yes or no."""
    if option.flag:
        if not isinstance(setting, bool):
            raise UserError(f"{where} must be true or false, not {setting!r}")
        return setting != option.inverted
    parts = setting if option.many and isinstance(setting, list) else [setting]
    for part in parts:
        if isinstance(part, bool) or not isinstance(part, str | int | float):
            raise UserError(f"{where} cannot be {part!r}", "Write one value, in quotes if YAML takes it for another.")
    return [str(part) for part in parts] if option.many else str(setting)


ConfigOption = Annotated[
    Path | None,
    typer.Option(
        "--config", callback=load, is_eager=True, help="YAML file that holds any option; the command line wins."
    ),
]
