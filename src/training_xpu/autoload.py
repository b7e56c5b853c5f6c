"""What happens at `import torch` (entry point group `torch.backends`)."""


def autoload() -> None:
    """Called by torch at the end of its import."""
