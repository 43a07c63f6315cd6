"""From problems to prompt tokens, and from response tokens to text, all through the tokenizer of Hugging Face."""

import itertools
import json
from pathlib import Path
from typing import cast

import numpy as np
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from jax_ppo.data import one_line
from jax_ppo.types import InputError, Problem

# One of these sets of files makes a tokenizer. Without the check transformers returns an empty one for a bare config.json.
TOKENIZER_FILES = (("tokenizer.json",), ("vocab.json", "merges.txt"))


def load_tokenizer(directory: str | Path) -> PreTrainedTokenizerBase:
    """The tokenizer of a local Hugging Face directory; the network is never used, nor code from the directory.

    Args:
      directory: holds tokenizer.json, or vocab.json and merges.txt; and usually tokenizer_config.json and chat_template.jinja.

    Returns:
      The tokenizer as `AutoTokenizer` reads it.

    Raises:
      InputError: no such directory, no tokenizer in it, or one that cannot be read.
    """
    path = Path(directory)
    if not path.is_dir():
        raise InputError(f"{directory}: no such directory; a tokenizer is read from a local Hugging Face directory")
    if not any(all((path / name).is_file() for name in names) for names in TOKENIZER_FILES):
        raise InputError(f"{directory}: no tokenizer; needs {' or '.join(' and '.join(names) for names in TOKENIZER_FILES)}")
    try:
        return AutoTokenizer.from_pretrained(str(path), local_files_only=True, trust_remote_code=False)
    except Exception as error:  # the library raises half a dozen kinds for a broken file
        raise InputError(f"{directory}: the tokenizer cannot be read: {one_line(error)}") from error


def end_ids(directory: str | Path | None, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Every id that ends a response: the tokenizer's, then those of generation_config.json, then those of config.json.

    The files disagree in real checkpoints, so their union counts.

    Args:
      directory: where the two files are, each of which may be missing; None for a tokenizer without a directory.
      tokenizer: its eos id comes first.

    Returns:
      The ids without repetition, at least one.

    Raises:
      InputError: no end id anywhere, or one that is not an id.
    """
    files = [Path(directory) / name for name in ("generation_config.json", "config.json")] if directory is not None else []
    found = [tokenizer.eos_token_id] + [eos for file in files if file.is_file() for eos in _eos(file)]
    ids = tuple(dict.fromkeys(eos for eos in found if eos is not None))
    if not ids:
        raise InputError(f"{directory}: no end token; set eos_token in tokenizer_config.json or eos_token_id in config.json")
    return ids


def pad_id(tokenizer: PreTrainedTokenizerBase, end_ids: tuple[int, ...]) -> int:
    """An id to fill empty places with. Masks come from lengths, so it may be an end id, but it is never the tokenizer's own.

    Args:
      tokenizer: its pad id is taken where it has one that is not its eos id.
      end_ids: what `end_ids` returned.

    Returns:
      The id; without a usable pad id, the lowest one that ends nothing.
    """
    pad = tokenizer.pad_token_id
    if pad is not None and pad != tokenizer.eos_token_id:
        return pad
    return next(index for index in itertools.count() if index not in end_ids)


def encode(
    problems: list[Problem], tokenizer: PreTrainedTokenizerBase, *, instruction: str, max_prompt_tokens: int, overlong: str
) -> tuple[list[Problem], list[np.ndarray], int]:
    """The prompts of problems: the question, a space and the instruction, as one user turn of the chat template.

    Args:
      problems: what to ask.
      tokenizer: with a chat template, which ends in the header of the assistant's turn.
      instruction: stands behind every question; empty adds nothing.
      max_prompt_tokens: the longest prompt.
      overlong: "drop" leaves out longer prompts, "error" refuses them.

    Returns:
      The problems that stay, their tokens (int32, one array each), and how many were left out.

    Raises:
      InputError: no chat template or one that fails, prompts too long under "error", or no prompt left.
    """
    questions = [f"{p.question} {instruction}" if instruction else p.question for p in problems]
    tokens = _apply_template(questions, tokenizer)
    fits = [len(ids) <= max_prompt_tokens for ids in tokens]
    dropped = len(fits) - sum(fits)
    if dropped and (overlong == "error" or dropped == len(fits)):
        raise InputError(
            f"{dropped} of {len(fits)} prompts over {max_prompt_tokens} tokens, the longest has {max(map(len, tokens))}:"
            " raise config.data.max_prompt_tokens" + (', or set config.data.overlong="drop"' if dropped < len(fits) else "")
        )
    kept = [problem for problem, fit in zip(problems, fits, strict=True) if fit]
    return kept, [np.array(ids, np.int32) for ids, fit in zip(tokens, fits, strict=True) if fit], dropped


def encode_solution(tokenizer: PreTrainedTokenizerBase, text: str, end_id: int) -> np.ndarray:
    """A worked solution as a response: its tokens, without special ones, and the end id. int32, [length]."""
    return np.array([*tokenizer.encode(text, add_special_tokens=False), end_id], np.int32)


def decode(tokenizer: PreTrainedTokenizerBase, tokens: np.ndarray, lengths: np.ndarray) -> list[str]:
    """The text of responses, for grading and for logs; training uses the tokens themselves.

    Args:
      tokenizer: that of the model.
      tokens: [B, R] int.
      lengths: [B] int, how many tokens of each row count.

    Returns:
      B texts without special tokens. Half a character becomes U+FFFD; an id without a token becomes nothing.
    """
    rows = [row[:length].tolist() for row, length in zip(tokens, lengths, strict=True)]
    return tokenizer.batch_decode(rows, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def _apply_template(questions: list[str], tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    if not tokenizer.chat_template:
        raise InputError(
            f"{tokenizer.name_or_path or 'tokenizer'}: no chat template; put a chat_template.jinja into the directory, or set"
            ' "chat_template" in tokenizer_config.json'
        )
    turns = [[{"role": "user", "content": question}] for question in questions]
    try:
        tokens = tokenizer.apply_chat_template(turns, tokenize=True, add_generation_prompt=True, return_dict=False)
    except ImportError:  # jinja2 is missing: an installation that is broken, not an input
        raise
    except Exception as error:  # templates raise what they like
        raise InputError(f"{tokenizer.name_or_path}: the chat template fails: {one_line(error)}") from error
    if not all(tokens):
        raise InputError(f"{tokenizer.name_or_path}: the chat template leaves nothing of a question")
    return cast(list[list[int]], tokens)


def _eos(file: Path) -> list[int | None]:
    """The eos_token_id of a JSON file as a list; the file may hold an id, a list of them, null or nothing."""
    try:
        value = json.loads(file.read_text(encoding="utf-8"))["eos_token_id"]
    except KeyError:
        return []
    except (OSError, ValueError, TypeError) as error:
        raise InputError(f"{file}: cannot be read: {one_line(error)}") from error
    values = value if isinstance(value, list) else [value]
    for eos in values:
        if eos is not None and (type(eos) is not int or eos < 0):
            raise InputError(f"{file}: eos_token_id is {json.dumps(value)}; must be an id of at least 0, or a list of ids")
    return values
