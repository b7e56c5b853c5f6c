"""The chunked head and cross-entropy against the plain one, forward and backward.

Arms, taking turns round by round: the head's linear layer, its logits in fp32 and cross-entropy as transformers does it
(`plain`); `linear_cross_entropy` (`ours`). Cases: vocabularies of 8192, 32000 and 128256 entries in bf16 and fp32
weights, width 1024, 2048 rows of which one in ten is ignored; with --quick half the rows. For each the time of one step
and the most bytes of tensors that were alive beyond hidden states, weight and their gradients.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from common import finish, interleaved, paired_ratio, parser, rounds_of
from training_xpu.compiler.loss.linear_cross_entropy import linear_cross_entropy
from training_xpu.perf.statistics import estimate
from training_xpu.workloads.live_bytes import measure_live_bytes

VOCABULARIES = (8192, 32000, 128256)
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
WIDTH, ROWS, QUICK_ROWS = 1024, 2048, 1024
IGNORED = 0.1


class Head:
    """One head with its input, in one dtype."""

    def __init__(self, vocabulary: int, rows: int, dtype: torch.dtype) -> None:
        generator = torch.Generator().manual_seed(0)
        self.hidden = torch.randn(rows, WIDTH, generator=generator).to(dtype).requires_grad_()
        self.weight = torch.randn(vocabulary, WIDTH, generator=generator).mul_(0.02).to(dtype).requires_grad_()
        labels = torch.randint(0, vocabulary, (rows,), generator=generator)
        self.labels = labels.masked_fill(torch.rand(rows, generator=generator) < IGNORED, -100)

    def plain(self) -> torch.Tensor:
        return F.cross_entropy(F.linear(self.hidden, self.weight).float(), self.labels)

    def ours(self) -> torch.Tensor:
        return linear_cross_entropy(self.hidden, self.weight, None, self.labels)

    def step(self, loss: Callable[[], torch.Tensor]) -> None:
        self.hidden.grad = self.weight.grad = None
        loss().backward()

    def seconds(self, loss: Callable[[], torch.Tensor]) -> Callable[[], float]:
        def run() -> float:
            begun = time.perf_counter()
            self.step(loss)
            return time.perf_counter() - begun

        return run

    def extra_bytes(self, loss: Callable[[], torch.Tensor]) -> int:
        self.hidden.grad = self.weight.grad = None
        own = 2 * (self.hidden.nbytes + self.weight.nbytes) + self.labels.nbytes
        return max(0, measure_live_bytes(lambda: self.step(loss)).peak_bytes - own)


def measure(vocabulary: int, rows: int, name: str, rounds: int) -> dict[str, Any]:
    head = Head(vocabulary, rows, DTYPES[name])
    arms = {"plain": head.plain, "ours": head.ours}
    extra = {arm: head.extra_bytes(loss) for arm, loss in arms.items()}
    with torch.no_grad():
        difference = abs(float(head.ours()) - float(head.plain()))
    seconds = interleaved({arm: head.seconds(loss) for arm, loss in arms.items()}, rounds)
    gain = paired_ratio(seconds["plain"], seconds["ours"])
    low, high = gain.ci95
    print(
        f"V {vocabulary} {name}, {rows} rows: {gain.median:.2f} times as fast ({low:.2f}-{high:.2f}), extra memory "
        f"{extra['ours'] / 2**20:.0f} MiB instead of {extra['plain'] / 2**20:.0f} MiB",
        file=sys.stderr,
    )
    return {
        "vocabulary": vocabulary,
        "dtype": name,
        "rows": rows,
        "seconds": seconds,
        "extra_bytes": extra,
        "loss_difference": difference,
        "gain": gain.median,
        "gain_ci95": list(gain.ci95),
    }


def main() -> int:
    options = parser(__doc__ or "", rounds=12, quick_rounds=3).parse_args()
    rows = QUICK_ROWS if options.quick else ROWS
    cases = [measure(v, rows, name, rounds_of(options)) for v in VOCABULARIES for name in DTYPES]
    # One ratio of all cases' times for each round, so that the interval knows how rounds differ.
    totals = []
    for number in range(rounds_of(options)):
        product = 1.0
        for case in cases:
            product *= case["seconds"]["plain"][number] / case["seconds"]["ours"][number]
        totals.append(product ** (1 / len(cases)))
    gain = estimate(totals)
    low, high = gain.ci95
    share = max(case["extra_bytes"]["ours"] / case["extra_bytes"]["plain"] for case in cases)
    slowest = min(cases, key=lambda case: case["gain"])
    finish(
        options,
        {"cases": cases},
        f"chunked loss, head forward and backward: {gain.median:.2f} times as fast as the plain one "
        f"({low:.2f}-{high:.2f}), geometric mean of {len(cases)} cases; least {slowest['gain']:.2f} "
        f"(V {slowest['vocabulary']}, {slowest['dtype']}); extra memory at most {share:.0%} of the plain one's",
    )
    return 0 if low >= 1.0 else 1


if __name__ == "__main__":
    sys.exit(main())
