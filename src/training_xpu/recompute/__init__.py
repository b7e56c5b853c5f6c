"""Recompute: how many blocks give up their activations, chosen from a memory model."""
