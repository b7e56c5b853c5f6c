"""Builds DeepSpeed's native operations ahead, one process at a time: `python -m training_xpu.engines.deepspeed_ops`.

torch's extension builder leaves a file named `lock` behind when it is killed, and every later build or load waits on it
for ever. Here a kernel lock, which ends with its holder, guards the build, and whoever holds it removes what a killed
process left; a lock that is in use, by a rank of another job that loads the operations just now, stays.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import sys
from pathlib import Path


def build_operations(extensions: Path) -> list[str]:
    """Builds what training on this device uses; names of operations that could not be built are returned.

    Args:
        extensions: torch's extension folder of this process (TORCH_EXTENSIONS_DIR).
    """
    extensions.mkdir(parents=True, exist_ok=True)
    with (extensions / ".training-xpu-build").open("w") as guard:
        fcntl.flock(guard, fcntl.LOCK_EX)
        for lock in extensions.rglob("lock"):
            if not is_open(lock):
                lock.unlink(missing_ok=True)
        return [name for name in ("FusedAdamBuilder", "ShareMemCommBuilder") if not _builds(name)]


def is_open(file: Path) -> bool:
    """Whether a process of this machine, as far as this user sees, has the file open; torch's builder has its lock."""
    try:
        wanted = file.stat()
    except OSError:
        return False
    for descriptor in Path("/proc").glob("[0-9]*/fd/*"):
        with contextlib.suppress(OSError):
            if os.path.samestat(descriptor.stat(), wanted):
                return True
    return False


def _builds(builder_name: str) -> bool:
    from deepspeed.accelerator import get_accelerator

    builder = get_accelerator().create_op_builder(builder_name)
    if builder is None or type(builder).__name__ == "NotImplementedBuilder":
        return True  # this device has no such operation
    try:
        builder.load(verbose=False)
    except Exception as error:  # no compiler, a compiler error, a library that does not load
        print(f"{builder_name}: {error}", file=sys.stderr)
        return False
    return True


if __name__ == "__main__":
    failed = build_operations(Path(sys.argv[1]))
    print(" ".join(failed))
