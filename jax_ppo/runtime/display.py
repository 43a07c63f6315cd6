"""What a run shows in the terminal while it goes on; in a log file, plain lines only."""

import fnmatch
import math
import sys
import textwrap
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn
from rich.text import Text

from jax_ppo.runtime import distributed

Record = Mapping[str, Any]
ACCURACY = "val-core/*/acc/mean@1"


def _terminal() -> Console:
    # FORCE_COLOR, which continuous integration likes to set, may colour a log but must not animate it.
    # Of several processes the first one speaks for all.
    return Console(force_interactive=None if sys.stdout.isatty() else False, highlight=False, quiet=not distributed.is_first())


def start_table(rows: Sequence[tuple[str, str]], title: str, *, console: Console | None = None) -> None:
    """Prints what a run is about to do, or what came out.

    Args:
      rows: pairs of a name and its value, which wraps between words; a path stays in one piece, to be copied.
      title: stands above the table.
      console: where to print; the terminal if left out.
    """
    out = console or _terminal()
    indent = 2 + max(len(name) for name, _ in rows)
    room = max(out.width - indent, 20)
    out.print(Text(title, "bold"), soft_wrap=True)
    for name, value in rows:
        parts = [textwrap.wrap(part, room, break_long_words=False, break_on_hyphens=False) for part in value.splitlines()]
        first, *more = [line for lines in parts for line in lines] or [""]
        out.print(Text(name.ljust(indent), "cyan").append(first, "default"), soft_wrap=True)
        for line in more:
            out.print(Text(" " * indent + line), soft_wrap=True)
    out.print()


class Column(NamedTuple):
    """One column of the lines in the terminal. metric may hold a *; wide: only where 110 characters fit."""

    heading: str
    width: int
    metric: str
    form: str
    meaning: str
    wide: bool = False


COLUMNS = (
    Column("score", 6, "critic/score/mean", ".3f", "mean score of the sampled responses"),
    Column("held-out", 8, ACCURACY, ".1%", "greedy accuracy on held-out problems"),
    Column("length", 6, "response_length/mean", ".0f", "mean tokens of a response"),
    Column("cut", 6, "training/truncated_frac", ".1%", "responses that ran into the limit", wide=True),
    Column("KL", 7, "actor/reward_kl_penalty", ".4f", "KL to the reference policy a token"),
    Column("clip", 5, "actor/pg_clipfrac", ".1%", "tokens whose ratio was clipped"),
    Column("entropy", 7, "actor/entropy", ".3f", "entropy of the policy a token, nats", wide=True),
    Column("expl.var", 8, "critic/vf_explained_var", ".2f", "returns explained by the critic; 1 is all"),
    Column("tokens/s", 8, "perf/throughput", ".0f", "tokens a second and device", wide=True),
    Column("seconds", 7, "timing_s/step", ".1f", "time of the iteration"),
)


def duration(seconds: float) -> str:
    """A time in two units, at most 7 characters: "45s", "3m 20s", "1h 02m", "2d 03h"."""
    whole = round(seconds)
    for unit, size, lower, part in (("d", 86400, "h", 3600), ("h", 3600, "m", 60), ("m", 60, "s", 1)):
        if whole >= size:
            return f"{whole // size}{unit} {whole % size // part:02d}{lower}"
    return f"{whole}s"


def numbers(record: Record, pattern: str) -> dict[str, Any]:
    """The metrics of a record whose name fits the pattern and that are numbers."""
    if "*" not in pattern:
        return {pattern: record[pattern]} if record.get(pattern) is not None else {}
    return {name: record[name] for name in fnmatch.filter(record, pattern) if record[name] is not None}


def _cell(column: Column, record: Record) -> Text:
    value = next(iter(numbers(record, column.metric).values()), None)
    if value is None:
        return Text("-".rjust(column.width), "dim")
    number = float(value)
    text = format(number, column.form)
    if len(text) > column.width:
        text = format(number, ".1e")
    style = "bold red" if not math.isfinite(number) else "bold green" if column.metric == ACCURACY else ""
    return Text(text.rjust(column.width), style)


