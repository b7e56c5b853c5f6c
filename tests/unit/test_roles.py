"""roles: what a process is, from its command line."""

from __future__ import annotations

import pytest

from training_xpu.roles import role_of

PYTHON = "/usr/bin/python3"
SPAWNED = [PYTHON, "-c", "from multiprocessing.spawn import spawn_main; spawn_main(pipe=7)", "--multiprocessing-fork"]


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "PMI_RANK"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("command", "arguments"),
    [
        ([PYTHON, "/venv/bin/torchrun", "--nproc-per-node", "2", "train.py"], ["/venv/bin/torchrun"]),
        ([PYTHON, "-m", "torch.distributed.run", "train.py"], ["-m", "train.py"]),
        ([PYTHON, "-um", "torch.distributed.run", "train.py"], ["-m", "train.py"]),
        ([PYTHON, "-X", "faulthandler", "-W", "ignore", "-mtorch.distributed.launch", "t.py"], ["-m", "t.py"]),
        ([PYTHON, "/venv/bin/accelerate", "launch", "train.py"], ["/venv/bin/accelerate"]),
        ([PYTHON, "-m", "accelerate.commands.launch", "train.py"], ["-m"]),
        ([PYTHON, "/venv/bin/deepspeed", "train.py"], ["/venv/bin/deepspeed"]),
        ([PYTHON, "-u", "-m", "deepspeed.launcher.launch", "--world_info=x", "train.py"], ["-m"]),
        ([PYTHON, "-m", "training_xpu.workloads.launch", "/runs/1"], ["-m"]),
    ],
)
def test_launchers(command: list[str], arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert role_of(command, arguments) == "launcher"
    # Some clusters set the node's rank for the launcher itself.
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert role_of(command, arguments) == "launcher"


@pytest.mark.parametrize(
    "command",
    [
        [
            PYTHON,
            "-c",
            "from multiprocessing.spawn import spawn_main; spawn_main(pipe_handle=7)",
            "--multiprocessing-fork",
        ],
        [PYTHON, "-s", "-c", "from multiprocessing.resource_tracker import main;main(5)"],
        [PYTHON, "-c", "from multiprocessing.forkserver import main; main(4, 5, ['__main__'], **{})"],
        [PYTHON, "/venv/lib/torch/_inductor/compile_worker/__main__.py", "--workers=2"],
        [PYTHON, "-m", "joblib.externals.loky.backend.popen_loky_posix", "--process-name", "x"],
        [PYTHON, "-m", "training_xpu.device", "--json"],
        [PYTHON, "/venv/bin/ljperf", "env"],
    ],
)
def test_helpers(command: list[str]) -> None:
    arguments = [command[1]] if not command[1].startswith("-") else ["-c"]
    assert role_of(command, arguments) == "helper"


@pytest.mark.parametrize(
    ("command", "arguments"),
    [
        ([PYTHON, "train.py", "--model", "x"], ["train.py"]),
        ([PYTHON, "-m", "mypackage.train"], ["-m"]),
        ([PYTHON, "-c", "import torch"], ["-c"]),
        ([PYTHON], [""]),
        ([PYTHON, "-m", "ipykernel_launcher", "-f", "kernel.json"], ["-m"]),
        ([PYTHON, "-u", "torchrun_like.py"], ["torchrun_like.py"]),
        ([], []),
    ],
)
def test_the_rest_is_a_rank_under_a_launcher_and_single_without(
    command: list[str], arguments: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert role_of(command, arguments) == "single"
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert role_of(command, arguments) == "rank"


def test_ljperf_under_a_launcher_trains_in_its_own_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert role_of([PYTHON, "/venv/bin/ljperf", "train"], ["/venv/bin/ljperf", "train"]) == "rank"


def test_a_helper_of_a_rank_stays_a_helper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert role_of(
        [PYTHON, "-c", "from multiprocessing.spawn import spawn_main; x", "--multiprocessing-fork"], ["-c"]
    ) == ("helper")
