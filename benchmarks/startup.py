"""How long `ljperf --help` and `ljperf models` take, and what autoload adds to `import torch`.

torch loads backends in one call at the end of its import. Fresh processes import torch without it and then time that
call alone, once as installed and once with this project's entry point left out: the first is all that autoload adds,
torch's own search for entry points included, and the difference is this project's part. The whole import, with autoload
on and off in turn, is timed too; there a few milliseconds drown in the noise of a second.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from common import finish, interleaved, paired_difference, parser, rounds_of
from training_xpu.perf.statistics import estimate

LIMIT_COMMAND_S = 0.5
LIMIT_IMPORT_S = 0.005
LJPERF = str(Path(sys.executable).with_name("ljperf"))
IMPORT = "import time; t = time.perf_counter(); import torch; print(time.perf_counter() - t)"
CALL = "import time, torch; t = time.perf_counter(); torch._import_device_backends(); print(time.perf_counter() - t)"
WITHOUT_OURS = (
    "import importlib.metadata as m; found = m.entry_points; "
    "m.entry_points = lambda **k: [e for e in found(**k) if e.name != 'training_xpu']; "
)


def environment(**more: str) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith("TRAINING_XPU_") or k == "TRAINING_XPU_CACHE"}
    return {**kept, **more}


def command_seconds(*arguments: str) -> Callable[[], float]:
    def run() -> float:
        begun = time.perf_counter()
        subprocess.run([LJPERF, *arguments], env=environment(), check=True, stdout=subprocess.DEVNULL)
        return time.perf_counter() - begun

    return run


def import_seconds(autoload: str, code: str = IMPORT) -> Callable[[], float]:
    def run() -> float:
        done = subprocess.run(
            [sys.executable, "-c", code],
            env=environment(TORCH_DEVICE_BACKEND_AUTOLOAD=autoload),
            check=True,
            capture_output=True,
            text=True,
        )
        return float(done.stdout)

    return run


def main() -> int:
    options = parser(__doc__ or "", rounds=40, quick_rounds=10).parse_args()
    rounds = rounds_of(options)
    commands = interleaved({"--help": command_seconds("--help"), "models": command_seconds("models")}, rounds)
    imports = interleaved({"on": import_seconds("1"), "off": import_seconds("0")}, rounds)
    difference = paired_difference(imports["on"], imports["off"])
    calls = interleaved(
        {"with": import_seconds("0", CALL), "without ours": import_seconds("0", WITHOUT_OURS + CALL)}, rounds
    )
    added, ours = estimate(calls["with"]), paired_difference(calls["with"], calls["without ours"])
    document = {
        "ljperf_help_s": estimate(commands["--help"]).model_dump(),
        "ljperf_models_s": estimate(commands["models"]).model_dump(),
        "import_torch_s": {name: estimate(values).model_dump() for name, values in imports.items()},
        "whole_import_difference_s": difference.model_dump(),
        "autoload_adds_s": added.model_dump(),
        "of_which_ours_s": ours.model_dump(),
    }
    low, high = added.ci95
    slowest = max(estimate(values).median for values in commands.values())
    finish(
        options,
        document,
        f"autoload adds {added.median * 1e3:+.2f} ms to import torch (95 % {low * 1e3:+.2f} to {high * 1e3:+.2f}, "
        f"limit {LIMIT_IMPORT_S * 1e3:.0f}), of which this project's entry point {ours.median * 1e3:+.2f} ms; "
        f"ljperf --help {estimate(commands['--help']).median:.3f} s, models "
        f"{estimate(commands['models']).median:.3f} s (limit {LIMIT_COMMAND_S})",
    )
    return 0 if added.median < LIMIT_IMPORT_S and slowest < LIMIT_COMMAND_S else 1


if __name__ == "__main__":
    sys.exit(main())
