"""The user's reward function: files written here, with the message each mistake must give."""

from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

from jax_ppo.config import RewardConfig
from jax_ppo.rewards import custom, make_scorer
from jax_ppo.types import InputError, Problem, RunError

PROBLEMS = [Problem("2+2?", "4"), Problem("3+3?", "6"), Problem("4+4?", "8")]
RESPONSES = ["four", "6", "eight!"]


def _spec(directory: Path, source: str, name: str = "reward") -> str:
    path = directory / "mine.py"
    path.write_text(source)
    return f"{path}:{name}"


def test_arguments_arrive_in_order_and_by_row(tmp_path: Path) -> None:
    spec = _spec(
        tmp_path, "def reward(prompt, response, answer):\n    return len(prompt) + 10 * len(response) + 100 * int(answer)\n"
    )
    scores = custom.score_rows(custom.load(spec), PROBLEMS, RESPONSES)
    np.testing.assert_array_equal(scores, [4 + 40 + 400, 4 + 10 + 600, 4 + 60 + 800])
    assert scores.dtype == np.float32


def test_scorer_adds_shaping_to_the_custom_score(tmp_path: Path) -> None:
    spec = _spec(tmp_path, "def reward(prompt, response, answer):\n    return float(response == answer) - 0.5\n")
    config = RewardConfig(custom=spec, missing_end_penalty=0.25, overlong_buffer=2, format_score=0.125)
    scores = make_scorer(config, 4)(PROBLEMS, ["#### 5", "6", "8"], np.array([1, 3, 4]), np.array([True, True, False]))
    np.testing.assert_array_equal(scores, [-0.5, 0.5 - 0.5, 0.5 - 0.25 - 1])
    assert scores.dtype == np.float32


@pytest.mark.parametrize(
    "source",
    [
        "def reward(prompt, response, answer, scale=1.0): return 1",
        "def reward(*texts): return 1",
        "reward = lambda p, r, a: True",
        "class Judge:\n    def __call__(self, prompt, response, answer): return 1\nreward = Judge()",
        "import functools\ndef f(k, p, r, a): return k\nreward = functools.partial(f, 1)",
        "from __future__ import annotations\nimport dataclasses\n@dataclasses.dataclass\nclass C:\n    x: int = 1\n"
        "def reward(p, r, a): return C().x",
        "import numpy as np\ndef reward(p, r, a): return np.float32(1)",
        "import numpy as np\ndef reward(p, r, a): return np.float16(1)",
        "import numpy as np\ndef reward(p, r, a): return np.bool_(True)",
        "from fractions import Fraction\ndef reward(p, r, a): return Fraction(2, 2)",
    ],
)
def test_forms_that_are_accepted(tmp_path: Path, source: str) -> None:
    np.testing.assert_array_equal(custom.score_rows(custom.load(_spec(tmp_path, source)), PROBLEMS, RESPONSES), [1, 1, 1])


def test_file_is_read_afresh_and_leaves_nothing_beside_it(tmp_path: Path) -> None:
    """Two versions of equal size within one clock tick: a cached one would be taken for the other."""
    for value in (1, 2, 3):
        function = custom.load(_spec(tmp_path, f"def reward(p, r, a): return {value}"))
        assert function("", "", "") == value
    assert [path.name for path in tmp_path.iterdir()] == ["mine.py"]


