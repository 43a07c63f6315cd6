"""Sampling: from logits to a token, and from prompts to responses."""
