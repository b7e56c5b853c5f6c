"""The pages docs/reference/run-record.md and python-api.md, made from the source: fields, comments and docstrings."""

from __future__ import annotations

import ast
import inspect
import io
import re
import sys
import tokenize
from enum import StrEnum
from pathlib import Path
from typing import Literal, get_args, get_origin

import training_xpu
from training_xpu.device import accelerators, peaks
from training_xpu.perf import explain, fingerprint, plan_records, records, variables
from training_xpu.perf.records import RUN_FILE
from training_xpu.records import Record
from training_xpu.report import FOLDER_NAME
from training_xpu.report_lines import ReportLine
from training_xpu.workloads import config
from training_xpu.workloads.config import EVENTS_FILE, STEPS_FILE
from training_xpu.workloads.listing_records import ModelEntry, ModelHere, ModelsDocument
from training_xpu.workloads.records import EventRecord, RankProcess, StepRecord

SOURCE = Path(training_xpu.__file__).parent

RECORDS_INTRODUCTION = f"""\
# Run record

Made from the record classes by `scripts/make_reference.py`; do not edit.

Each run has a folder `runs/<time>-<workload>-<arm>/`; the time is UTC. In it:

| file | what it is |
|---|---|
| `{RUN_FILE}` | the record of the run: a `RunRecord`; written when the run starts, and for good when it ends |
| `{STEPS_FILE}` | one `StepRecord` per line: every optimizer step of every rank, as it happens |
| `{EVENTS_FILE}` | one `EventRecord` per line: phases, evaluations, checkpoints, failures |
| `{config.JOB_FILE}` | the `JobConfig` that the ranks were given |
| `{FOLDER_NAME}/` | one file per process, one `ReportLine` per line: what features were asked for and applied |
| `logs/` | what the ranks and their launcher printed |
| `checkpoints/`, `model/`, `tensorboard/`, `mlflow/`, `wandb/` | where they were asked for |

All are JSON. Every record has a field `schema`, an integer that rises when a field changes its meaning; a record with a
newer one is refused with a word to upgrade. Unknown is `null`, never a guess. Numbers that JSON has no word for are the
strings `"NaN"`, `"Infinity"` and `"-Infinity"`, so that a diverged loss is not taken for an unknown one. Line files may
end in half a line after a crash; readers pass over it. In Python, `RunRecord.read(path)` and
`training_xpu.records.read_lines(path, StepRecord)` read them.
"""

CHAPTERS: dict[str, list[type[Record]]] = {
    RUN_FILE: [
        records.RunRecord,
        records.Summary,
        records.Estimate,
        records.LossSummary,
        records.RankFailure,
        config.JobConfig,
        config.Scale,
        config.FlopShares,
        config.PreparedData,
    ],
    f"{STEPS_FILE}, {EVENTS_FILE} and {FOLDER_NAME}": [StepRecord, EventRecord, RankProcess, ReportLine],
    "Documents of `--json`": [
        records.BenchmarkDocument,
        records.ArmDocument,
        records.ReproductionDocument,
        records.LossComparison,
        records.RatioEstimate,
        records.Difference,
        records.RunsDocument,
        records.RunEntry,
        ModelsDocument,
        ModelEntry,
        ModelHere,
        plan_records.PlanDocument,
        plan_records.PlanOption,
        plan_records.PlanCalibration,
        plan_records.CalibrationDocument,
        explain.Explanation,
        explain.FeatureOutcome,
        explain.ProcessSeen,
    ],
    "The fingerprint, also `ljperf env --json`": [
        fingerprint.Fingerprint,
        fingerprint.Host,
        fingerprint.Hardware,
        accelerators.Accelerator,
        fingerprint.Node,
        fingerprint.Limits,
        fingerprint.Python,
        fingerprint.TorchBuild,
        variables.Variable,
        peaks.Peak,
    ],
}


def records_page() -> str:
    """Every record that users meet in files or on stdout, with its fields."""
    parts = [RECORDS_INTRODUCTION]
    for title, classes in CHAPTERS.items():
        parts.append(f"## {title if title.endswith('`') or ' ' in title else f'`{title}`'}\n")
        parts += [_record(kind) for kind in classes]
    return "\n".join(parts)


