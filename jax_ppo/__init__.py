"""PPO for language models in JAX: from a prompt to an updated weight, one straight path."""

__version__ = "0.1.0"
