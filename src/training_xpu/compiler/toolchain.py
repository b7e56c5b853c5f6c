"""Whether this machine can compile at all: Inductor needs a C++ compiler for CPUs, and Triton for most accelerators."""

from __future__ import annotations

import importlib.util

import torch


def why_not() -> str | None:
    """What is missing, and what to do; None where nothing is."""
    if torch.accelerator.is_available():
        missing = importlib.util.find_spec("triton") is None and importlib.util.find_spec("torch_npu") is None
        return "Triton is not installed, which Inductor compiles for this accelerator with" if missing else None
    from torch._inductor import exc
    from torch._inductor.cpp_builder import get_cpp_compiler

    try:
        get_cpp_compiler()
    except exc.InvalidCxxCompiler:
        return "no C++ compiler was found; install g++, or name one in CXX"
    return None
