"""`ljperf run` and `ljperf explain` around real commands."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from training_xpu.perf.records import RunRecord

HERE = Path(__file__).parent
PLAIN = HERE / "jobs" / "plain.py"
LJPERF = str(Path(sys.executable).with_name("ljperf"))
PYTHON = sys.executable


def environment(**variables: str) -> dict[str, str]:
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("TRAINING_XPU") and k != "RANK"}
    return {**inherited, "PYTHONPATH": str(HERE / "toy"), **variables}


def ljperf(*arguments: str, cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [LJPERF, *arguments],
        cwd=cwd,
        env=environment(**variables),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def start(*arguments: str, cwd: Path, **options: Any) -> subprocess.Popen[str]:
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}
    return subprocess.Popen([LJPERF, *arguments], cwd=cwd, env=environment(), text=True, **options)


def record(cwd: Path) -> RunRecord:
    (folder,) = (cwd / "runs").iterdir()
    return RunRecord.read(folder / "run.json")


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


def test_features_apply_and_the_record_says_so(tmp_path: Path) -> None:
    ran = ljperf("run", "--features", "toy", "--", PYTHON, str(PLAIN), cwd=tmp_path)
    assert (ran.returncode, ran.stdout) == (0, "trained\n")
    lines = ran.stderr.splitlines()
    assert lines[0].startswith("ljperf: toy applied (single process ")
    kept = record(tmp_path)
    assert lines[1] == f"ljperf: record of this run: {tmp_path}/runs/{kept.name}/run.json"
    assert (kept.status, kept.arm, kept.features, kept.config) == ("completed", "toy", ["toy"], None)
    assert kept.command == [PYTHON, str(PLAIN)]
    # Every known feature is said to be on or off: an arm inherits none.
    assert kept.environment["TRAINING_XPU_TOY"] == "true"
    assert kept.environment["TRAINING_XPU_TOY_LAUNCHER"] == "false"
    assert {r["host"] for r in kept.feature_reports} == {kept.host}  # one way to tell hosts apart, no names
    assert [r["event"] for r in kept.feature_reports] == ["subscribed", "seen", "applied", "seen", "seen", "seen"]

    told = ljperf("explain", "latest", cwd=tmp_path)
    assert told.returncode == 0
    assert "toy applied (single process " in told.stdout
    document = json.loads(ljperf("explain", kept.name[:15], "--json", cwd=tmp_path).stdout)
    assert [(f["name"], f["asked"], f["outcome"]) for f in document["features"]] == [("toy", "true", "applied")]
    assert [(p["role"], p["program"]) for p in document["processes"]] == [("single", "plain.py")]
    wrong = ljperf("explain", kept.name.replace("plain", "plane"), cwd=tmp_path)
    assert wrong.returncode == 2
    assert kept.name in wrong.stderr


def test_an_arm_does_not_inherit_the_users_variable(tmp_path: Path) -> None:
    ran = ljperf("run", "--features", "base", "--", PYTHON, str(PLAIN), cwd=tmp_path, TRAINING_XPU_TOY="true")
    assert ran.returncode == 0
    assert ran.stderr.startswith("ljperf: no feature was asked for\n")
    assert record(tmp_path).arm == "base"
    told = ljperf("explain", "latest", cwd=tmp_path)
    assert "No feature was asked for: the job ran as without this package." in told.stdout


def test_without_the_option_the_users_variables_decide(tmp_path: Path) -> None:
    ran = ljperf("run", "--", PYTHON, str(PLAIN), cwd=tmp_path, TRAINING_XPU_TOY="auto")
    assert ran.returncode == 0
    assert ran.stderr.startswith("ljperf: toy applied")


@pytest.mark.parametrize(
    ("arguments", "variables", "code", "words"),
    [
        (["--features", "toy"], {"TOY_CANNOT_RUN": "no toys here"}, 3, "toy stepped aside (single process "),
        ([], {"TOY_CANNOT_RUN": "no toys", "TRAINING_XPU_TOY": "auto"}, 0, "toy stepped aside (single process "),
        (["--features", "toy"], {"TOY_FAILS_AT": "2"}, 3, "RuntimeError at the step seam: the toy broke"),
    ],
)
def test_a_feature_that_stepped_aside(
    arguments: list[str], variables: dict[str, str], code: int, words: str, tmp_path: Path
) -> None:
    ran = ljperf("run", *arguments, "--", PYTHON, str(PLAIN), cwd=tmp_path, **variables)
    assert (ran.returncode, ran.stdout) == (code, "trained\n")
    assert words in ran.stderr
    assert record(tmp_path).status == "completed"  # the command itself did


def test_a_feature_that_nobody_used_did_not_apply(tmp_path: Path) -> None:
    ran = ljperf("run", "--features", "toy", "--", "true", cwd=tmp_path)
    assert ran.returncode == 3
    assert "toy did not apply: no process of the job imported torch" in ran.stderr
    ran = ljperf("run", "--features", "toy", "--", PYTHON, "-c", "import torch", cwd=tmp_path)
    assert ran.returncode == 3
    assert "toy did not apply: what it waits for did not happen" in ran.stderr


def test_a_failing_command_keeps_its_exit_code(tmp_path: Path) -> None:
    ran = ljperf("run", "--features", "toy", "--", "sh", "-c", "exit 7", cwd=tmp_path)
    assert ran.returncode == 7
    assert (record(tmp_path).status, record(tmp_path).reason) == ("failed", "exit code 7")


def test_a_command_killed_by_a_signal_gives_128_and_its_number(tmp_path: Path) -> None:
    ran = ljperf("run", "--", "sh", "-c", "kill -SEGV $$", cwd=tmp_path)
    assert ran.returncode == 128 + signal.SIGSEGV
    assert record(tmp_path).reason == "killed by signal 11 (SIGSEGV)"


def test_streams_and_arguments_pass_through_untouched(tmp_path: Path) -> None:
    code = "import sys; sys.stdout.buffer.write(sys.stdin.buffer.read()[::-1]); print(sys.argv[1:], file=sys.stderr)"
    ran = subprocess.run(
        [LJPERF, "run", "--", PYTHON, "-c", code, "--features", "x y", "--", "--help", "--debug"],
        cwd=tmp_path,
        env=environment(),
        input=b"\x00\xff\n\r",
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert ran.stdout == b"\r\n\xff\x00"
    assert ran.stderr.startswith(b"['--features', 'x y', '--', '--help', '--debug']\n")


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ([], ["no command", "ljperf run -- python train.py"]),
        (["pyton3", "x.py"], ["command not found: pyton3", "Did you mean python3"]),
        (["./trian.py"], ["./trian.py does not exist", "Did you mean train.py?"]),
        (["./train.py"], ["./train.py is not executable", "python ./train.py"]),
        (["."], ["is a folder"]),
    ],
)
def test_a_wrong_command_starts_nothing(command: list[str], words: list[str], tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("")
    ran = ljperf("run", "--", *command, cwd=tmp_path)
    assert ran.returncode == 2
    assert all(w in ran.stderr for w in words), ran.stderr
    assert "Traceback" not in ran.stderr
    assert not (tmp_path / "runs").exists()


def test_unknown_feature_bad_variable_and_disabled_package(tmp_path: Path) -> None:
    ran = ljperf("run", "--features", "toi", "--", "true", cwd=tmp_path)
    assert (ran.returncode, ran.stderr) == (2, "ljperf: unknown feature 'toi'\n  Did you mean toy?\n")
    ran = ljperf("run", "--", "true", cwd=tmp_path, TRAINING_XPU_TOY="perhaps")
    assert ran.returncode == 2
    assert "TRAINING_XPU_TOY is 'perhaps'" in ran.stderr
    ran = ljperf("run", "--features", "toy", "--", "true", cwd=tmp_path, TRAINING_XPU_DISABLE="1")
    assert ran.returncode == 2
    assert "TRAINING_XPU_DISABLE is set" in ran.stderr
    assert not (tmp_path / "runs").exists()


def test_dry_run_prints_what_a_shell_could_run(tmp_path: Path) -> None:
    ran = ljperf("run", "--features", "toy", "--dry-run", "--", "echo", "a b", cwd=tmp_path)
    assert ran.returncode == 0
    assert "TRAINING_XPU_TOY=true" in ran.stdout
    assert ran.stdout.endswith("echo 'a b'\n")
    shell = subprocess.run(["sh", "-c", ran.stdout], capture_output=True, text=True, check=True)
    assert shell.stdout == "a b\n"
    assert not (tmp_path / "runs").exists()


def test_a_folder_that_cannot_be_written_starts_nothing(tmp_path: Path) -> None:
    ran = ljperf("run", "--output", "/dev/null/runs", "--", "touch", "started", cwd=tmp_path)
    assert ran.returncode == 2
    assert "/dev/null/runs" in ran.stderr
    assert not (tmp_path / "started").exists()


SAYS_WHICH = """
import signal, sys, time
def told(number, frame):
    print(signal.Signals(number).name, flush=True)
    if number != signal.SIGUSR1 and number != signal.SIGUSR2:
        sys.exit(9)
