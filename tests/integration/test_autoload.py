"""autoload and seams in real processes: whatever is imported first, however the process was started.

The toy feature under `toy/` reports what it sees at three seams; PYTHONPATH puts it on the list of each process.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from training_xpu import report

HERE = Path(__file__).parent
JOBS = HERE / "jobs"
BIN = Path(sys.executable).parent
TORCHRUN = [str(BIN / "torchrun"), "--nproc-per-node", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
INHERITED = ("PATH", "HOME", "LANG", "PYTHONDONTWRITEBYTECODE", "PYTHONUNBUFFERED")


def run(
    command: list[str], reports: Path | None, stdin: str | None = None, cwd: Path | None = None, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Runs a job with the toy on the list, and with the given variables."""
    environment = {name: os.environ[name] for name in INHERITED if name in os.environ}
    environment.update({"PYTHONPATH": str(HERE / "toy"), "OMP_NUM_THREADS": "1", **variables})
    if reports is not None:
        environment["TRAINING_XPU_REPORT"] = str(reports)
    ran = subprocess.run(
        command, env=environment, input=stdin, cwd=cwd, capture_output=True, text=True, timeout=300, check=False
    )
    assert ran.returncode == 0, ran.stderr[-4000:]
    return ran


def seen(folder: Path) -> dict[str, list[Any]]:
    """What each process reported, by role and rank: the root's class, what was compiled, and the steps, in order."""
    found: dict[str, list[Any]] = defaultdict(list)
    for line in report.read(folder):
        key = f"{line.role}-{line.rank}"
        found[key]  # a process that only reported itself is there, too
        if line.feature == "toy" and line.event in ("applied", "seen"):
            value = line.data.get("root") or line.data.get("compiled") or line.data["step"]
            found[key].append(value)
        elif line.event in ("stepped-aside", "fault"):
            found[key].append(line.reason)
    return dict(found)


PLAIN = ["builtin_function_or_method", "Tiny", 1, 2, 3]


