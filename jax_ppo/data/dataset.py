"""Problems from the hub, a directory, one file, or the built-in task, checked row by row before anything else is loaded.

A row is an object with the texts "question" and "answer"; the answer is a worked solution that ends in "#### N". Other keys are
ignored. The first wrong row ends the run with one line that names file, line and what was found.
"""

import json
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from jax_ppo.data import arithmetic, one_line
from jax_ppo.rewards import gsm8k
from jax_ppo.types import InputError, Problem

Row = tuple[str, Any]  # where it stands, for messages; what stands there

# Where a directory may keep a split; the first that matches counts. The last two are layouts of snapshots from the hub.
LAYOUTS = ("{split}.jsonl", "{split}*.parquet", "main/{split}*.parquet", "data/{split}*.parquet")

# The configuration of hub datasets that have several.
HUB_CONFIGS = {"openai/gsm8k": "main"}
BUILTIN = re.compile(r"builtin(?::(\d+))?")
HUB_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*", re.ASCII)
HUB_TIMEOUT = 5.0  # seconds
ALTERNATIVE = "give a local directory or file instead: --config.data.path=DIR_OR_JSONL"


def load(path: str, split: str, *, limit: int = 0) -> list[Problem]:
    """The problems of a split, every one of them checked.

    Args:
      path: "builtin", or "builtin:SEED" for other problems of that task; a directory with train.jsonl and test.jsonl, or
        Parquet files named train* and test*; one .jsonl or .parquet file, which is every split; or a hub id such as
        "openai/gsm8k". What is absolute, begins with "." or "~", ends like a file or exists is local and never looked for on
        the network.
      split: "train" or "test".
      limit: keep the first problems only; 0 keeps all. Later rows are checked all the same.

    Returns:
      At least one problem.

    Raises:
      InputError: naming the file, line and key that are wrong, what was found, and what is allowed.
    """
    builtin = BUILTIN.fullmatch(path)
    if builtin:
        size = arithmetic.SIZES.get(split, 0)
        return arithmetic.problems(split, min(limit, size) if limit else size, seed=int(builtin[1] or 0))
    rows = _local(path, split) if _is_local(path) else _hub(path, split)
    problems = [_problem(row, where) for where, row in rows]
    if not problems:
        raise InputError(f"{path}: no rows in its {split} split; needs at least one problem")
    return problems[:limit] if limit else problems


def name(path: str) -> str:
    """What a dataset is called in metric names: "builtin", a hub id, or the bare name of a directory or file."""
    if BUILTIN.fullmatch(path) or not _is_local(path):
        return path
    local = Path(os.path.expanduser(path)).resolve()
    return local.stem if local.suffix in READERS else local.name


def batch_indices(count: int, batch: int, iteration: int, seed: int) -> np.ndarray:
    """Which problems an iteration trains on.

    The epochs form one endless stream, each a permutation of all problems that depends on seed and epoch only; iteration i
    takes the elements i * batch to (i + 1) * batch. So a batch may end one epoch and begin the next, no problem is left out,
    and a resumed run continues exactly from the number of the iteration.

    Args:
      count: problems, at least 1.
      batch: how many to take; may exceed count.
      iteration: from 0.
      seed: of the run.

    Returns:
      [batch] int64, each from 0 to count - 1.
    """
    start, stop = iteration * batch, (iteration + 1) * batch
    epochs = range(start // count, -(-stop // count))
    stream = np.concatenate([np.random.default_rng([seed, epoch]).permutation(count) for epoch in epochs])
    offset = start - epochs.start * count
    return stream[offset : offset + batch]


def _is_local(path: str) -> bool:
    return path.startswith(("/", ".", "~")) or path.endswith(tuple(READERS)) or os.path.exists(path)


def _local(path: str, split: str) -> Iterator[Row]:
    for file in _files(Path(os.path.expanduser(path)), split):
        if file.suffix not in READERS:
            raise InputError(f"{file}: must be a directory or end in {' or '.join(READERS)}")
        try:
            yield from READERS[file.suffix](file)
        except OSError as error:
            raise InputError(f"{file}: cannot be read: {one_line(error)}") from error


def _files(path: Path, split: str) -> list[Path]:
    """The files that hold a split, in order."""
    if not path.is_dir():
        if not path.exists():
            raise InputError(f"{path}: no such file or directory")
        return [path]
    for layout in LAYOUTS:
        files = sorted(path.glob(layout.format(split=split)))
        if files:
            _check_shards(files)
            return files
    allowed = " or ".join(layout.format(split=split) for layout in LAYOUTS)
    found = ", ".join(sorted(entry.name for entry in path.iterdir())[:10])
    raise InputError(f"{path}: no {split} split; needs {allowed}; holds {found or 'nothing'}")


def _check_shards(files: list[Path]) -> None:
    """Refuses files named "-00000-of-00002" of which some are missing: an incomplete download would shrink the data unnoticed."""
    total = re.search(r"-of-(\d+)\.parquet$", files[0].name)
    if total and len(files) != int(total[1]):
        raise InputError(f"{files[0]}: {len(files)} of {int(total[1])} files of the split are there; incomplete download?")


def _read_jsonl(file: Path) -> Iterator[Row]:
    # Bytes are split at line feeds and carriage returns; text would also be at U+2028 and others, which JSON texts may hold.
    lines = file.read_bytes().removeprefix(b"\xef\xbb\xbf").rstrip().splitlines()
    for number, line in enumerate(lines, 1):
        where = f"{file}:{number}"
        try:
            yield where, json.loads(line.decode("utf-8"), object_pairs_hook=_unique, parse_constant=_no_constant)
        except UnicodeDecodeError as error:
            raise InputError(f"{where}: not UTF-8 at byte {error.start + 1} of the line") from error
        except json.JSONDecodeError as error:
            raise InputError(
                f"{where}: not JSON: {error.msg.removesuffix(' at')} at column {error.colno}; needs one object a line"
            ) from error
        except (ValueError, RecursionError) as error:
            raise InputError(f"{where}: not JSON: {error}") from error


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f'key "{next(key for key in keys if keys.count(key) > 1)}" occurs twice')
    return result


