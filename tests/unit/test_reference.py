"""The committed reference pages are the ones that the code makes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_pages_are_up_to_date() -> None:
    command = [sys.executable, str(ROOT / "scripts" / "make_reference.py"), "--check"]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
