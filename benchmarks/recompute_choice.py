"""Whether the chosen blocks are the right ones, and what the choice is worth.

Choice: for every configuration the peaks of all counts of recomputed blocks are measured, so that the smallest count
within a budget is known; it is compared with the count predicted without running (`predict_peaks`) and with the one
planned from a single measured step, as a running job does it. Configurations are a sample with a fixed seed.

Speed: one model, its arms taking turns step by step in one process: nothing recomputed, everything recomputed, what is
chosen where the budget lets half of the blocks be kept (with and without the selective mode), and transformers' own
`every_n_layers` at its best count within that budget. In bf16 where the CPU has kernels for it, else in fp32.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from common import finish, paired_ratio, parser, rounds_of
from memory_cases import Case, config_of, sample
from training_xpu import device
from training_xpu.blocks import find_blocks
from training_xpu.recompute.budget import Budget
from training_xpu.recompute.online.amounts import BatchShape
from training_xpu.recompute.online.controller import Controller
from training_xpu.recompute.online.measure import StepMeasurement
from training_xpu.recompute.online.overhead import Overhead
from training_xpu.recompute.online.plan import Planner
from training_xpu.recompute.online.profile import MemoryProfile
from training_xpu.recompute.prediction.predict import predict_peaks
from training_xpu.recompute.prediction.setting import TrainingSetting
from training_xpu.recompute.switching.switch import BlockSwitch, Mode
from training_xpu.workloads.live_bytes import measure_live_bytes

CHOICES_LIMIT = 0.95
FULL_LIMIT = 1.12
BUDGETS_PER_CASE = 4
LEAST_EFFECT = 1.02  # cases whose peak recompute hardly changes have no right count
CASES, QUICK_CASES = 10, 3
DTYPE = "bf16" if device.has_bf16_kernels() else "fp32"


class Job:
    """A model that can be trained step by step with any modes of its blocks."""

    def __init__(self, config: Any, batch: BatchShape, dtype: str) -> None:
        torch.manual_seed(0)
        self.model: Any = AutoModelForCausalLM.from_config(config)
        self.model.config.use_cache = False
        self.model.train()
        self.batch = batch
        self.dtype = dtype
        self.blocks = [block for group in find_blocks(self.model) for block in group.modules]
        self.switch = BlockSwitch(self.model, self.blocks)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), fused=True)
        self.tokens = torch.randint(0, config.vocab_size, tuple(batch))

    def step(self) -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=self.dtype == "bf16"):
            loss = self.model(input_ids=self.tokens, labels=self.tokens).loss
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def first(self, count: int) -> tuple[Mode, ...]:
        return tuple(Mode.RECOMPUTE if i < count else Mode.KEEP for i in range(len(self.blocks)))

    def peak(self, modes: tuple[Mode, ...]) -> int:
        self.switch.apply(modes)
        self.step()
        return measure_live_bytes(self.step).peak_bytes

    def profile(self) -> MemoryProfile:
        """What one step with everything recomputed tells."""
        self.switch.apply(self.first(len(self.blocks)))
        self.step()
        measurement = StepMeasurement(self.model, self.blocks)
        self.switch.listener = measurement
        self.switch.measuring = True
        measurement.start()
        measurement.begin_micro_batch(self.batch)
        self.step()
        measured = measurement.stop()
        self.switch.listener = None
        self.switch.measuring = False
        assert measured is not None
        return MemoryProfile(measured)

    def planner(self, budget: int, offered: frozenset[Mode]) -> Planner:
        """Plans in live bytes of this job: what else is alive in this process is taken off."""
        count = len(self.blocks)
        everything = self.first(count)
        real, profile = self.peak(everything), self.profile()
        rest = Overhead(profile.peak(everything, self.batch), real, 0.0)
        return Planner(profile, rest, budget, [offered] * count, ["block"] * count)


def choices(cases: list[Case], most: int) -> list[dict[str, Any]]:
    chance = random.Random(1)
    rows = []
    for case in cases:
        if len(rows) == most * BUDGETS_PER_CASE:
            break
        job = Job(config_of(case), BatchShape(case.batch, case.sequence), case.dtype)
        real = [job.peak(job.first(n)) for n in range(len(job.blocks) + 1)]
        if max(real) < LEAST_EFFECT * min(real):
            continue
        with torch.device("meta"):
            empty = AutoModelForCausalLM.from_config(config_of(case))
        setting = TrainingSetting(
            batch_size=case.batch,
            sequence_length=case.sequence,
            dtype=case.dtype,  # type: ignore[arg-type]
        )
        prediction = predict_peaks(empty, setting)
        for _ in range(BUDGETS_PER_CASE):
            budget = chance.randint(min(real), max(real))
            right = next(n for n, peak in enumerate(real) if peak <= budget)
            planned = job.planner(budget, frozenset({Mode.KEEP, Mode.RECOMPUTE})).plan_for(job.batch)
            offline = prediction.fewest_recomputed(budget)
            rows.append(
                {
                    **case.as_dict(),
                    "budget": budget,
                    "right": right,
                    "planned": planned.recomputed,
                    "planned_fits": job.peak(planned.modes) <= budget,
                    "predicted": len(job.blocks) if offline is None else offline,
                }
            )
        last = rows[-BUDGETS_PER_CASE:]
        told = ", ".join(f"{r['right']}/{r['planned']}/{r['predicted']}" for r in last)
        print(
            f"{case.family:7} {case.dtype} L{case.layers} h{case.width} B{case.batch} S{case.sequence}: "
            f"right/planned/predicted {told} of {len(job.blocks)}",
            file=sys.stderr,
        )
    return rows


def speed(rounds: int, layers: int = 8) -> dict[str, list[float]]:
    """Seconds per step of every arm, round by round."""
    config = LlamaConfig(
        num_hidden_layers=layers,
        hidden_size=512,
        intermediate_size=1536,
        num_attention_heads=8,
        num_key_value_heads=4,
        vocab_size=2048,
    )
    job = Job(config, BatchShape(2, 512), DTYPE)
    both = frozenset({Mode.KEEP, Mode.RECOMPUTE})
    job.step()
    budget = round(job.peak(job.first(layers // 2)) * 1.002)
    planned = job.planner(budget, both).plan_for(job.batch).modes
    mixed = job.planner(budget, both | {Mode.SELECTIVE}).plan_for(job.batch).modes
    every = next(
        modes
        for n in range(layers, 0, -1)
        if job.peak(modes := tuple(Mode.RECOMPUTE if i % n == 0 else Mode.KEEP for i in range(layers))) <= budget
    )
    arms = {
        "none": job.first(0),
        "full": job.first(layers),
        "chosen": planned,
        "chosen, selective too": mixed,
        "every_n_layers": every,
    }
    print({name: [mode.value for mode in modes] for name, modes in arms.items()}, file=sys.stderr)
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    names = list(arms)
    for number in range(rounds + 1):
        for name in names[:: 1 if number % 2 else -1]:
            job.switch.apply(arms[name])
            begun = time.perf_counter()
            job.step()
            if number:
                seconds[name].append(time.perf_counter() - begun)
    job.switch.restore()
    return {**seconds, **controlled(job, rounds)}


def controlled(job: Job, rounds: int) -> dict[str, list[float]]:
    """Steps of a job whose budget is ample, in the steady state of the controller and without it, in turn."""
    controller = Controller(job.model, Budget(2**40, "ample"))
    for _ in range(4):
        job.step()
        controller.after_step()
    spent: list[float] = []
    before = controller._before_forward

    def timed(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            begun = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                spent.append(time.perf_counter() - begun)

        return call

    controller._handles[0].remove()
    pre = job.model.register_forward_pre_hook(timed(before), with_kwargs=True)
    shares = []
    for _ in range(rounds):
        spent.clear()
        begun = time.perf_counter()
        job.step()
        after = time.perf_counter()
        controller.after_step()
        total = time.perf_counter() - begun
        shares.append((sum(spent) + time.perf_counter() - after) / total)
    pre.remove()
    controller.close()
    return {"share of a step that the controller takes": shares}


def main() -> int:
    options = parser(__doc__ or "", rounds=20, quick_rounds=4).parse_args()
    quick = options.quick
    cases = [case if DTYPE == "bf16" else replace(case, dtype=DTYPE) for case in sample(60) if case.layers > 2]
    rows = choices(cases, QUICK_CASES if quick else CASES)
    seconds = speed(rounds_of(options))
    right = sum(row["planned"] == row["right"] for row in rows)
    predicted = sum(row["predicted"] == row["right"] for row in rows)
    furthest = max(abs(row[key] - row["right"]) for row in rows for key in ("planned", "predicted"))
    over = sum(not row["planned_fits"] for row in rows)
    ratios = {
        name: paired_ratio(seconds[base], seconds[name])
        for name, base in (("chosen", "full"), ("chosen, selective too", "full"), ("every_n_layers", "full"))
    }
    against_hf = paired_ratio(seconds["every_n_layers"], seconds["chosen, selective too"])
    share = sorted(seconds["share of a step that the controller takes"])[len(seconds["none"]) // 2]

    def told(name: str) -> str:
        low, high = ratios[name].ci95
        return f"{ratios[name].median:.3f} ({low:.3f}-{high:.3f})"

    low, high = against_hf.ci95
    finish(
        options,
        {"choices": rows, "seconds": seconds},
        f"{len(rows)} choices: planned right in {right}, predicted right in {predicted}, at most {furthest} away, "
        f"{over} over the budget; against full recompute at a budget for half of the blocks: chosen {told('chosen')}, "
        f"with the selective mode {told('chosen, selective too')}, every_n_layers {told('every_n_layers')}; against "
        f"every_n_layers {against_hf.median:.3f} ({low:.3f}-{high:.3f}); the controller takes {share:.3%} of a step",
    )
    good = right >= CHOICES_LIMIT * len(rows) and furthest <= 1 and over == 0
    return 0 if good and ratios["chosen, selective too"].ci95[1] >= FULL_LIMIT and share < 0.005 else 1


if __name__ == "__main__":
    sys.exit(main())
