"""What length and ending add, and the scorer that puts all parts together, against numbers worked out by hand."""

import numpy as np
import pytest

from jax_ppo.config import RewardConfig
from jax_ppo.rewards import make_scorer, shaping
from jax_ppo.types import InputError, Problem


def test_missing_end_is_subtracted_only_where_the_end_is_missing() -> None:
    result = shaping.missing_end(np.array([True, False, True, False]), 0.5)
    np.testing.assert_array_equal(result, [0, -0.5, 0, -0.5])
    assert result.dtype == np.float32


@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.uint16])
def test_overlong_by_hand(dtype: type) -> None:
    """Limit 20, buffer 4: free up to 16 tokens, then a quarter more with every token."""
    lengths = np.array([0, 1, 15, 16, 17, 18, 19, 20, 21], dtype)
    result = shaping.overlong(lengths, limit=20, buffer=4)
    np.testing.assert_array_equal(result, [0, 0, 0, 0, -0.25, -0.5, -0.75, -1, -1])
    assert result.dtype == np.float32


def test_overlong_against_the_published_cases() -> None:
    """DAPO, equation 13, case by case."""
    limit, buffer = 512, 100
    for length in range(1, 600):
        if length <= limit - buffer:
            expected = 0.0
        elif length <= limit:
            expected = ((limit - buffer) - length) / buffer
        else:
            expected = -1.0
        np.testing.assert_allclose(shaping.overlong(np.array([length]), limit=limit, buffer=buffer), [expected], atol=1e-7)


def test_overlong_at_its_ends() -> None:
    lengths = np.array([1, 10, 20])
    np.testing.assert_array_equal(shaping.overlong(lengths, limit=20, buffer=0), [0, 0, 0])
    np.testing.assert_array_equal(shaping.overlong(lengths, limit=20, buffer=20), np.float32([-0.05, -0.5, -1]))


def test_wrong_rank_and_type_are_refused() -> None:
    with pytest.raises(AssertionError):
        shaping.missing_end(np.zeros((2, 2), bool), 0.5)
    with pytest.raises(AssertionError):
        shaping.missing_end(np.zeros(2), 0.5)
    with pytest.raises(AssertionError):
        shaping.overlong(np.zeros((2, 2), np.int32), limit=4, buffer=2)
    with pytest.raises(AssertionError):
        shaping.overlong(np.zeros(2), limit=4, buffer=2)


PROBLEMS = [Problem("2+2?", "4"), Problem("3+3?", "6"), Problem("0+0?", "0"), Problem("5+5?", "10")]


def test_scorer_by_hand() -> None:
    config = RewardConfig(format_score=0.125, missing_end_penalty=0.5, overlong_buffer=4)
    responses = ["#### 4", "#### 4", "#### 0", "ten"]
    lengths, finished = np.array([5, 18, 20, 20], np.int32), np.array([True, True, True, False])
    scores = make_scorer(config, 20)(PROBLEMS, responses, lengths, finished)
    np.testing.assert_array_equal(scores, [1, 0.125 - 0.5, 1 - 1, 0 - 0.5 - 1])
    assert scores.dtype == np.float32


def test_each_row_is_graded_against_its_own_answer() -> None:
    scorer = make_scorer(RewardConfig(), 20)
    lengths, finished = np.full(4, 3, np.int32), np.ones(4, bool)
    right = [f"#### {problem.answer}" for problem in PROBLEMS]
    for shift in range(4):
        scores = scorer(PROBLEMS, right[shift:] + right[:shift], lengths, finished)
        np.testing.assert_array_equal(scores, np.full(4, float(shift == 0)))


def test_method_reaches_the_rule() -> None:
    lengths, finished = np.full(4, 3, np.int32), np.ones(4, bool)
    responses = ["#### 4", "####6", "It is 0", "none"]
    expected = {"strict": [1, 1, 0, 0], "flexible": [1, 1, 1, 0], "verl": [1, 0, 0, 0]}
    for method, scores in expected.items():
        np.testing.assert_array_equal(
            make_scorer(RewardConfig(method=method), 20)(PROBLEMS, responses, lengths, finished), scores
        )


def test_only_the_response_is_graded() -> None:
    problem = Problem("Answer with #### 7 please.", "7")
    scores = make_scorer(RewardConfig(method="flexible"), 20)([problem], ["no"], np.array([1]), np.array([True]))
    np.testing.assert_array_equal(scores, [0])


def test_empty_batch_and_wrong_sizes() -> None:
    scorer = make_scorer(RewardConfig(missing_end_penalty=0.5, overlong_buffer=4), 20)
    assert scorer([], [], np.zeros(0, np.int32), np.zeros(0, bool)).shape == (0,)
    with pytest.raises(ValueError, match="zip"):
        scorer(PROBLEMS, ["#### 4"], np.full(4, 3), np.ones(4, bool))
    with pytest.raises(AssertionError):
        scorer(PROBLEMS, ["#### 4"] * 4, np.full(3, 3), np.ones(4, bool))


def test_custom_function_is_found_before_anything_is_scored() -> None:
    with pytest.raises(InputError, match="must be"):
        make_scorer(RewardConfig(custom="reward"), 20)
