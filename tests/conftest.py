"""One thread per process: models here are tiny, and threads that spin for each other are most of the time otherwise."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
