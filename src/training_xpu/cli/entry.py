"""What the command `ljperf` calls: small, so that a Ctrl-C while everything else is imported is answered in a line."""

from __future__ import annotations

import sys


def main() -> int:
    try:
        from training_xpu.cli.main import run

        return run()
    except KeyboardInterrupt:
        print("ljperf: interrupted", file=sys.stderr)
        return 130
