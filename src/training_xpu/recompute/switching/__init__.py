"""Has blocks keep, recompute or selectively recompute their activations, from step to step, in any script."""