def _record(kind: type[Record]) -> str:
    source = inspect.getsource(kind)
    definition = ast.parse(source).body[0]
    assert isinstance(definition, ast.ClassDef)
    comments = _comments(source)
    lines = [f"### {kind.__name__}", ""]
    if text := ast.get_docstring(definition):
        lines += [text, ""]
    lines += ["| field | type | default | meaning |", "|---|---|---|---|"]
    for node in definition.body:
        if isinstance(node, ast.AnnAssign):
            kind_in_words = _code(_type(node.annotation, kind.__module__))
            cells = [kind_in_words, _default(node.value), _cell(comments.get(node.lineno, ""))]
            lines.append(f"| `{ast.unparse(node.target)}` | {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


def _comments(source: str) -> dict[int, str]:
    """Line number -> the comment at the end of that line, and those that stand alone right above it."""
    comments: dict[int, str] = {}
    above: list[str] = []
    alone = True
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            text = token.string.removeprefix("#").strip()
            if alone:
                above.append(text)
            else:
                comments[token.start[0]] = " ".join([*above, text])
        elif token.type == tokenize.NEWLINE:
            if above:
                comments.setdefault(token.start[0], " ".join(above))
            above = []
        alone = token.type in (tokenize.NEWLINE, tokenize.NL, tokenize.INDENT, tokenize.DEDENT)
    return comments


def _type(annotation: ast.expr, module: str) -> str:
    """The annotation as written, with names that stand for a choice of words replaced by the words."""
    namespace = vars(sys.modules[module])

    def words(match: re.Match[str]) -> str:
        named = namespace.get(match[0])
        if get_origin(named) is Literal:
            return " | ".join(f'"{word}"' for word in get_args(named))
        if isinstance(named, type) and issubclass(named, StrEnum):
            return " | ".join(f'"{word}"' for word in named)
        return match[0]

    text = re.sub(r"Literal\[(.*?)\]", lambda m: m[1].replace(", ", " | ").replace("'", '"'), ast.unparse(annotation))
    return re.sub(r"\b[A-Z]\w+\b", words, text)


def _default(value: ast.expr | None) -> str:
    """The default as written; for Field(...) its default and limits."""
    if value is None:
        return ""
    if isinstance(value, ast.Call) and ast.unparse(value.func) == "Field":
        given = {k.arg: ast.unparse(k.value) for k in value.keywords if k.arg}
        default = given.get("default", {"dict": "{}", "list": "[]"}.get(given.get("default_factory", ""), ""))
        signs = (("ge", "≥"), ("gt", ">"), ("le", "≤"), ("lt", "<"))
        limits = ", ".join(f"{sign} {given[name]}" for name, sign in signs if name in given)
        return ", ".join(part for part in (_code(_json(default)) if default else "", limits) if part)
    return _code(_json(ast.unparse(value)))


def _json(text: str) -> str:
    text = re.sub(r"^Dtype\.(\w+)$", lambda m: f'"{m[1].lower()}"', text)
    return {"None": "null", "True": "true", "False": "false"}.get(text, text.replace("'", '"'))


def _code(text: str) -> str:
    return f"`{_cell(text)}`"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


API_INTRODUCTION = """\
# Python API

Made from the source by `scripts/make_reference.py`; do not edit.

`import training_xpu` costs nothing: neither torch nor pydantic is imported before one of these names is used. What is
not listed here may change without notice.
"""


def api_page() -> str:
    """The names of `training_xpu.__all__` with signatures and docstrings, read from the source without importing it."""
    parts = [API_INTRODUCTION]
    for name in sorted(n for n in training_xpu.__all__ if not n.startswith("_")):
        module = training_xpu._HOMES[name]
        parts.append(_api_entry(name, module, _definition(name, module)))
    return "\n".join(parts)


def _definition(name: str, module: str) -> ast.FunctionDef | ast.ClassDef:
    """Where a name is defined, followed through imports from one module of the package to the next."""
    for node in _source_of(module).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == name:
            return node
        if isinstance(node, ast.ImportFrom) and node.module and any(alias.name == name for alias in node.names):
            return _definition(name, node.module)
    raise LookupError(f"{name} is not defined in {module}")


def _api_entry(name: str, module: str, node: ast.FunctionDef | ast.ClassDef) -> str:
    if isinstance(node, ast.ClassDef):
        fields = [n for n in node.body if isinstance(n, ast.AnnAssign)]
        signature = f"class {name}({', '.join(ast.unparse(f).strip() for f in fields)})"
    else:
        returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
        signature = f"{name}({ast.unparse(node.args)}){returns}"
    lines = [f"## {name}", "", f"    {signature}", "", f"Defined in `{module}`.", ""]
    lines += [ast.get_docstring(node) or "", ""]
    for alias, values in _aliases(module).items():
        if re.search(rf"\b{alias}\b", signature):
            lines += [f"`{alias}` is one of {', '.join(f'`{v}`' for v in values)}.", ""]
    return "\n".join(lines)


def _aliases(module: str) -> dict[str, list[str]]:
    """Names a module gives to a choice of words: `Engine = Literal["deepspeed", ...]`."""
    found = {}
    for node in _source_of(module).body:
        value = node.value if isinstance(node, ast.Assign) else None
        if isinstance(node, ast.Assign) and isinstance(value, ast.Subscript) and ast.unparse(value.value) == "Literal":
            words = ast.literal_eval(value.slice)
            found[ast.unparse(node.targets[0])] = [words] if isinstance(words, str) else list(words)
    return found


def _source_of(module: str) -> ast.Module:
    path = SOURCE.joinpath(*module.split(".")[1:]).with_suffix(".py")
    return ast.parse(path.read_text(encoding="utf-8"))
