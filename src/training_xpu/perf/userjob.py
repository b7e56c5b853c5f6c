"""`ljperf run`: the user's own command with features on, as transparent as if it had been started without us."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import shlex
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from training_xpu import envs, features, report
from training_xpu.errors import ExitCode, UserError, nearest
from training_xpu.perf import store
from training_xpu.perf.explain import FeatureOutcome, asked_in, outcomes
from training_xpu.perf.failures import killed_by
from training_xpu.perf.records import RUN_FILE, RunRecord
from training_xpu.report_lines import ReportLine

_ENDING = frozenset({signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT})
_FORWARDED = _ENDING | {signal.SIGUSR1, signal.SIGUSR2}
_SENT_BY_KERNEL = 0x80  # SI_KERNEL: a terminal's Ctrl-C, which reaches the whole foreground group by itself
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h
_GRACE_SECONDS = 5.0
_KILLING_TERMINATION = 3  # so many SIGTERMs and a command that ignores them is killed


@dataclass(frozen=True)
class UserJobResult:
    folder: Path
    exit_code: int  # the command's own; 128 + n where signal n ended it
    features: list[FeatureOutcome]

    @property
    def missed(self) -> list[FeatureOutcome]:
        """Features asked for with `true` that did not apply."""
        return [f for f in self.features if f.asked != "auto" and f.outcome != "applied"]

    @property
    def final_exit_code(self) -> int:
        """The command's own code, or 3 where the command succeeded without a feature that was asked for."""
        return int(ExitCode.CANNOT_RUN) if self.exit_code == 0 and self.missed else self.exit_code


