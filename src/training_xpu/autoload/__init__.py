"""What happens at the end of `import torch` (entry point group `torch.backends`).

With no variable set it costs next to nothing, hence the glance at `os.environ` here, the only one outside `envs`. A
fault is one line on stderr: training goes on without the feature.
"""

import os
import sys


def autoload() -> None:
    """Called by torch at the end of its import."""
    if not any(name.startswith(("TRAINING_XPU_", "CHECKPOINT_OPTIMIZATION")) for name in os.environ):
        return
    try:
        from training_xpu.autoload import startup

        startup.start()
    except Exception as error:
        reason = (str(error).splitlines() or [repr(error)])[0]
        print(f"training-xpu: switched off: {reason}", file=sys.stderr)
