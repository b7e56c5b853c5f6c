"""Errors a person can act on, and the exit codes of the command line."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from enum import IntEnum


class ExitCode(IntEnum):
    """What `ljperf` answers to the shell."""

    DONE = 0
    FAILED = 1  # the job, an arm, a check or a gate failed
    USAGE = 2  # wrong usage or input
    CANNOT_RUN = 3  # cannot run here, or a feature asked for stepped aside
    INTERRUPTED = 130


class UserError(Exception):
    """Something the user can mend: one line that says what is wrong, one that says what to do."""

    exit_code: ExitCode = ExitCode.USAGE

    def __init__(self, problem: str, remedy: str = "") -> None:
        super().__init__(f"{problem}\n{remedy}" if remedy else problem)
        self.problem = problem
        self.remedy = remedy


class JobFailed(UserError):
    """The job itself failed, after it had started."""

    exit_code = ExitCode.FAILED


class CannotRunHere(UserError):
    """This machine or this installation lacks what the request needs."""

    exit_code = ExitCode.CANNOT_RUN


def nearest(name: str, known: Iterable[str], limit: int = 3, likeness: float = 0.5) -> str:
    """A remedy line for an unknown name: the nearest known ones, or all of them when nothing is near.

    Args:
        name: what the user wrote.
        known: the names that would have been right.
        limit: how many near names to offer.
        likeness: of a name that is near, 0 to 1; more where there are so many names that some is near any word.
    """
    names = sorted(set(known))
    by_lower = {n.lower(): n for n in names}
    close = difflib.get_close_matches(name.lower(), list(by_lower), n=limit, cutoff=likeness)
    if close:
        return "Did you mean " + " or ".join(by_lower[c] for c in close) + "?"
    return "Known: " + ", ".join(names)
