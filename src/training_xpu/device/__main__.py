"""`python -m training_xpu.device`: asks this process's torch about the machine, and measures peaks."""

from __future__ import annotations

import argparse
import sys

from training_xpu.device import peaks
from training_xpu.errors import UserError


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m training_xpu.device", description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")
    parser.add_argument("--dtype", action="append", choices=peaks.DTYPES, help="this one only; may be repeated")
    parser.add_argument("--no-peaks", action="store_true", help="measure nothing")
    given = parser.parse_args(arguments)
    try:
        document = peaks.answer([] if given.no_peaks else given.dtype or peaks.DTYPES)
    except UserError as error:
        print(f"{error.problem}\n{error.remedy}".strip(), file=sys.stderr)
        return int(error.exit_code)
    if given.json:
        print(document.to_json(indent=2))
        return 0
    view = document.view
    print(f"device: {view.kind}" + "".join(f"\n  {a.index}: {a.name}" for a in view.accelerators))
    print(f"dtypes: {', '.join(view.dtypes)}")
    for peak in document.peaks:
        print(f"peak {peak.dtype}: {peak.flops / 1e12:.3f} TFLOP/s ({peak.source})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