for s in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
    signal.signal(s, told)
print("ready", flush=True)
while True:
    time.sleep(1)
"""


@pytest.mark.parametrize("last", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signals_are_passed_on(last: signal.Signals, tmp_path: Path) -> None:
    job = start("run", "--", PYTHON, "-u", "-c", SAYS_WHICH, cwd=tmp_path)
    assert job.stdout is not None
    assert job.stdout.readline() == "ready\n"
    for number in (signal.SIGUSR1, signal.SIGUSR2, last):
        job.send_signal(number)
        assert job.stdout.readline() == f"{number.name}\n"
    job.communicate(timeout=60)
    assert job.returncode == 9
    assert (record(tmp_path).status, record(tmp_path).reason) == ("interrupted", "exit code 9")


def test_ctrl_c_in_a_terminal_reaches_the_command_once(tmp_path: Path) -> None:
    code = (
        "import signal, time\n"
        "signal.signal(signal.SIGINT, lambda *a: print('told', flush=True))\n"
        "print('ready', flush=True)\n"
        "deadline = time.monotonic() + 1.5\n"
        "while time.monotonic() < deadline: time.sleep(0.1)\n"
        "print('end ' + input(), flush=True)\n"
    )
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(tmp_path)
        os.execve(LJPERF, [LJPERF, "run", "--", PYTHON, "-u", "-c", code], environment())
    seen = b""
    while b"ready" not in seen:
        seen += os.read(terminal, 1024)
    os.write(terminal, b"\x03")
    os.write(terminal, b"typed\n")
    try:
        while chunk := os.read(terminal, 1024):
            seen += chunk
    except OSError:
        pass  # the other side of a terminal is gone
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert seen.count(b"told") == 1
    assert b"end typed" in seen  # and it may read from the terminal
    assert record(tmp_path).status == "interrupted"


STUBBORN_FAMILY = """
import os, signal, subprocess, sys, time
stubborn = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(0, flush=True); time.sleep(600)"
child = subprocess.Popen([sys.executable, "-u", "-c", stubborn], stdout=subprocess.PIPE, start_new_session=True)
child.stdout.readline()
print(child.pid, flush=True)
time.sleep(600)
"""


def test_sigterm_leaves_no_process_behind(tmp_path: Path) -> None:
    job = start("run", "--", PYTHON, "-u", "-c", STUBBORN_FAMILY, cwd=tmp_path)
    assert job.stdout is not None
    grandchild = int(job.stdout.readline())
    family = psutil.Process(job.pid).children(recursive=True)
    assert grandchild in {p.pid for p in family}
    job.terminate()
    job.communicate(timeout=60)
    assert job.returncode == 128 + signal.SIGTERM
    assert not any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in family)


def test_if_ljperf_itself_is_killed_the_command_is_asked_to_end(tmp_path: Path) -> None:
    job = start("run", "--", "sleep", "600", cwd=tmp_path)
    wait_for(lambda: [p.name() for p in psutil.Process(job.pid).children()] == ["sleep"])
    (child,) = psutil.Process(job.pid).children()
    job.kill()
    job.communicate()
    wait_for(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE)


def test_what_a_command_leaves_in_the_background_lives_on(tmp_path: Path) -> None:
    ran = ljperf("run", "--", "sh", "-c", "sleep 600 >/dev/null 2>&1 & echo $!", cwd=tmp_path)
    left = psutil.Process(int(ran.stdout))
    assert ran.returncode == 0
    assert left.is_running()
    left.kill()


def test_explain_a_running_process(tmp_path: Path) -> None:
    code = PLAIN.read_text() + "\nimport time; time.sleep(600)"
    job = start("run", "--features", "toy", "--", PYTHON, "-u", "-c", code, cwd=tmp_path)
    try:
        assert job.stdout is not None
        assert job.stdout.readline() == "trained\n"
        (child,) = psutil.Process(job.pid).children()
        told = ljperf("explain", "--pid", str(child.pid), "--json", cwd=tmp_path)
        document = json.loads(told.stdout)
        assert [(f["name"], f["outcome"]) for f in document["features"]] == [("toy", "applied")]
        assert [p["pid"] for p in document["processes"]] == [child.pid]
        other = ljperf("explain", "--pid", str(os.getpid()), cwd=tmp_path)
        assert other.returncode == 2
        assert "without TRAINING_XPU_REPORT" in other.stderr
    finally:
        job.terminate()
        job.communicate()
    gone = ljperf("explain", "--pid", str(child.pid), cwd=tmp_path)
    assert (gone.returncode, gone.stderr.splitlines()[0]) == (2, f"ljperf: there is no process {child.pid}")


def test_explain_wants_one_of_two(tmp_path: Path) -> None:
    assert ljperf("explain", cwd=tmp_path).returncode == 2
    assert ljperf("explain", "x", "--pid", "1", cwd=tmp_path).returncode == 2
    missing = ljperf("explain", "nothing", cwd=tmp_path)
    assert missing.returncode == 2
    assert "no run 'nothing'" in missing.stderr


def test_signals_that_were_to_be_ignored_are_and_the_run_is_not_interrupted(tmp_path: Path) -> None:
    """As under nohup, when the terminal goes away."""
    job = start(
        *("run", "--", "sh", "-c", "echo ready; read line; echo $line"),
        cwd=tmp_path,
        stdin=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN),
    )
    assert job.stdout is not None
    assert job.stdin is not None
    assert job.stdout.readline() == "ready\n"
    job.send_signal(signal.SIGHUP)
    out, _ = job.communicate("went on\n", timeout=60)
    assert (job.returncode, out) == (0, "went on\n")
    assert (record(tmp_path).status, record(tmp_path).reason) == ("completed", "")


IGNORES = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(0, flush=True); time.sleep(600)"


def test_a_command_that_ignores_sigterm_is_killed_at_the_third(tmp_path: Path) -> None:
    job = start("run", "--", PYTHON, "-c", IGNORES, cwd=tmp_path)
    assert job.stdout is not None
    assert job.stdout.readline() == "0\n"
    (child,) = psutil.Process(job.pid).children()
    for _ in range(2):
        job.send_signal(signal.SIGTERM)
        # Taken up once it is no longer pending: two at once would be one.
        wait_for(lambda: not pending(job.pid) & (1 << (signal.SIGTERM - 1)))
        assert child.is_running()
    assert child.status() != psutil.STATUS_ZOMBIE
    job.send_signal(signal.SIGTERM)
    job.communicate(timeout=60)
    assert job.returncode == 128 + signal.SIGKILL
    kept = record(tmp_path)
    assert (kept.status, kept.reason) == ("interrupted", "killed by signal 9 (SIGKILL)")


def pending(pid: int) -> int:
    """The signals a process has not taken yet, as the kernel's bit mask."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("ShdPnd")), 16)