def _no_constant(literal: str) -> Any:
    raise ValueError(f"{literal} is no JSON value")


def _read_parquet(file: Path) -> Iterator[Row]:
    import pyarrow
    import pyarrow.parquet

    try:
        rows = pyarrow.parquet.ParquetFile(file).read().to_pylist()
    except pyarrow.ArrowException as error:
        raise InputError(f"{file}: not Parquet: {one_line(error)}") from error
    for number, row in enumerate(rows, 1):
        yield f"{file}: row {number}", row


READERS: dict[str, Callable[[Path], Iterator[Row]]] = {".jsonl": _read_jsonl, ".parquet": _read_parquet}


def _hub(path: str, split: str) -> Iterator[Row]:
    if not HUB_ID.fullmatch(path):
        raise InputError(f'{path}: no such file or directory, and not a hub id, which is "owner/name"; or use "builtin"')
    import datasets
    import huggingface_hub

    unreachable = ""
    try:
        huggingface_hub.HfApi().dataset_info(path, timeout=HUB_TIMEOUT)
    except huggingface_hub.errors.RepositoryNotFoundError as error:
        raise InputError(f"{path}: no such directory, and none on the hub that can be read; {ALTERNATIVE}") from error
    except Exception as error:  # no network, in any of its forms
        unreachable = one_line(error)
        # `datasets` would retry for half a minute. Told to be offline, it turns to what earlier runs have downloaded.
        datasets.config.HF_HUB_OFFLINE = True
    try:
        table = datasets.load_dataset(path, HUB_CONFIGS.get(path), split=split)
    except Exception as error:
        away = unreachable and isinstance(error, ConnectionError)
        reason = f"the hub cannot be reached ({unreachable})" if away else one_line(error)
        raise InputError(f"{path}: cannot be loaded: {reason}; {ALTERNATIVE}") from error
    for number, row in enumerate(table, 1):
        yield f"{path} ({split}): row {number}", row


def _problem(row: Any, where: str) -> Problem:
    if not isinstance(row, dict):
        raise InputError(f'{where}: must be an object with "question" and "answer", is {_found(row)}')
    for key in ("question", "answer"):
        if key not in row:
            raise InputError(f'{where}: no key "{key}"; the keys found are {", ".join(row) or "none"}')
        _check_text(row[key], f'{where}: "{key}"')
    solution = row["answer"]
    try:
        answer = gsm8k.gold(solution)
    except ValueError as error:
        raise InputError(f'{where}: "answer" must end in "#### N": {error}') from error
    return Problem(row["question"], answer, solution)


def _check_text(value: Any, what: str) -> None:
    if not isinstance(value, str):
        raise InputError(f"{what} must be text, is {_found(value)}")
    if not value.strip():
        raise InputError(f"{what} must be text, is empty")
    if re.search("[\ud800-\udfff]", value):
        raise InputError(f"{what} holds half of a surrogate pair, which is no character")


def _found(value: Any) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 40 else f"{text[:37]}..."