@pytest.mark.parametrize(
    "first_line",
    ["import torch", "import deepspeed", "from accelerate import Accelerator", "from transformers import Trainer"],
)
def test_whichever_package_a_script_imports_first(first_line: str, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(f"{first_line}\n{(JOBS / 'plain.py').read_text()}")
    ran = run([sys.executable, str(script)], tmp_path / "reports", TRAINING_XPU_TOY="true")
    assert ran.stdout.endswith("trained\n")
    steps = seen(tmp_path / "reports")["single-0"]
    # deepspeed compiles functions of its own while it is imported
    assert [s for s in steps if s != "function"] == PLAIN


def test_run_as_a_module(tmp_path: Path) -> None:
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").write_text("import torch\n")
    (package / "train.py").write_text((JOBS / "plain.py").read_text())
    run([sys.executable, "-m", "package.train"], tmp_path / "reports", cwd=tmp_path, TRAINING_XPU_TOY="auto")
    assert seen(tmp_path / "reports") == {"single-0": PLAIN}


def test_typed_into_an_interpreter_as_in_a_notebook(tmp_path: Path) -> None:
    kernel = "import code, sys; code.InteractiveInterpreter(globals()).runsource(sys.stdin.read(), '<cell>', 'exec')"
    cells = "assert '__file__' not in globals()\n" + (JOBS / "plain.py").read_text()
    run([sys.executable, "-c", kernel], tmp_path / "reports", stdin=cells, TRAINING_XPU_TOY="1")
    assert seen(tmp_path / "reports") == {"single-0": PLAIN}


def test_torchrun_with_ddp_fsdp2_and_spawned_dataloader_workers(tmp_path: Path) -> None:
    run(
        [*TORCHRUN, str(JOBS / "distributed.py")],
        tmp_path,
        TRAINING_XPU_TOY="true",
        TRAINING_XPU_TOY_LAUNCHER="true",
    )
    expected = ["DistributedDataParallel", 1, 2, 3, 4]
    assert seen(tmp_path) == {"launcher-0": [], "rank-0": expected, "rank-1": expected}
    lines = list(report.read(tmp_path))
    assert {line.data["told"] for line in lines if "told" in line.data} == {"by the launcher"}
    asked = {"toy": "true", "toy-launcher": "true"}
    processes = [line for line in lines if line.event == "process"]
    assert [(p.role, p.data["world_size"], p.data["asked_for"]) for p in processes] == [
        ("launcher", 1, asked),
        ("rank", 2, asked),
        ("rank", 2, asked),
    ]
    assert len({p.data["job"] for p in processes if p.role == "rank"}) == 1
    assert [line.feature for line in lines if line.event == "subscribed"] == ["toy-launcher", "toy", "toy"]


def test_zero_3_with_sub_groups_by_hand_and_through_accelerate(tmp_path: Path) -> None:
    run([*TORCHRUN, str(JOBS / "zero3.py")], tmp_path, TRAINING_XPU_TOY="true", DS_ACCELERATOR="cpu")
    for rank in ("rank-0", "rank-1"):
        assert [s for s in seen(tmp_path)[rank] if s != "function"] == ["DeepSpeedEngine", 1, 2, 3, 4, 5]


@pytest.mark.parametrize("compiled", [False, True])
def test_hf_trainer_under_accelerate_launch(compiled: bool, tmp_path: Path) -> None:
    launch = [str(BIN / "accelerate"), "launch", "--cpu", "--num_processes", "1", "--num_machines", "1"]
    options = ["--compile"] if compiled else []
    ran = run([*launch, str(JOBS / "hf_trainer.py"), *options], tmp_path, TRAINING_XPU_TOY="true")
    found = {key: [s for s in steps if s != "function"] for key, steps in seen(tmp_path).items()}
    whole = ["LlamaForCausalLM", "OptimizedModule"] if compiled else ["LlamaForCausalLM"]
    assert found == {"launcher-0": [], "single-0": [*whole, 1, 2, 3, 4]}
    assert "global hooks" not in ran.stderr


def test_trainers_spawned_by_multiprocessing_are_ranks(tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    run([sys.executable, str(JOBS / "spawned.py")], tmp_path, TRAINING_XPU_TOY="true", FREE_PORT=port)
    expected = ["DistributedDataParallel", 1, 2]
    assert seen(tmp_path) == {"single-0": [], "rank-0": expected, "rank-1": expected}


def test_a_feature_that_cannot_run_is_a_warning_if_asked_for_and_silent_if_auto(tmp_path: Path) -> None:
    job = [sys.executable, str(JOBS / "plain.py")]
    for value, lines in (("true", ["training-xpu: toy steps aside: no toys here"]), ("auto", [])):
        ran = run(job, tmp_path / value, TRAINING_XPU_TOY=value, TOY_CANNOT_RUN="no toys here")
        assert ran.stdout == "trained\n"
        assert ran.stderr.splitlines() == lines
        assert seen(tmp_path / value) == {"single-0": ["no toys here"]}


def test_a_feature_that_breaks_leaves_training_alone(tmp_path: Path) -> None:
    ran = run([sys.executable, str(JOBS / "plain.py")], tmp_path, TRAINING_XPU_TOY="true", TOY_FAILS_AT="2")
    reason = "RuntimeError at the step seam: the toy broke"
    assert ran.stdout == "trained\n"
    assert ran.stderr.splitlines() == [f"training-xpu: toy steps aside: {reason}"]
    assert seen(tmp_path)["single-0"] == ["builtin_function_or_method", "Tiny", 1, reason]


NOTHING_ASKED = """
import sys
before = set(sys.modules)
import torch
print(sorted(m for m in set(sys.modules) - before if m.startswith(("training_xpu", "pydantic"))))
print(torch.compile.__module__)
"""


def test_nothing_asked_nothing_imported_nothing_patched() -> None:
    # Without a site there is no toy on the list, as with every user.
    ran = run([sys.executable, "-S", "-c", "import sys; sys.path[:0] = sys.argv[1:]" + NOTHING_ASKED, *sys.path], None)
    assert ran.stdout.splitlines() == ["['training_xpu', 'training_xpu.autoload']", "torch"]
    assert ran.stderr == ""


def test_reports_without_any_feature_are_one_line(tmp_path: Path) -> None:
    ran = run([sys.executable, "-c", "import torch"], tmp_path / "reports")
    assert ran.stderr == ""
    (line,) = report.read(tmp_path / "reports")
    assert (line.event, line.role, line.feature, line.data["asked_for"]) == ("process", "single", "", {})


@pytest.mark.parametrize("value", ["1", "true", "YES"])
def test_disabled(value: str, tmp_path: Path) -> None:
    job = [sys.executable, str(JOBS / "plain.py")]
    ran = run(job, tmp_path / "reports", TRAINING_XPU_TOY="true", TRAINING_XPU_DISABLE=value)
    assert (ran.stdout, ran.stderr) == ("trained\n", "")
    assert not (tmp_path / "reports").exists()


@pytest.mark.parametrize(
    ("variables", "line"),
    [
        (
            {"TRAINING_XPU_DISABLE": "maybe"},
            "training-xpu: switched off: TRAINING_XPU_DISABLE is 'maybe', which is neither true nor false",
        ),
        (
            {"TRAINING_XPU_TOY": "maybe"},
            "training-xpu: toy steps aside: TRAINING_XPU_TOY is 'maybe', which is none of true, false and auto",
        ),
        (
            {"TRAINING_XPU_TOY": "1", "TRAINING_XPU_LOG": "loud"},
            "training-xpu: switched off: TRAINING_XPU_LOG is 'loud', which is no level",
        ),
        (
            {"TRAINING_XPU_TOY": "1", "RANK": "x", "WORLD_SIZE": "2"},
            "training-xpu: switched off: RANK is 'x', which is no whole number",
        ),
    ],
)
def test_a_fault_is_one_line_and_torch_still_imports(variables: dict[str, str], line: str) -> None:
    ran = run([sys.executable, "-c", "import torch; print('imported')"], None, **variables)
    assert ran.stdout == "imported\n"
    assert ran.stderr.splitlines() == [line]


def test_a_report_folder_that_cannot_be_written_is_one_warning(tmp_path: Path) -> None:
    ran = run([sys.executable, str(JOBS / "plain.py")], Path("/dev/null/reports"), TRAINING_XPU_TOY="true")
    assert ran.stdout == "trained\n"
    assert len(ran.stderr.splitlines()) == 1
    assert "/dev/null/reports" in ran.stderr