def test_a_signal_after_the_command_has_ended_does_not_lose_its_record(tmp_path: Path) -> None:
    """The command asks the whole group to end, itself last, so that both ends are seen at once."""
    code = "import os, signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); os.killpg(0, signal.SIGTERM); os._exit(5)"
    job = start("run", "--", PYTHON, "-c", code, cwd=tmp_path, start_new_session=True)
    job.communicate(timeout=60)
    assert job.returncode == 5
    assert record(tmp_path).finished is not None
    assert record(tmp_path).reason == "exit code 5"


def test_ctrl_c_reaches_a_command_that_has_left_the_terminal_s_group(tmp_path: Path) -> None:
    code = (
        "import os, signal, time\n"
        "os.setpgid(0, 0)\n"
        "signal.signal(signal.SIGINT, lambda *a: os._exit(9))\n"
        "signal.signal(signal.SIGTTOU, signal.SIG_IGN)\n"
        "print('ready', flush=True)\n"
        "time.sleep(600)\n"
    )
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(tmp_path)
        os.execve(LJPERF, [LJPERF, "run", "--", PYTHON, "-u", "-c", code], environment())
    seen = b""
    while b"ready" not in seen:
        seen += os.read(terminal, 1024)
    os.write(terminal, b"\x03")
    try:
        while chunk := os.read(terminal, 1024):
            seen += chunk
    except OSError:
        pass  # the other side of a terminal is gone
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 9
    assert record(tmp_path).status == "interrupted"


