"""What does a model say? Sampled by the same engine that training uses.

    python tools/generate.py --checkpoint=(WORKDIR | WORKDIR/checkpoints/N | HF_DIRECTORY) --prompt="..."
    python tools/generate.py --checkpoint=... --prompts-file=FILE [--n=4] [--temperature=0] [--max-tokens=512]

A file holds one prompt a line; in a .jsonl file each line is an object with a "question". A prompt is wrapped as in training: the
instruction of the run, then the chat template; --raw takes it as it is. One response is written as it comes, several one after
the other. Responses go to stdout, everything else to stderr.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich.console import Console

from jax_ppo import sharding
from jax_ppo.config import Config, RolloutConfig
from jax_ppo.data import prompts
from jax_ppo.evaluate import find_model, load_actor, make_engine
from jax_ppo.models import hf
from jax_ppo.runtime import cli
from jax_ppo.runtime.display import Display
from jax_ppo.steps import Steps
from jax_ppo.types import InputError, Problem, Prompts


class Writer:
    """Responses on stdout: one as it comes, several each with its prompt once it is complete."""

    def __init__(self, tokenizer: Any, questions: Sequence[str]):
        """Args: what turns tokens into text, and the prompt of each response."""
        self.tokenizer, self.questions = tokenizer, questions
        self.tokens: list[list[int]] = [[] for _ in questions]
        self.written = ""

    def __call__(self, b: int, tokens: list[int]) -> None:
        """The next tokens of response b."""
        self.tokens[b] += tokens
        text = self.text(b)
        # Half a character is not written yet: what it is shows with the next token.
        if len(self.questions) == 1 and not text.endswith("\N{REPLACEMENT CHARACTER}"):
            sys.stdout.write(text.removeprefix(self.written))
            sys.stdout.flush()
            self.written = text

    def finish(self) -> None:
        """What is not written yet."""
        if len(self.questions) == 1:
            sys.stdout.write(self.text(0).removeprefix(self.written) + "\n")
            return
        for b, question in enumerate(self.questions):
            sys.stdout.write(f"\n>>> {question}\n{self.text(b)}\n")

    def text(self, b: int) -> str:
        """Response b so far."""
        return self.tokenizer.decode(self.tokens[b], skip_special_tokens=True, clean_up_tokenization_spaces=False)


def read_questions(file: Path) -> list[str]:
    """Prompts from a file.

    Raises:
      InputError: naming the line that holds none, or the file.
    """
    try:
        lines = [(i, line) for i, line in enumerate(file.read_text(encoding="utf-8").splitlines(), start=1) if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"--prompts-file={file}: cannot be read ({error})") from None
    if not lines:
        raise InputError(f"--prompts-file={file}: has no prompt")
    if file.suffix != ".jsonl":
        return [line for _, line in lines]
    questions = []
    for i, line in lines:
        try:
            questions.append(json.loads(line)["question"])
        except (ValueError, KeyError, TypeError):
            raise InputError(f'{file}:{i}: must be an object with a "question"') from None
        if not isinstance(questions[-1], str):
            raise InputError(f'{file}:{i}: "question" must be a text')
    return questions


def instruction(workdir: Path | None) -> str:
    """What a run put behind every question; nothing for a model without a run."""
    file = workdir / "config.json" if workdir else None
    return json.loads(file.read_text(encoding="utf-8"))["data"]["instruction"] if file and file.is_file() else ""


def generate(arguments: argparse.Namespace) -> None:
    """Loads the model and writes its responses.

    Raises:
      InputError: for anything wrong in the arguments or the checkpoint.
    """
    questions = [arguments.prompt] if arguments.prompt is not None else read_questions(arguments.prompts_file)
    questions = [q for q in questions for _ in range(arguments.n)]
    rollout = RolloutConfig(
        batch=len(questions), max_response_tokens=arguments.max_tokens, segment=8 if len(questions) == 1 else 64
    )
    config, found, mesh = Config(rollout=rollout), find_model(arguments.checkpoint), sharding.make_mesh(1, -1, 1)
    model, tokenizer = hf.load_config(found.directory), prompts.load_tokenizer(found.directory)
    ends, problems = prompts.end_ids(found.directory, tokenizer), [Problem(q, "") for q in questions]
    if arguments.raw:
        tokens = [np.array(tokenizer.encode(q), np.int32) for q in questions]
    else:
        asked = instruction(found.workdir) if arguments.instruction is None else arguments.instruction
        _, tokens, _ = prompts.encode(problems, tokenizer, instruction=asked, max_prompt_tokens=sys.maxsize, overlong="error")
    if not all(map(len, tokens)):
        raise InputError(f"prompt {next(i for i, t in enumerate(tokens, start=1) if not len(t))} has no token")
    with jax.set_mesh(mesh), Display(0, console=Console(stderr=True, highlight=False)) as display:
        steps = Steps(config, model, None, mesh)
        iteration, params = load_actor(found, model, steps, hf.described_dtype(found.directory), display)
        display.say(f"{arguments.checkpoint}, iteration {iteration}; a response ends at {' or '.join(map(str, ends))}")
        longest, pad = max(map(len, tokens)), prompts.pad_id(tokenizer, ends)
        engine = make_engine(config, steps, prompt_width=longest, end_ids=ends, pad_id=pad)
        writer = Writer(tokenizer, questions)
        engine.generate(
            params,
            steps.decode_weights(params),
            Prompts(problems, tokens, np.arange(len(tokens))),
            jax.random.key(arguments.seed),
            temperature=arguments.temperature,
            top_k=arguments.top_k,
            top_p=arguments.top_p,
            min_tokens=arguments.min_tokens,
            listen=writer,
            progress=lambda done, total: display.stage("responses", done, total) if total > 1 else None,
        )
    writer.finish()


def within(kind: type, low: float, high: float = float("inf")) -> Any:
    """A type for argparse: a number from low to high."""

    def number(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            value = float("nan")
        if not low <= value <= high:
            words = f"from {low} to {high}" if high < float("inf") else f"of at least {low}"
            raise argparse.ArgumentTypeError(f"must be {'a whole' if kind is int else 'a'} number {words}, not {text!r}")
        return value

    return number


def checked(parser: argparse.ArgumentParser, argv: Sequence[str]) -> argparse.Namespace:
    """The arguments, once they fit together."""
    arguments = parser.parse_args(argv)
    if arguments.min_tokens > arguments.max_tokens:
        raise InputError(f"--min-tokens={arguments.min_tokens}: must be at most --max-tokens={arguments.max_tokens}")
    return arguments


def main(argv: Sequence[str]) -> int:
    """Parses the command line and generates; returns the exit code."""
    parser = cli.Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--checkpoint", required=True, help="workdir of a run, one of its checkpoints, or a Hugging Face directory"
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--prompt", help="one prompt")
    what.add_argument("--prompts-file", type=Path, help="many")
    parser.add_argument("--n", type=within(int, 1), default=1, help="responses a prompt")
    parser.add_argument("--max-tokens", type=within(int, 1), default=512, help="longest response")
    parser.add_argument("--min-tokens", type=within(int, 0), default=0, help="no end before these")
    parser.add_argument("--temperature", type=within(float, 0), default=1.0, help="0 is greedy")
    parser.add_argument("--top-k", type=within(int, 0), default=0, help="0 is off")
    parser.add_argument("--top-p", type=within(float, 0, 1), default=1.0, help="1 is off")
    parser.add_argument("--seed", type=within(int, 0, 2**31 - 1), default=0)
    parser.add_argument("--instruction", help="behind every prompt; that of the run unless given")
    parser.add_argument("--raw", action="store_true", help="no instruction, no chat template")
    return cli.exit_code(lambda: generate(checked(parser, argv)))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