def check_command(command: list[str]) -> None:
    """
    Raises:
        UserError: there is no command, or its program is not there or cannot be executed.
    """
    if not command:
        raise UserError("no command", "Such as: ljperf run -- python train.py")
    program = command[0]
    if shutil.which(program) is not None:
        return
    path = Path(program)
    if path.is_dir():
        raise UserError(f"{program} is a folder", "Name a program, such as: ljperf run -- python train.py")
    if path.is_file():
        runner = "python " if path.suffix == ".py" else "sh "
        raise UserError(f"{program} is not executable", f"Such as: ljperf run -- {runner}{shlex.join(command)}")
    if "/" in program:
        siblings = [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else []
        raise UserError(f"{program} does not exist", _did_you_mean(path.name, siblings))
    raise UserError(f"command not found: {program}", _did_you_mean(program, _programs()))


def _did_you_mean(name: str, known: list[str]) -> str:
    hint = nearest(name, known, likeness=0.75)
    return hint if hint.startswith("Did you mean") else "Check the spelling, or give the whole path."


def _programs() -> list[str]:
    """Names of everything on PATH."""
    names: list[str] = []
    for folder in envs.snapshot().get("PATH", os.defpath).split(os.pathsep):
        try:
            names.extend(entry.name for entry in os.scandir(folder or "."))
        except OSError:
            continue
    return names


def settings_for(features_on: list[str] | None, run_folder: Path) -> dict[str, str]:
    """The variables to set for the command.

    Args:
        features_on: None leaves the choice of features to the variables that the user has set.

    Raises:
        UserError: a feature is unknown, or features are asked for while the package is switched off.
    """
    if features_on and envs.disabled():
        raise UserError("TRAINING_XPU_DISABLE is set, so no feature can apply", "Unset it, or leave --features out.")
    chosen = {} if features_on is None else features.environment_for(features_on)
    return {**chosen, "TRAINING_XPU_REPORT": str(run_folder / report.FOLDER_NAME)}


def asked_features(features_on: list[str] | None) -> dict[str, str]:
    """Feature -> true or auto.

    Raises:
        UserError: a variable of the user's environment holds something it cannot mean.
    """
    if features_on is not None:
        return dict.fromkeys(features_on, "true")
    wanted = {f.name: envs.asked(f.variable) for f in features.known()}
    return {name: value for name, value in wanted.items() if value in ("true", "auto")}


def dry_run(command: list[str], features_on: list[str] | None, runs_folder: Path) -> str:
    """The environment and the command, as a shell would take them."""
    check_command(command)
    settings = settings_for(features_on, runs_folder / "RUN")
    return "\n".join([*(f"{name}={shlex.quote(value)} \\" for name, value in settings.items()), shlex.join(command)])


def run_user_job(command: list[str], features_on: list[str] | None, runs_folder: Path) -> UserJobResult:
    """Runs the command to its end and keeps a record of it.

    Raises:
        UserError: the command or a feature is unknown, or the record's folder cannot be made; nothing has started then.
    """
    check_command(command)
    asked = asked_features(features_on)
    arm = "+".join(name for name, value in asked.items() if value == "true") or "base"
    settings_for(features_on, runs_folder)  # what is wrong shows before a folder is made
    folder = store.create_run(runs_folder, f"command/{_program_name(command)}", arm)
    settings = settings_for(features_on, folder)
    record = RunRecord(
        name=folder.name,
        created=datetime.now(UTC),
        command=command,
        workload=f"command/{_program_name(command)}",
        arm=arm,
        features=[name for name, value in asked.items() if value == "true"],
        environment=settings,
        **store.owner(),
    )
    with _signals_held() as mask:
        record.write(folder / RUN_FILE)
        try:
            ended = supervise(command, envs.child_environment(settings), mask)
        except OSError as error:
            ended = Ended(CANNOT_EXECUTE, f"cannot be executed: {error.strerror}")
            report.logger.warning("%s cannot be executed: %s", command[0], error.strerror)
        found = _close(record, folder, ended, asked)
    return UserJobResult(folder, ended.exit_code, found)


def _close(record: RunRecord, folder: Path, ended: Ended, asked: dict[str, str]) -> list[FeatureOutcome]:
    """Writes the record for good. The job itself is done: trouble here must not turn its exit code into another."""
    lines: list[ReportLine] = []
    try:
        lines = list(report.read(folder / report.FOLDER_NAME))
    except OSError as error:
        report.logger.warning("the reports in %s cannot be read: %s", folder, error.strerror)
    record.finished = datetime.now(UTC)
    record.status = "interrupted" if ended.interrupted_by else "completed" if ended.exit_code == 0 else "failed"
    record.reason = ended.reason
    record.feature_reports = [line.model_dump(mode="json", by_alias=True) for line in lines if line.feature]
    try:
        record.write(folder / RUN_FILE)
    except OSError as error:
        report.logger.warning("the record in %s could not be closed: %s", folder, error.strerror)
    return outcomes(lines, {**asked_in(lines), **asked})


def _program_name(command: list[str]) -> str:
    """What people would call the job: the script, or else the program."""
    script = next((word for word in command if word.endswith(".py")), command[0])
    return Path(script).name


CANNOT_EXECUTE = 126  # what a shell answers


@dataclass(frozen=True)
class Ended:
    """How a supervised command ended."""

    exit_code: int
    reason: str = ""  # "" for exit code 0
    interrupted_by: str = ""  # name of the signal that asked us to end it


@contextlib.contextmanager
def _signals_held() -> Iterator[set[int | signal.Signals]]:
    """From the first word of the record to its last no signal ends us; gives the mask that was in force before.

    What comes after the command has ended is dropped: there is nobody left to pass it on to.
    """
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, _FORWARDED)
    try:
        yield mask
    finally:
        while signal.sigtimedwait(_FORWARDED, 0) is not None:
            continue
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def supervise(command: list[str], environment: dict[str, str], mask: set[int | signal.Signals]) -> Ended:
    """Runs a command in our place: same terminal, same streams; signals sent to us are passed on.

    The command stays in our process group, so that it may read from the terminal. A Ctrl-C typed there reaches it by
    itself and is not passed on a second time, unless the command has left the group. Signals that we were started to
    ignore, as under nohup, are ignored. Whoever asks with SIGTERM a third time wants the command killed. After a signal
    that ended the job, whatever the command left behind is ended too; after an ordinary end it is left alone, as a
    shell would. If we are killed, the command gets SIGTERM.

    Args:
        mask: the signal mask the command gets; here all signals that are passed on are blocked.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    passed_on = {number for number in _FORWARDED if signal.getsignal(number) is not signal.SIG_IGN}
    watched = passed_on | {signal.SIGCHLD}
    child_handler = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    interrupted_by = ""
    terminations = 0
    try:
        child = subprocess.Popen(
            command, env=environment, preexec_fn=functools.partial(_prepare_child, libc.prctl, mask, os.getpid())
        )
        while (status := _reap(child.pid)) is None:
            told = signal.sigwaitinfo(watched)
            number = signal.Signals(told.si_signo)
            if number not in passed_on:
                continue
            if number in _ENDING:
                interrupted_by = number.name
            terminations += number == signal.SIGTERM
            if terminations >= _KILLING_TERMINATION:
                os.kill(child.pid, signal.SIGKILL)
            elif told.si_code != _SENT_BY_KERNEL or os.getpgid(child.pid) != os.getpgrp():
                os.kill(child.pid, number)
        child.returncode = os.waitstatus_to_exitcode(status)
        if interrupted_by:
            _end_descendants()
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD} - mask)
        signal.signal(signal.SIGCHLD, child_handler)
        libc.prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
    code = child.returncode
    if code >= 0:
        return Ended(code, "" if code == 0 else f"exit code {code}", interrupted_by)
    return Ended(128 - code, killed_by(-code), interrupted_by)


def _prepare_child(prctl: Callable[..., int], mask: set[int | signal.Signals], parent: int) -> None:
    """Runs between fork and exec."""
    prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _reap(pid: int) -> int | None:
    """Collects all children that have ended, adopted orphans among them; the wait status of `pid` once it is one."""
    status = None
    while True:
        try:
            ended, ended_status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return status
        if ended == 0:
            return status
        if ended == pid:
            status = ended_status


def _end_descendants() -> None:
    import psutil

    left = psutil.Process().children(recursive=True)
    for process in left:
        _quietly(process.terminate)
    _, stubborn = psutil.wait_procs(left, timeout=_GRACE_SECONDS)
    for process in stubborn:
        _quietly(process.kill)
    psutil.wait_procs(stubborn, timeout=_GRACE_SECONDS)


def _quietly(action: Callable[[], None]) -> None:
    import psutil

    with contextlib.suppress(psutil.Error):
        action()
