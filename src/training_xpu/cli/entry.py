"""What the command `ljperf` calls: small, so that a Ctrl-C while everything else is imported is answered in a line."""

from __future__ import annotations

import contextlib
import os
import sys


def main() -> int:
    try:
        from training_xpu.cli.main import run

        return run()
    except KeyboardInterrupt:
        print("ljperf: interrupted", file=sys.stderr)
        return 130
    finally:
        _let_go_of_broken_streams()


def _let_go_of_broken_streams() -> None:
    """What a reader that has left did not take must not change the exit code: the interpreter would end with 120."""
    for number, stream in ((1, sys.stdout), (2, sys.stderr)):
        try:
            stream.flush()
        except ValueError:  # closed
            continue
        except OSError:
            with contextlib.suppress(OSError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), number)
