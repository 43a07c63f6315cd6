"""Problems and prompts: where they come from, and how they become tokens."""

import os

# transformers advises on import that PyTorch is missing; nothing here needs it, and the advice would head every log.
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")


def one_line(error: Exception) -> str:
    """An exception of a library as one line of at most 300 characters."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]
