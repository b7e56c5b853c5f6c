"""What every test process, and what it starts, finds in its environment."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

# Models here are tiny: threads that spin for each other would be most of the time.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# DeepSpeed's native operations take minutes to build: once for all tests, and kept between sessions. With another ninja
# found first they would be built again.
TOOLS = str(Path(sys.executable).parent)
os.environ["PATH"] = os.pathsep.join([TOOLS, *os.environ.get("PATH", os.defpath).split(os.pathsep)])
os.environ["TORCH_EXTENSIONS_DIR"] = str(Path(__file__).parents[1] / ".pytest_cache" / "d" / "torch_extensions")

# A runner in the background (nohup, `&` in a script) has these ignored, and what it starts inherits that.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
signal.signal(signal.SIGQUIT, signal.SIG_DFL)