def test_relative_path_and_other_ending(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.txt").write_text("def reward(p, r, a): return 5")
    monkeypatch.chdir(tmp_path)
    assert custom.load("mine.txt:reward")("", "", "") == 5


@pytest.mark.parametrize("spec", ["mine.py", "mine.py:", ":reward", ":", "reward"])
def test_malformed_spec(spec: str) -> None:
    with pytest.raises(InputError) as caught:
        custom.load(spec)
    assert repr(spec) in str(caught.value)
    assert '"path/to/file.py:function"' in str(caught.value)


def test_missing_file_and_directory(tmp_path: Path) -> None:
    for path in (tmp_path / "nowhere.py", tmp_path):
        with pytest.raises(InputError, match=f"no file {path}"):
            custom.load(f"{path}:reward")


@pytest.mark.parametrize(
    ("source", "parts"),
    [
        ("x = 1\n", ["has no function reward"]),
        ("reward = 3\n", ["reward in", "is not a function but int"]),
        ("def reward(response, answer): return 1\n", ["must take (prompt, response, answer)", "takes (response, answer)"]),
        ("def reward(p, r, a, extra): return 1\n", ["must take (prompt, response, answer)", "extra"]),
        ("def reward(*, prompt, response, answer): return 1\n", ["must take (prompt, response, answer)"]),
        ("x = 1\ny = 2\nz = x / 0\n", ["mine.py:3 failed", "ZeroDivisionError"]),
        ("import json\n\njson.loads('{')\n", ["mine.py:3 failed", "JSONDecodeError"]),
        ("x = 1\ndef reward(p, r, a) return 1\n", ["mine.py:2 failed", "SyntaxError"]),
        ("import no_such_package_here\n", ["mine.py:1 failed", "no_such_package_here"]),
        ("raise ValueError('one\\ntwo')\n", ["mine.py:1 failed", "ValueError: one two"]),
        ("raise ValueError('long' * 1000)\n", ["mine.py:1 failed", "..."]),
        ("raise KeyError\n", ["mine.py:1 failed: KeyError"]),
        ("raise SystemExit(3)\n", ["mine.py:1 failed", "SystemExit"]),
    ],
)
def test_unusable_file(tmp_path: Path, source: str, parts: list[str]) -> None:
    with pytest.raises(InputError) as caught:
        custom.load(_spec(tmp_path, source))
    message = str(caught.value)
    assert message.startswith("reward.custom")
    assert "\n" not in message
    assert len(message) < 500
    for part in parts:
        assert part in message


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("float('nan')", "nan"),
        ("float('inf')", "inf"),
        ("-1e39", "-1e+39"),
        ("10**400", "1000"),
        ("None", "None"),
        ("'1.0'", "'1.0'"),
        ("[1.0]", "[1.0]"),
        ("1j", "1j"),
        ("'a\\nb' * 1000", "..."),
    ],
)
def test_value_that_is_no_finite_number(tmp_path: Path, value: str, shown: str) -> None:
    function = custom.load(_spec(tmp_path, f"def reward(p, r, a): return {value} if a == '6' else 0.5"))
    with pytest.raises(RunError) as caught:
        custom.score_rows(function, PROBLEMS, RESPONSES)
    message = str(caught.value)
    assert "reward returned" in message
    assert "on row 1," in message
    assert shown in message
    assert "\n" not in message
    assert len(message) < 500


@pytest.mark.parametrize(
    ("body", "shown"),
    [
        ("    return 1 / (8 - int(a))\n", "ZeroDivisionError: division by zero (FILE:2)"),
        ("    x = 1\n    return [1.0][int(a) // 8]\n", "IndexError: list index out of range (FILE:3)"),
        ("    return check(a)\n\ndef check(a):\n    return float(a.replace('8', 'eight'))\n", "(FILE:5)"),
        ("    import json\n    return json.loads(a.replace('8', '{'))\n", "(FILE:3)"),
        ("    if a == '8':\n        raise RuntimeError('one\\n two')\n    return 1\n", "RuntimeError: one two (FILE:3)"),
    ],
)
def test_error_inside_the_function(tmp_path: Path, body: str, shown: str) -> None:
    function = custom.load(_spec(tmp_path, "def reward(p, r, a):\n" + body))
    with pytest.raises(RunError) as caught:
        custom.score_rows(function, PROBLEMS, RESPONSES)
    message = str(caught.value)
    assert message.startswith("reward.custom: reward failed on row 2: ")
    assert shown.replace("FILE", str(tmp_path / "mine.py")) in message
    assert "\n" not in message


def test_interrupt_is_not_swallowed(tmp_path: Path) -> None:
    function = custom.load(_spec(tmp_path, "def reward(p, r, a): raise KeyboardInterrupt"))
    with pytest.raises(KeyboardInterrupt):
        custom.score_rows(function, PROBLEMS, RESPONSES)


def test_sum_beyond_float32_is_refused(tmp_path: Path) -> None:
    spec = _spec(tmp_path, "def reward(p, r, a): return -3.4e38")
    scorer = make_scorer(RewardConfig(custom=spec, missing_end_penalty=1e38), 4)
    np.testing.assert_array_equal(scorer(PROBLEMS[:1], ["4"], np.array([1]), np.array([True])), np.float32([-3.4e38]))
    with pytest.raises(RunError, match=r"row 1 .*beyond float32"):
        scorer(PROBLEMS[:2], ["4", "6"], np.array([1, 1]), np.array([True, False]))


def test_fractions_keep_their_value(tmp_path: Path) -> None:
    """Scores are no integers: a third stays a third."""
    function = custom.load(_spec(tmp_path, "from fractions import Fraction\ndef reward(p, r, a): return Fraction(1, 3)"))
    np.testing.assert_array_equal(custom.score_rows(function, PROBLEMS[:1], RESPONSES[:1]), np.float32([float(Fraction(1, 3))]))
