"""The loss of causal language models in chunks: the head and cross-entropy without the full logits."""
