"""Around everything that is saved: a save that fails leaves nothing half written, and a full disk is named."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from training_xpu.errors import JobFailed

FULL_DISK_BYTES = 1 << 20  # with less free, a write that failed has failed for lack of space
GIVEN_UP = "another rank gave up saving"  # known to `process.is_lost_peer`


@contextlib.contextmanager
def saving(what: str, folder: Path, staging: Path, remedy: str) -> Iterator[None]:
    """Removes what was half written when the body fails, and names a full disk; every rank that writes enters it.

    Removing it at once makes room for the words of the rank that failed, since its record is often on the same disk.

    Args:
        what: is saved, such as "the checkpoint of step 4".
        folder: where it would have been.
        staging: where it is being written.
        remedy: beside freeing space, such as "or choose another folder with --save."

    Raises:
        JobFailed: there was no space left, or another rank has given up; other errors are passed on as they are.
    """
    try:
        yield
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # torch's CheckpointException is no Exception
        full = is_out_of_space(error, folder)
        missing = isinstance(error, FileNotFoundError) or "does not exist" in str(error)  # the words of torch.save
        given_up = missing and not staging.exists()
        _remove(staging)
        if full:
            raise JobFailed(f"No space left in {folder} for {what}", f"Free space, {remedy}") from error
        if given_up:
            raise JobFailed(f"{GIVEN_UP} {what}") from error
        raise


def _remove(staging: Path) -> None:
    """Frees the room at once: the error still refers to writers that hold their files open."""
    for file in staging.rglob("*"):
        with contextlib.suppress(OSError):  # folders among others
            os.truncate(file, 0)
    shutil.rmtree(staging, ignore_errors=True)


def is_out_of_space(error: BaseException, folder: Path) -> bool:
    """Whether an error comes from a full disk or quota; what raises in the end often does not say so itself."""
    link: BaseException | None = error
    while link is not None:
        text = str(link).lower()
        if isinstance(link, OSError) and link.errno in (errno.ENOSPC, errno.EDQUOT):
            return True
        if any(words in text for words in ("no space left", "quota exceeded", "storagefull")):
            return True
        link = link.__cause__ or link.__context__
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return shutil.disk_usage(folder).free < FULL_DISK_BYTES