class Display:
    """Progress of a run in the terminal; in a log file, plain lines only.

    Used as a context manager, one at a time.

    Args:
      total_iterations: iterations of the whole run; 0 where there are none, as in an evaluation.
      start: iterations that are already done.
      console: where to print; the terminal if left out.
      clock: seconds, for the estimates.
    """

    def __init__(
        self,
        total_iterations: int,
        start: int = 0,
        *,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.console = console or _terminal()
        self._total, self._start, self._clock = total_iterations, start, clock
        self._columns = [c for c in COLUMNS if self.console.width >= 110 or not c.wide]
        self._label_width = max(9, 2 * len(str(total_iterations)) + 1)
        self._recent: deque[float] = deque(maxlen=20)
        self._last, self._lines = clock(), 0
        self._progress: Progress | None = None
        self._stage: tuple[str, TaskID] | None = None
        if self.console.is_interactive:
            columns = (TextColumn("{task.description:<12}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[note]}"))
            self._progress = Progress(*columns, console=self.console, transient=True)
            if total_iterations:
                self._progress.add_task("iteration", total=total_iterations, completed=start, note="")

    def __enter__(self) -> "Display":
        if self._progress:
            self._progress.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._progress:
            self._progress.stop()

    def say(self, text: str, style: str = "") -> None:
        """Prints a line above the progress."""
        self.console.print(Text(text, style), soft_wrap=True)

    def stage(self, name: str, done: int, total: int) -> None:
        """Shows how far the current stage of an iteration is.

        Args:
          name: for instance "rollout".
          done, total: rows, minibatches or whatever the stage counts.
        """
        if not self._progress:
            return
        if self._stage is None or self._stage[0] != name:
            if self._stage:
                self._progress.remove_task(self._stage[1])
            self._stage = name, self._progress.add_task(name, total=total, note="")
        self._progress.update(self._stage[1], completed=done, total=total)

    def bar(self, description: str, total: int) -> Callable[..., None]:
        """A bar for work outside the iterations: loading, warm start, evaluation.

        In a log file a line appears every 30 seconds, so that long work shows that it lives.

        Args:
          description: what is done.
          total: how many steps it has.

        Returns:
          advance(steps=1), to call as the work goes on. The bar disappears after the last step.
        """
        task = self._progress.add_task(description, total=total, note="") if self._progress else None
        done, spoke = 0, self._clock()

        def advance(steps: int = 1) -> None:
            nonlocal done, spoke
            done += steps
            if self._progress and task is not None and task in self._progress.task_ids:
                self._progress.advance(task, steps)
                if done >= total:
                    self._progress.remove_task(task)
            elif not self._progress and self._clock() - spoke >= 30:
                self.say(f"{description} {done}/{total}")
                spoke = self._clock()

        return advance

    def iteration(self, i: int, metrics: Record) -> None:
        """Prints the line of a finished iteration; before the first one, what its columns mean.

        Args:
          i: the iteration, from 1.
          metrics: its metrics under the names of `metrics.METRICS`; missing ones show "-".
        """
        if self._lines == 0:
            self._explain()
        if self._lines % 50 == 0:
            headings = [f"{c.heading:>{c.width}}" for c in self._columns]
            self.say("  ".join([f"{'iteration':>{self._label_width}}", *headings, f"{'left':>7}"]), "bold")
        self._lines += 1
        left = self._left(i)
        cells = [_cell(c, metrics) for c in self._columns]
        label = Text(f"{i}/{self._total}".rjust(self._label_width), "cyan")
        self.console.print(Text("  ").join([label, *cells, Text(left.rjust(7))]), soft_wrap=True)
        for network in ("actor", "critic"):
            if skipped := metrics.get(f"{network}/skipped"):
                self.say(f"  warning: {network} updates skipped for a non-finite gradient: {skipped:g}", "yellow")
        if self._progress and self._total:
            self._progress.update(self._progress.task_ids[0], completed=i, note=f"{left} left")

    def _left(self, i: int) -> str:
        now = self._clock()
        if i <= self._start + 2:
            self._recent.clear()  # the first iteration compiled its programs
        self._recent.append(now - self._last)
        self._last = now
        return duration(sum(self._recent) / len(self._recent) * max(0, self._total - i))

    def _explain(self) -> None:
        for heading, meaning in [*((c.heading, c.meaning) for c in self._columns), ("left", "time to the end of the run")]:
            self.say(f"  {heading:<9} {meaning}", "dim")
        self.say("")
