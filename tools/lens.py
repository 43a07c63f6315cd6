"""An iteration under the lens: every number between a sampled token and an updated weight.

    python tools/lens.py (WORKDIR | WORKDIR/checkpoints/N) [--show=8]

Does the iteration behind a checkpoint once more, the way the run does it: the same prompts, tokens, scores, advantages and updates. What
happened to each token of some responses, right and wrong ones in turn, goes to WORKDIR/lens/NNNNNN.html and, for programs, to
NNNNNN.jsonl beside it; where the run has logged the iteration, its metrics are compared. Nothing else in the workdir is changed, and
the updated weights are thrown away, so a run may be going on there.
"""

import argparse
import dataclasses
import html
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from rich.table import Table

from jax_ppo import job as jobs
from jax_ppo import schema
from jax_ppo.config import Config
from jax_ppo.evaluate import make_engine
from jax_ppo.learner import Learner
from jax_ppo.networks import Loader
from jax_ppo.ppo.advantages import kl_estimate, token_rewards
from jax_ppo.runtime import checkpoint, cli, metrics, report
from jax_ppo.runtime.display import Display
from jax_ppo.steps import Steps
from jax_ppo.train import Sampled, sample
from jax_ppo.types import Experience, InputError

# What is known of a token, in the order in which it comes about: its name in the files, and what it means.
MEANINGS = {
    "sampler": "log-probability with which the token was drawn",
    "old": "the same, computed again on packed rows before the update",
    "entropy": "of the policy where the token was drawn, in nats",
    "reference": "log-probability under the policy of the start",
    "kl": "estimate of the KL to it",
    "reward": "the score on the last token, minus the coefficient times the KL",
    "value": "what the critic expects from here, before the token",
    "return": "what the critic learns to expect",
    "advantage": "what the policy learns: above 0 the token was better than expected",
    "new": "log-probability after the updates of the iteration",
    "ratio": "new over old probability; bold where the clip holds the token back",
}
STYLE = """
.strip { font: 14px/2 ui-monospace, Menlo, Consolas, monospace; overflow-wrap: anywhere; margin-top: .6rem; }
.strip span { padding: .1rem 0; border-radius: 3px; white-space: pre-wrap; }
table { border-collapse: collapse; font-size: .85rem; font-variant-numeric: tabular-nums; }
td, th { padding: .15rem .6rem; text-align: right; border-bottom: 1px solid var(--line); white-space: pre; }
td:first-child, th:first-child { text-align: left; } td.words { white-space: normal; text-align: left; color: var(--soft); }
.scroll { overflow-x: auto; } .sample summary { margin-top: .6rem; } .sample .chart { max-width: 560px; margin-top: .6rem; }
"""


class Trace(NamedTuple):
    """An iteration: its number, what was sampled, what each token got ([B, R] by name), and its metrics."""

    iteration: int
    sampled: Sampled
    tokens: dict[str, np.ndarray]
    clipped: np.ndarray
    metrics: dict[str, float]


def read_config(workdir: Path) -> Config:
    """The configuration of a run, for one process that looks on.

    Raises:
      InputError: if the folder has no checkpoint, or no configuration that can be read.
    """
    file = workdir / "config.json"
    if not checkpoint.saved_steps(workdir):
        raise InputError(f"{workdir}: not a run with checkpoints")
    try:
        saved = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"{file}: cannot be read ({error})") from None
    config: Config = schema.build(Config(), schema.complete(Config(), saved))
    return dataclasses.replace(
        config,
        train=dataclasses.replace(config.train, resume="auto"),
        mesh=dataclasses.replace(config.mesh, data=1, fsdp=-1, tensor=1),
        log=dataclasses.replace(config.log, wandb=""),
    )


def trace(job: jobs.Job, iteration: int | None, display: Display) -> Trace:
    """Does the iteration behind a checkpoint.

    Args:
      job:       the run.
      iteration: of the checkpoint; None for the newest that is whole.
      display:   shows how far it is.

    Raises:
      RunError: if the checkpoint cannot be read, or the updates fail.
    """
    config, task, steps = job.config, job.task, Steps(job.config, job.actor, job.critic, job.mesh)
    loader = Loader(job, steps, display)
    done, actor, critic, rest, skipped = loader.restore(job.workdir, iteration)
    for line in skipped:
        display.say(line, "bold red")
    learner = loader.learner(actor, critic)
    engine = make_engine(config, steps, prompt_width=task.prompt_width, end_ids=task.end_ids, pad_id=task.pad_id)
    sampled = sample(job, steps, engine, learner.policy, done + 1, progress=display.stage)
    prompts, rollout, _, scores = sampled
    experience, measured = learner.experience(prompts, rollout, scores, rest["kl_coef"])
    _, entropy = learner.logprobs(prompts, rollout)
    measured |= learner.update(prompts, rollout, experience, done + 1, progress=display.stage)
    new, _ = learner.logprobs(prompts, rollout)
    tokens = {"sampler": rollout.logprobs, "entropy": entropy, "new": new, "ratio": np.exp(new - experience.old_logprobs)}
    tokens |= _learned(learner, experience, scores, rest["kl_coef"])
    tokens = {name: np.asarray(tokens[name]) for name in MEANINGS if name in tokens}
    better, ppo = tokens["advantage"] > 0, config.ppo
    held = np.where(better, tokens["ratio"] > 1 + ppo.clip_high, tokens["ratio"] < 1 - ppo.clip_low)
    return Trace(done + 1, sampled, tokens, held & rollout.mask, measured)


