"""Recompute in a running job: measured first steps, a plan for every batch, its check."""
