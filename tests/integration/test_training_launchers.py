"""Several nodes, other launchers, and the commands of a dry run pasted into a shell."""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from training_harness import Done, Ljperf, Run, free_port, losses_near

from training_xpu.workloads.folder_owner import owning

TORCHRUN = (str(Path(sys.executable).with_name("torchrun")), "--nproc-per-node", "2", "--no-python", *Ljperf.COMMAND)
NODE = ("--nproc", "1", "--nnodes", "2")


@pytest.fixture(scope="module")
def one_node(ljperf: Ljperf) -> Run:
    return ljperf.train("ddp", "--nproc", "2").run


def check_nodes(done: list[Done], one_node: Run) -> None:
    assert [d.code for d in done] == [0, 0], [d.stderr for d in done]
    ranks = sorted(s["rank"] for d in done for s in d.run.steps())
    assert ranks == [0] * 4 + [1] * 4
    for node in done:
        assert node.document["world_size"] == 2
        (rank,) = {s["rank"] for s in node.run.steps()}
        losses_near([s["loss"] for s in node.run.steps()], [s["loss"] for s in one_node.steps(rank)])
        assert node.document["arms"][0]["step_time_s"]["count"] > 0


def test_two_nodes_that_number_themselves(own_runs: Ljperf, one_node: Run) -> None:
    meet = ("--rdzv-endpoint", f"127.0.0.1:{free_port()}", "--rdzv-id", "job-7")
    nodes = [own_runs.start(*own_runs.training("ddp", *NODE, *meet)) for _ in range(2)]
    check_nodes([node.done() for node in nodes], one_node)


def test_two_nodes_that_are_numbered_save_into_a_shared_folder_only(
    own_runs: Ljperf, one_node: Run, tmp_path: Path
) -> None:
    meet = ("--rdzv-endpoint", f"127.0.0.1:{free_port()}")
    refused = own_runs.train("ddp", *NODE, *meet, "--save-every", "2", expect=2)
    assert "--save-every with --nnodes 2 needs --save" in refused.stderr
    saving = ("--save-every", "2", "--save", str(tmp_path / "shared"))
    nodes = [own_runs.start(*own_runs.training("ddp", *NODE, *meet, *saving, "--node-rank", n)) for n in "01"]
    done = [node.done() for node in nodes]
    check_nodes(done, one_node)
    assert [d.run.steps()[0]["rank"] for d in done] == [0, 1]
    assert {p.name for p in (tmp_path / "shared").iterdir()} == {"step-0000002", "step-0000004"}
    assert {p.name for p in (tmp_path / "shared" / "step-0000004").iterdir()} >= {"rng-0.pt", "rng-1.pt", "state.pt"}


@pytest.fixture
def two_hosts() -> Iterator[list[str]]:
    """Two network name spaces joined by a cable: 10.231.7.1 and 10.231.7.2."""
    if os.geteuid() != 0:
        pytest.skip("needs root")
    names = [f"node{i}-{uuid.uuid4().hex[:6]}" for i in range(2)]
    commands = [f"ip netns add {name}" for name in names]
    commands.append(f"ip link add eth7 netns {names[0]} type veth peer name eth7 netns {names[1]}")
    for number, name in enumerate(names, start=1):
        commands.append(f"ip -n {name} address add 10.231.7.{number}/24 dev eth7")
        commands += [f"ip -n {name} link set {device} up" for device in ("lo", "eth7")]
    try:
        for command in commands:
            made = subprocess.run(command.split(), capture_output=True, text=True, check=False)
            if made.returncode:
                pytest.skip(f"no network name spaces here: {made.stderr.strip()}")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)


@pytest.mark.skipif(not Path("/usr/sbin/ip").exists() and not Path("/sbin/ip").exists(), reason="needs iproute2")
def test_two_nodes_on_a_network(own_runs: Ljperf, one_node: Run, two_hosts: list[str]) -> None:
    meet = ("--rdzv-endpoint", f"10.231.7.1:{free_port()}")
    nodes = []
    for number, name in enumerate(two_hosts):
        inside = ("ip", "netns", "exec", name, *Ljperf.COMMAND)
        arguments = own_runs.training("ddp", *NODE, *meet, "--node-rank", str(number))
        nodes.append(own_runs.start(*arguments, command=inside, environment={"GLOO_SOCKET_IFNAME": "eth7"}))
    check_nodes([node.done() for node in nodes], one_node)


