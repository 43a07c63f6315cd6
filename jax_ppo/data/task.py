"""Everything about the job that is not a network: problems, tokenizer, tokens, batches."""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from transformers import PreTrainedTokenizerBase

from jax_ppo.config import Config
from jax_ppo.data import arithmetic, dataset, prompts
from jax_ppo.types import InputError, Problem, Prompts


@dataclass(frozen=True)
class Task:
    """Problems with their prompts, and the tokenizer they share.

    name:       of the data set, in metric names.
    train, test: problems.
    train_tokens, test_tokens: their prompts, int32 arrays.
    notes:      lines for the reader about what was dropped.
    """

    name: str
    tokenizer: PreTrainedTokenizerBase
    end_ids: tuple[int, ...]
    pad_id: int
    train: list[Problem]
    train_tokens: list[np.ndarray]
    test: list[Problem]
    test_tokens: list[np.ndarray]
    notes: list[str]

    @property
    def prompt_width(self) -> int:
        """P: the longest prompt, rounded up to 8, the same for the whole run so that nothing compiles twice."""
        return -(-max(len(t) for t in [*self.train_tokens, *self.test_tokens]) // 8) * 8

    def batch(self, iteration: int, *, batch: int, n: int, seed: int) -> Prompts:
        """The prompts of an iteration (from 1), each `n` times in a row; a function of its arguments alone."""
        index = np.repeat(dataset.batch_indices(len(self.train), batch, iteration - 1, seed), n)
        return Prompts([self.train[i] for i in index], [self.train_tokens[i] for i in index], np.arange(len(index)))

    def held_out(self, limit: int) -> Prompts:
        """The first `limit` held-out prompts; 0 means all."""
        count = min(limit, len(self.test)) if limit else len(self.test)
        return Prompts(self.test[:count], self.test_tokens[:count], np.arange(count))

    def facts(self) -> dict[str, str]:
        """What must be the same in every process, in short: name -> count and hash."""
        lists = {"training data": (self.train, self.train_tokens), "held-out data": (self.test, self.test_tokens)}
        rows = {
            name: [[p.question, p.answer, t.tolist()] for p, t in zip(problems, tokens, strict=True)]
            for name, (problems, tokens) in lists.items()
        }
        ids = [sorted(self.tokenizer.get_vocab().items()), self.end_ids, self.pad_id]
        said = {name: (f"{len(row)} problems", row) for name, row in rows.items()} | {
            "tokenizer": (f"{len(self.tokenizer)} ids", ids)
        }
        return {
            name: f"{size}, {hashlib.sha256(json.dumps(what).encode()).hexdigest()[:12]}" for name, (size, what) in said.items()
        }

    def text(self, tokens: np.ndarray, lengths: np.ndarray) -> list[str]:
        """Responses as text."""
        return prompts.decode(self.tokenizer, tokens, lengths)


def load(config: Config, directory: Path) -> Task:
    """Reads data and tokenizer and encodes every prompt.

    Args:
      config:    the run.
      directory: Hugging Face directory with the tokenizer.

    Raises:
      InputError: for anything wrong in data or tokenizer.
    """
    data, tokenizer = config.data, prompts.load_tokenizer(directory)
    if not data.eval_path and Path(data.path).expanduser().is_file():
        raise InputError(
            f"config.data.path={data.path!r} is one file, so there is no held-out split; give config.data.eval_path=FILE, or a"
            " directory with train.jsonl and test.jsonl"
        )
    ends = prompts.end_ids(directory, tokenizer)
    notes, encoded = [], []
    wanted = {"train": (data.path, data.train_limit), "test": (data.eval_path or data.path, data.eval_limit)}
    for split, (path, limit) in wanted.items():
        problems = dataset.load(path, split, limit=limit)
        kept, tokens, dropped = prompts.encode(
            problems, tokenizer, instruction=data.instruction, max_prompt_tokens=data.max_prompt_tokens, overlong=data.overlong
        )
        if dropped:
            notes.append(f"{split}: dropped {dropped} of {len(problems)} prompts over {data.max_prompt_tokens} tokens")
        encoded.append((kept, tokens))
    return Task(
        name=dataset.name(data.eval_path or data.path),
        tokenizer=tokenizer,
        end_ids=ends,
        pad_id=prompts.pad_id(tokenizer, ends),
        train=encoded[0][0],
        train_tokens=encoded[0][1],
        test=encoded[1][0],
        test_tokens=encoded[1][1],
        notes=notes,
    )


def demonstrations(config: Config, task: Task) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Prompts and responses of the supervised start, `warmstart.steps` x `warmstart.batch` of them.

    The built-in task has demonstrations of its own; any other shows the worked solutions of its training problems.

    Args:
      config: the run.
      task:   from `load`.

    Returns:
      (prompts, responses): int32 arrays; responses end in the tokenizer's end token and are cut at the limit of a response.
    """
    count = config.warmstart.steps * config.warmstart.batch
    shown, tokens = task.train, task.train_tokens
    if config.data.path == "builtin":
        shown = arithmetic.demonstrations(count, config.train.seed)
        shown, tokens, _ = prompts.encode(
            shown,
            task.tokenizer,
            instruction=config.data.instruction,
            max_prompt_tokens=config.data.max_prompt_tokens,
            overlong="error",
        )
    index = dataset.batch_indices(len(shown), count, 0, config.train.seed)
    solutions = {i: prompts.encode_solution(task.tokenizer, shown[i].solution, task.end_ids[0]) for i in set(index.tolist())}
    limit = config.rollout.max_response_tokens
    return [tokens[i] for i in index], [solutions[i][:limit] for i in index]
