"""From the texts of a batch to its scores: the answer rule or the user's function, then what length and ending add."""

from collections.abc import Callable, Sequence

import chex
import numpy as np

from jax_ppo.config import RewardConfig
from jax_ppo.rewards import custom, gsm8k, shaping
from jax_ppo.types import Problem, RunError

Scorer = Callable[[Sequence[Problem], Sequence[str], np.ndarray, np.ndarray], np.ndarray]


def make_scorer(config: RewardConfig, max_response_tokens: int) -> Scorer:
    """The function that scores a rollout.

        score_b = answer_b - missing_end_penalty * [not finished_b] + overlong_b

    answer_b is the rule's verdict on row b against that row's own gold answer (1; `format_score` for a wrong answer in the right
    form; 0), or the value of the user's function; see `gsm8k`, `custom` and `shaping`.

    Args:
      config: the section `reward`.
      max_response_tokens: R, the limit from which the overlong penalty is measured.

    Returns:
      scorer(problems, responses, lengths, finished) -> [B] float32, all finite, with B problems, B texts without the
      prompt, [B] integer response lengths with the end token, [B] bool that is True where an end token was drawn.
      It raises RunError where the user's function fails, or where a score does not fit into float32.

    Raises:
      InputError: where `config.custom` does not lead to a usable function.
    """
    function = custom.load(config.custom) if config.custom else None

    def answers(problems: Sequence[Problem], responses: Sequence[str]) -> np.ndarray:
        if function is not None:
            return custom.score_rows(function, problems, responses)
        rows = zip(problems, responses, strict=True)
        scores = [gsm8k.graded(r, p.answer, method=config.method, format_score=config.format_score) for p, r in rows]
        return np.array(scores, np.float64)

    def scorer(problems: Sequence[Problem], responses: Sequence[str], lengths: np.ndarray, finished: np.ndarray) -> np.ndarray:
        chex.assert_shape([lengths, finished], (len(problems),))
        ending = shaping.missing_end(finished, config.missing_end_penalty)
        length = shaping.overlong(lengths, limit=max_response_tokens, buffer=config.overlong_buffer)
        # Summed in float64, so that a sum beyond float32 is seen here and not as an infinite loss.
        scores = answers(problems, responses).astype(np.float64) + ending + length
        outside = np.flatnonzero(~(np.abs(scores) <= custom.LARGEST))
        if outside.size:
            raise RunError(f"reward: the score of row {outside[0]} is {scores[outside[0]]}, beyond float32")
        return scores.astype(np.float32)

    return scorer