def _learned(learner: Learner, experience: Experience, scores: np.ndarray, kl_coef: float) -> dict[str, Any]:
    """What the experience says of each token; nothing of a network that the run does not have."""
    kl = kl_estimate(experience.old_logprobs, experience.ref_logprobs, learner.config.ppo.kl_kind)
    found: dict[str, Any] = {
        "old": experience.old_logprobs,
        "reward": token_rewards(scores, kl, experience.mask, kl_coef=kl_coef),
        "advantage": experience.advantages,
    }
    if learner.reference is not None:
        found |= {"reference": experience.ref_logprobs, "kl": kl}
    if learner.critic:
        found |= {"value": experience.values, "return": experience.returns}
    return found


def choose(scores: np.ndarray, count: int) -> list[int]:
    """The best response, the worst, the second best, the second worst, and so on."""
    order = np.argsort(-scores, kind="stable").tolist()
    return [order.pop(-(i % 2)) for i in range(min(count, len(order)))]


def records(found: Trace, job: jobs.Job, show: int) -> list[dict[str, Any]]:
    """What the files say of each response that is shown; numbers by token, as long as the response."""
    prompts, rollout, texts, scores = found.sampled
    rows = []
    for b in choose(scores, show):
        length, problem = int(rollout.lengths[b]), prompts.problems[b]
        ids = rollout.tokens[b, :length].tolist()
        rows.append(
            {
                "row": b,
                "prompt": problem.question,
                "response": texts[b],
                "answer": problem.answer,
                "score": float(scores[b]),
                "finish": "eos" if rollout.finished[b] else "length",
                "ids": ids,
                "tokens": [job.task.tokenizer.decode([i], clean_up_tokenization_spaces=False) for i in ids],
                **{name: x[b, :length].tolist() for name, x in found.tokens.items()},
                "clipped": found.clipped[b, :length].tolist(),
            }
        )
    return rows


def compare(measured: dict[str, float], logged: dict[str, Any]) -> dict[str, float]:
    """Differences between the metrics of the lens and those in the log of the run, where both have a number of the same thing."""
    clocks = ("timing_s/", "time/", "perf/")
    return {
        name: abs(value - logged[name])
        for name, value in measured.items()
        if isinstance(logged.get(name), int | float) and not name.startswith(clocks)
    }


def verdict(found: Trace, logged: dict[str, Any]) -> str:
    """Whether this is the iteration that the run went through, in words."""
    said, apart = (
        f"Iteration {found.iteration}, done once more from checkpoint {found.iteration - 1}.",
        compare(found.metrics, logged),
    )
    if not apart:
        return f"{said} The run has not logged it yet."
    worst = max(apart, key=apart.__getitem__)
    difference = f"the largest difference is {apart[worst]:.2g}, in {worst}" if apart[worst] else "not one differs in a digit"
    return f"{said} {len(apart)} metrics compared with the log of the run: {difference}."


def _number(x: float, digits: int) -> str:
    return f"{round(x, digits) + 0.0:.{digits}f}"  # no minus before a zero


def _strip(row: dict[str, Any]) -> str:
    """The response, each token on the colour of its advantage."""
    largest = max(map(abs, row["advantage"])) or 1.0
    spans = []
    for t, text in enumerate(row["tokens"]):
        share, colour = 55 * abs(row["advantage"][t]) / largest, "good" if row["advantage"][t] > 0 else "bad"
        numbers = "\n".join(f"{name} {row[name][t]:.4g}" for name in MEANINGS if name in row)
        shown = html.escape(text.replace("\n", "\u21b5\n"))
        spans.append(
            f'<span title="{numbers}" style="background:color-mix(in srgb, var(--{colour}) {share:.0f}%, transparent)">{shown}</span>'
        )
    return f'<div dir="auto" class="strip">{"".join(spans)}</div>'


def _chart(row: dict[str, Any]) -> str:
    names = [name for name in ("value", "return") if name in row]

    def draw(axes: Any) -> None:
        for name, colour in zip(names, report.COLOURS, strict=False):
            axes.plot(range(1, len(row[name]) + 1), row[name], "-o", color=colour, markersize=2.5, linewidth=1.5)

    return report.chart("Value and return", "Over the tokens.", names, len(row["ids"]), draw) if names else ""


