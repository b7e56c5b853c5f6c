"""Predicts the peak memory of a training step: what the model needs, what its engine adds, what allocators hold."""
