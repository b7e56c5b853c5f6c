"""`--config FILE`: a YAML file that holds any option of the verb; the command line wins."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from training_xpu.errors import UserError, nearest


def load(context: typer.Context, value: Path | None) -> Path | None:
    """Makes the file's options the defaults of the running command.

    Raises:
        UserError: the file cannot be read, is no mapping, or names an option the verb does not have.
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
        raise UserError(f"--config {value} is not valid YAML: {first}") from error
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
        defaults[known[name]] = setting
    context.default_map = {**(context.default_map or {}), **defaults}
    return value


def _option_names(context: typer.Context) -> dict[str, str]:
    """Long option name without dashes -> parameter name, for the running command."""
    names: dict[str, str] = {}
    for parameter in context.command.params:
        for option in (*parameter.opts, *parameter.secondary_opts):
            if option.startswith("--") and parameter.name and parameter.name != "config":
                names[option.removeprefix("--")] = parameter.name
    return names


ConfigOption = Annotated[
    Path | None,
    typer.Option(
        "--config", callback=load, is_eager=True, help="YAML file that holds any option; the command line wins."
    ),
]