def _table(row: dict[str, Any]) -> str:
    names = [name for name in MEANINGS if name in row]
    head = "".join(f'<th title="{html.escape(MEANINGS[name])}">{name}</th>' for name in names)
    lines = []
    for t, text in enumerate(row["tokens"]):
        cells = [_number(row[name][t], 4) for name in names]
        if row["clipped"][t]:
            cells[-1] = f"<b>{cells[-1]}</b>"
        lines.append(f"<tr><td>{html.escape(repr(text)[1:-1])}</td>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>")
    return f'<div class="scroll"><table><tr><th>token</th>{head}</tr>{"".join(lines)}</table></div>'


def page(found: Trace, rows: Sequence[dict[str, Any]], said: str, name: str) -> str:
    """The page: what the columns mean, the responses, and the metrics of the iteration."""
    used = [key for key in MEANINGS if key in found.tokens]
    meanings = "".join(f'<tr><td>{key}</td><td class="words">{html.escape(MEANINGS[key])}</td></tr>' for key in used)
    cards = []
    for row in rows:
        kind = "good" if row["score"] >= 1 else "bad" if row["score"] <= 0 else "mid"
        facts = (
            f'<span class="score {kind}">score {row["score"]:.3g}</span><span>answer <b>{html.escape(row["answer"])}</b></span>'
        )
        facts += f"<span>row {row['row']}</span><span>{len(row['ids'])} tokens</span>"
        facts += '<span class="bad">ran into the limit</span>' if row["finish"] == "length" else ""
        cards.append(
            f'<div class="sample"><div class="facts">{facts}</div><pre dir="auto" class="prompt">{html.escape(row["prompt"])}</pre>'
            f"{_strip(row)}{_chart(row)}<details><summary>All numbers</summary>{_table(row)}</details></div>"
        )
    numbers = "".join(
        f"<tr><td>{key}</td><td>{value:.6g}</td></tr>"
        for key, value in sorted(found.metrics.items())
        if not key.startswith("perf/")
    )
    body = (
        f"<p>{html.escape(said)}</p><h2>Responses</h2><p>Green tokens become likelier, red ones less likely; the stronger the colour,"
        f" the larger the advantage within its response. Point at a token for its numbers.</p>{''.join(cards)}"
        f'<h2>What the numbers are</h2><table>{meanings}</table><h2>The iteration as a whole</h2><div class="scroll">'
        f"<table>{numbers}</table></div>"
    )
    return report.page(f"{name}, iteration {found.iteration}", body, STYLE)


def look(path: Path, show: int) -> Path:
    """Does the iteration, writes both files, and prints the first response.

    Args:
      path: WORKDIR, or WORKDIR/checkpoints/N.
      show: how many responses.

    Returns:
      The page.

    Raises:
      InputError: for a path that is no run with that checkpoint, or data that the run no longer finds.
    """
    workdir, iteration = checkpoint.locate(path)
    config, steps = read_config(workdir), checkpoint.saved_steps(workdir)
    if iteration not in (None, *steps):
        raise InputError(f"{path}: no such checkpoint; there are {', '.join(map(str, steps))}")
    job = jobs.prepare(config, workdir)
    with jax.set_mesh(job.mesh), Display(0) as display:
        found = trace(job, iteration, display)
        rows = records(found, job, show)
        logged = next((line for line in metrics.read(workdir) if line["iteration"] == found.iteration), {})
        said, folder = verdict(found, logged), workdir / "lens"
        folder.mkdir(exist_ok=True)
        file = folder / f"{found.iteration:06d}.html"
        metrics.replace_file(file.with_suffix(".jsonl"), "".join(json.dumps(row) + "\n" for row in rows))
        metrics.replace_file(file, page(found, rows, said, workdir.name))
        first = rows[0]
        display.say(f"\n{first['prompt']}\nscore {first['score']:.3g}, answer {first['answer']}\n")
        display.console.print(_terminal(first))
        display.say(f"\n{said}\n{file}")
    return file


def _terminal(row: dict[str, Any]) -> Table:
    """One response for the terminal."""
    names = [name for name in ("old", "entropy", "kl", "reward", "value", "return", "advantage", "ratio") if name in row]
    table = Table(box=None)
    for name in ("token", *names):
        table.add_column(name, justify="left" if name == "token" else "right", no_wrap=True)
    for t, text in enumerate(row["tokens"]):
        table.add_row(repr(text)[1:-1], *(_number(row[name][t], 3) for name in names))
    return table


def main(argv: Sequence[str]) -> int:
    """Parses the command line and looks; returns the exit code."""
    parser = cli.Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", type=Path, metavar="WORKDIR", help="of a run, or one of its checkpoints")
    parser.add_argument("--show", type=int, default=8, help="responses; %(default)s unless given")

    def work() -> None:
        arguments = parser.parse_args(argv)
        if arguments.show < 1:
            raise InputError(f"--show={arguments.show}: must be at least 1")
        look(arguments.path, arguments.show)

    return cli.exit_code(work)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
