"""What is added to the score of an answer for the way a response ends: pure functions of arrays over the batch."""

import chex
import numpy as np


def missing_end(finished: np.ndarray, penalty: float) -> np.ndarray:
    """The penalty for responses that ran into the limit without an end token.

        s_b = -penalty * [not finished_b]

    Args:
      finished: [B] bool; True where the row drew an end token.
      penalty:  at least 0, in units of the score.

    Returns:
      [B] float32, to be added to the scores.
    """
    chex.assert_rank(finished, 1)
    chex.assert_type(finished, bool)
    return np.where(finished, 0.0, -penalty).astype(np.float32)


def overlong(lengths: np.ndarray, *, limit: int, buffer: int) -> np.ndarray:
    """The soft overlong punishment of DAPO (arXiv 2503.14476, equation 13) for responses close to the limit.

        s_b = -clip((length_b - (limit - buffer)) / buffer, 0, 1)

    It is 0 up to limit - buffer tokens and falls linearly to -1 at the limit, whether or not the row finished there.

    Args:
      lengths: [B] integers, response tokens with the end token.
      limit:   longest response, tokens.
      buffer:  tokens over which the penalty grows, between 0 and limit; 0 turns it off.

    Returns:
      [B] float32, to be added to the scores.
    """
    chex.assert_rank(lengths, 1)
    chex.assert_type(lengths, int)
    if buffer == 0:
        return np.zeros(lengths.shape, np.float32)
    # The lengths are widened before the subtraction, which would wrap around in an unsigned type.
    over = lengths.astype(np.float64) - (limit - buffer)
    return -np.clip(over / buffer, 0.0, 1.0).astype(np.float32)
