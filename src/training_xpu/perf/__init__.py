"""Measuring: runs and experiments, what they measured, and the store of their records."""
