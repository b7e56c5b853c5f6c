"""One job at a time in a folder of checkpoints: a kernel lock on a file in it, which ends with its holder.

So nothing is left behind by a process that was killed, whatever became of its process id. A file system that knows no
locks guards nothing; there the folder is used as if it were free.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from training_xpu.device.processes import host_id
from training_xpu.errors import UserError
from training_xpu.records import Record

OWNER_FILE = ".owner.json"
_NO_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)


class OwnerRecord(Record):
    """Who uses the folder."""

    host: str  # `device.processes.host_id`
    pid: int
    job: str  # the same on all nodes of one job; "" for a job on a single node


@contextlib.contextmanager
def owning(folder: Path, job: str) -> Iterator[None]:
    """Holds the folder, which is made if need be; the nodes of one job hold it together.

    Raises:
        UserError: another job holds it, or it cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = _take(folder, job)
    except OSError as error:
        raise UserError(
            f"--save {folder}: cannot be written: {error.strerror}", "Choose another folder, or mend its rights."
        ) from error
    try:
        yield
    finally:
        if lock is not None:
            (folder / OWNER_FILE).unlink(missing_ok=True)
            os.close(lock)


def _take(folder: Path, job: str) -> int | None:
    """The descriptor that holds the lock; None for a node whose job holds it already, and where there are no locks."""
    file = folder / OWNER_FILE
    while True:
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            owner = _read(descriptor)
            os.close(descriptor)
            if error.errno in _NO_LOCKS or (owner is not None and job and owner.job == job):
                return None
            if error.errno not in (errno.EAGAIN, errno.EACCES):
                raise
            raise _in_use(folder, owner) from error
        if _is_still(file, descriptor):
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, OwnerRecord(host=host_id(), pid=os.getpid(), job=job).to_json().encode(), 0)
            return descriptor
        os.close(descriptor)  # its holder removed it between our opening and our locking it


def _is_still(file: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(file.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _read(descriptor: int) -> OwnerRecord | None:
    try:
        return OwnerRecord.model_validate_json(os.pread(descriptor, 1 << 16, 0))
    except ValueError:
        return None  # just being written


def _in_use(folder: Path, owner: OwnerRecord | None) -> UserError:
    by = ""
    if owner is not None:
        by = f", by process {owner.pid}" + ("" if owner.host == host_id() else " of another host")
    return UserError(
        f"--save {folder}: in use by another run{by}", "Wait until it has ended, or choose another folder."
    )