def test_a_daemon_that_outlives_an_ordinary_end_and_not_an_asked_for_one(tmp_path: Path) -> None:
    """Forked twice in a session of its own, so that only adoption tells that it was ours."""
    daemon = (
        "import os, sys, time\n"
        "if os.fork() == 0:\n"
        "    os.setsid()\n"
        "    if os.fork() == 0:\n"
        "        print(os.getpid(), flush=True)\n"
        "        os.closerange(1, 3)\n"
        "        time.sleep(600)\n"
        "    os._exit(0)\n"
        "os.wait()\n"
    )
    job = start("run", "--", PYTHON, "-c", daemon, cwd=tmp_path)
    left = psutil.Process(int(job.communicate(timeout=60)[0]))
    assert job.returncode == 0
    assert left.is_running()
    left.kill()
    job = start("run", "--", PYTHON, "-c", daemon + "time.sleep(600)\n", cwd=tmp_path)
    assert job.stdout is not None
    left = psutil.Process(int(job.stdout.readline()))
    job.terminate()
    job.communicate(timeout=60)
    assert job.returncode == 128 + signal.SIGTERM
    assert not left.is_running() or left.status() == psutil.STATUS_ZOMBIE


def test_nobody_reads_what_the_command_prints(tmp_path: Path) -> None:
    """As in `ljperf run -- yes | head -1`: it is the command that gets the broken pipe, and its end is recorded."""
    job = start("run", "--", "yes", cwd=tmp_path)
    assert job.stdout is not None
    assert job.stdout.readline() == "y\n"
    job.stdout.close()
    assert job.stderr is not None
    job.stderr.close()
    assert job.wait(timeout=60) == 128 + signal.SIGPIPE
    assert record(tmp_path).reason == "killed by signal 13 (SIGPIPE)"


def test_streams_that_are_closed_from_the_start(tmp_path: Path) -> None:
    shell = f'exec {LJPERF} run -- sh -c "echo out; echo err >&2; touch started" >&- 2>&- <&-'
    code = subprocess.run(["sh", "-c", shell], cwd=tmp_path, env=environment(), timeout=60, check=False).returncode
    assert code == 0
    assert (tmp_path / "started").exists()
    assert record(tmp_path).status == "completed"


def test_a_command_that_removes_its_own_record_keeps_its_exit_code(tmp_path: Path) -> None:
    ran = ljperf("run", "--", "sh", "-c", "rm -r runs; exit 4", cwd=tmp_path)
    assert ran.returncode == 4
    assert "could not be closed: No such file or directory" in ran.stderr
    assert "Traceback" not in ran.stderr
