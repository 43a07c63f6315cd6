"""A score from the user's own function, written as "path/to/file.py:function" in `reward.custom`."""

import inspect
import numbers
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from jax_ppo.types import InputError, Problem, RunError

Score = Callable[[str, str, str], float]

LARGEST = float(np.finfo(np.float32).max)


def load(spec: str) -> Score:
    """The user's function, found and checked before anything runs.

    Args:
      spec: "path/to/file.py:function"; a relative path starts at the current directory.

    Returns:
      The function as it is, to be called as function(prompt, response, answer) -> float, where prompt is the question
      without the chat template, response what the model generated, answer the gold answer.

    Raises:
      InputError: one line, where the spec has no colon, the file is missing or raises when it is run (with file and line),
        the name is not in it or is not callable, or the function does not take three positional arguments.
    """
    name, _, attribute = spec.rpartition(":")
    if not name or not attribute:
        raise InputError(f'reward.custom={spec!r}: must be "path/to/file.py:function"')
    path = Path(name).expanduser()
    if not path.is_file():
        raise InputError(f"reward.custom={spec!r}: no file {path}")
    module = _run(path)
    if not hasattr(module, attribute):
        raise InputError(f"reward.custom={spec!r}: {path} has no function {attribute}")
    function = getattr(module, attribute)
    if not callable(function):
        raise InputError(f"reward.custom={spec!r}: {attribute} in {path} is not a function but {type(function).__name__}")
    _check_signature(spec, function)
    return function


def score_rows(function: Score, problems: Sequence[Problem], responses: Sequence[str]) -> np.ndarray:
    """The user's function, applied row by row, each row with its own problem.

    Args:
      function:  what `load` returned.
      problems:  B problems, one a row.
      responses: B texts, what the model generated.

    Returns:
      [B] float32, all finite.

    Raises:
      RunError: one line with function and row (counted from 0), where the function raises (with error, file and line) or
        returns anything but a finite number that float32 can hold (with that value).
    """
    name = getattr(function, "__name__", type(function).__name__)
    scores = np.zeros(len(problems), np.float32)
    for row, (problem, response) in enumerate(zip(problems, responses, strict=True)):
        try:
            value = function(problem.question, response, problem.answer)
        except Exception as error:
            raise RunError(
                f"reward.custom: {name} failed on row {row}: {_line(error)} ({_place(error) or 'no line known'})"
            ) from error
        if not _is_score(value):
            raise RunError(f"reward.custom: {name} returned {_short(repr(value))} on row {row}, must be a finite number")
        scores[row] = float(value)
    return scores


def _is_score(value: Any) -> bool:
    """Whether a value is a number (a truth value is one, a text is none) that float32 holds as a finite one."""
    if not isinstance(value, numbers.Real | np.bool_):
        return False
    try:
        return abs(float(value)) <= LARGEST
    except OverflowError:  # an int beyond float64
        return False


def _run(path: Path) -> ModuleType:
    """Runs a file as a module of its own. It is compiled here because the import system would put a cache beside it and might
    then prefer that cache to a file that was just edited."""
    module = ModuleType(f"reward.custom:{path.resolve()}")
    module.__file__ = str(path)
    try:
        source = path.read_bytes()
    except OSError as error:
        raise InputError(f"reward.custom: {path} cannot be read: {_line(error)}") from error
    sys.modules[module.__name__] = module  # dataclasses and pickle look a class up by its module's name
    try:
        exec(compile(source, str(path), "exec"), module.__dict__)  # the user asked for this code
    except (Exception, SystemExit) as error:
        del sys.modules[module.__name__]
        raise InputError(f"reward.custom: {_place(error) or path} failed: {_line(error)}") from error
    return module


def _place(error: BaseException) -> str:
    """The deepest line of the user's file on the way to an error, as "file:line"; empty where none is known."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename != __file__]
    if frames:
        user = [frame for frame in frames if frame.filename == frames[0].filename]
        return f"{user[-1].filename}:{user[-1].lineno}"
    if isinstance(error, SyntaxError) and error.lineno:
        return f"{error.filename}:{error.lineno}"
    return ""


def _check_signature(spec: str, function: Score) -> None:
    try:
        signature = inspect.signature(function)
    except ValueError:  # some functions written in C do not tell
        return
    try:
        signature.bind("", "", "")
    except TypeError as error:
        raise InputError(
            f"reward.custom={spec!r}: must take (prompt, response, answer), takes {signature}: {_line(error)}"
        ) from error


def _line(error: BaseException) -> str:
    """An exception as one line."""
    return _short(f"{type(error).__name__}: {error}".rstrip(": "))


def _short(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= 200 else text[:197] + "..."