def test_under_torchrun_there_is_one_run_and_one_document(own_runs: Ljperf, one_node: Run) -> None:
    arguments = [a for a in own_runs.training("ddp") if a not in ("--nproc", "1")]
    done = own_runs(*arguments, command=TORCHRUN)
    (folder,) = own_runs.runs.iterdir()
    assert done.run.folder == folder
    assert done.run.record["status"] == done.document["status"] == "completed"
    assert done.run.record["fingerprint"]["packages"]
    assert (done.document["world_size"], len(done.run.steps())) == (2, 8)
    losses_near(done.run.losses, one_node.losses)


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("1:step:2:raise", "rank 1: ValueError: the rank was told to fail"),
        ("0:step:2:raise", "rank 0: ValueError: the rank was told to fail"),
        ("1:step:2:SIGKILL", ""),
    ],
)
def test_under_torchrun_a_failing_rank_marks_the_record(own_runs: Ljperf, fault: str, reason: str) -> None:
    arguments = [a for a in own_runs.training("ddp", "--steps", "50") if a not in ("--nproc", "1")]
    environment = {"TRAINING_TEST_FAULT": fault}
    started = own_runs.start(*arguments, command=TORCHRUN, plugin="faults", environment=environment)
    assert started.done().code == 1
    started.assert_nothing_left()
    (folder,) = own_runs.runs.iterdir()
    record = Run(folder).record
    assert record["status"] == "failed"
    assert record["failures"][0]["rank"] == int(fault[0])
    if reason:
        assert record["reason"] == reason
    else:  # the signal is known unless the launcher collected the dead process first
        assert record["reason"].removeprefix("rank 1: ") in (
            "killed by signal 9 (SIGKILL)",
            "gone without a word, probably killed by a signal",
        )
    assert record["summary"]["loss"]["first"] == Run(folder).losses[0]


def test_under_torchrun_a_folder_in_use_is_refused_by_every_rank(own_runs: Ljperf, tmp_path: Path) -> None:
    arguments = own_runs.training("ddp", "--save-every", "2", "--save", str(tmp_path / "shared"))
    arguments = [a for a in arguments if a not in ("--nproc", "1")]
    with owning(tmp_path / "shared", ""):
        started = own_runs.start(*arguments, command=TORCHRUN)
        done = started.done()
    assert done.code == 1  # torchrun's own
    assert done.stderr.count("in use by another run, by process") == 2
    assert "exitcode  : 2" in done.stderr
    started.assert_nothing_left()
    assert not own_runs.runs.exists()


def test_what_torchrun_decides_cannot_be_asked_of_ljperf(own_runs: Ljperf) -> None:
    place = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
    place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    for option in (["--nproc", "3"], ["--dry-run"], ["--rdzv-id", "x"]):
        done = own_runs("train", "--model", "ddp/./tiny", *option, environment=place, expect=2)
        assert f"{option[0]}" in done.stderr.splitlines()[0]
    assert not own_runs.runs.exists()


def test_a_dry_run_starts_nothing_and_its_script_trains(own_runs: Ljperf, tmp_path: Path) -> None:
    arguments = [a for a in own_runs.training("ddp", "--nproc", "2", "--steps", "2") if a != "--json"]
    dry = own_runs(*arguments, "--dry-run")
    told = own_runs(*arguments, "--dry-run", "--json").document["arms"][0]
    assert not own_runs.runs.exists()
    assert told["commands"][-1][1:4] == ["-m", "training_xpu.workloads.launch", told["run_folder"]]
    assert (told["job"]["steps"], told["environment"]["TOKENIZERS_PARALLELISM"]) == (2, "false")
    script = tmp_path / "job.sh"
    script.write_text(dry.stdout)
    environment = {k: v for k, v in own_runs.environment.items() if k != "TRAINING_XPU_RUNS"}
    subprocess.run(["bash", "-eu", str(script)], env=environment, check=True, cwd=tmp_path, timeout=300)
    run = Run(own_runs.runs / "dry-run-base")
    assert [(s["step"], s["rank"]) for s in run.steps()] == [(1, 0), (1, 1), (2, 0), (2, 1)]
    assert run.evaluation("after") < run.evaluation("before")
