"""Open training stack: faster training on any accelerator and on CPUs, and the tools that measure it."""

__version__ = "0.1.0.dev0"

__all__ = ["__version__"]
