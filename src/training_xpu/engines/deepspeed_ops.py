"""Builds DeepSpeed's native operations ahead, one process at a time: `python -m training_xpu.engines.deepspeed_ops`.

torch's extension builder leaves a file named `lock` behind when it is killed, and every later build or load waits on it
for ever. Here a kernel lock, which ends with its holder, guards the build, and whoever holds it removes what a killed
process left; a lock that is in use, by a rank of another job that loads the operations just now, stays.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import os
import sys
import threading
import time
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


def end_with(parent: int) -> None:
    """Ends this process and the compilers below it once the parent is gone, however it ended."""
    import psutil

    while os.getppid() == parent:
        time.sleep(1)
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()
    os._exit(1)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="training_xpu.engines.deepspeed_ops")
    parser.add_argument("extensions", type=Path)
    parser.add_argument("--parent", type=int, default=None, help="process that this build ends with")
    options = parser.parse_args(arguments)
    if options.parent is not None:
        threading.Thread(target=end_with, args=(options.parent,), daemon=True).start()
    print(" ".join(build_operations(options.extensions)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
