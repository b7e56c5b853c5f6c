"""Breaks one rank of a job at a chosen moment, from outside: no line of the project knows of it.

TRAINING_TEST_FAULT is `rank:moment:step:fault`, such as `1:step:2:raise`. The moment is `step`, after the record of
that step was written, or `save`, before the checkpoint of that step is marked complete. TRAINING_TEST_HELD is the file
that `hold` makes before it waits for ever.
"""

import importlib.abc
import importlib.util
import os
import resource
import signal
import sys
import time
from pathlib import Path

PATCHED = {"step": "training_xpu.workloads.metrics", "save": "training_xpu.workloads.checkpoint"}


def strike(fault):
    import torch

    if fault == "raise":
        raise ValueError("the rank was told to fail")
    if fault == "hold":
        Path(os.environ["TRAINING_TEST_HELD"]).touch()
        while True:
            time.sleep(60)
    if fault in ("SIGKILL", "SIGSEGV"):
        os.kill(os.getpid(), getattr(signal, fault))
    if fault == "limit":
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20), -1))
        torch.ones(1 << 28)  # 1 GiB
    if fault == "hog":
        hoard = []
        while True:
            hoard.append(torch.ones(1 << 26))  # 256 MiB
    if fault == "leave":  # the others lose this rank before it says why
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        torch.distributed.destroy_process_group()
        time.sleep(2)
        raise ValueError("the rank that had left")


class PatchOnImport(importlib.abc.MetaPathFinder):
    def __init__(self, name, patch):
        self.name, self.patch = name, patch

    def find_spec(self, name, path=None, target=None):
        if name != self.name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            self.patch(module)

        spec.loader.exec_module = exec_module
        return spec


def patch_steps(metrics, wanted, fault):
    finish = metrics.StepMeter.finish

    def finish_and_strike(self, step, *arguments, **keywords):
        record = finish(self, step, *arguments, **keywords)
        if step == wanted:
            strike(fault)
        return record

    metrics.StepMeter.finish = finish_and_strike


def patch_saves(checkpoint, wanted, fault):
    complete = checkpoint.complete

    def strike_or_complete(checkpoints, step, *arguments, **keywords):
        if step == wanted:
            strike(fault)
        return complete(checkpoints, step, *arguments, **keywords)

    checkpoint.complete = strike_or_complete


if "TRAINING_TEST_FAULT" in os.environ:
    rank, moment, step, fault = os.environ["TRAINING_TEST_FAULT"].split(":")
    if os.environ.get("RANK") == rank:
        patch = {"step": patch_steps, "save": patch_saves}[moment]
        sys.meta_path.insert(0, PatchOnImport(PATCHED[moment], lambda module: patch(module, int(step), fault)))
