"""What a run shows to people: lines in the terminal while it goes on, and WORKDIR/report.html to read afterwards."""

import fnmatch
import html
import io
import json
import math
import re
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn
from rich.table import Table
from rich.text import Text

from jax_ppo.runtime.metrics import clean_text, read, read_lines, replace_file
from jax_ppo.types import InputError

Record = Mapping[str, Any]
ACCURACY = "val-core/*/acc/mean@1"


def _terminal() -> Console:
    # FORCE_COLOR, which continuous integration likes to set, may colour a log but must not animate it.
    return Console(force_interactive=None if sys.stdout.isatty() else False, highlight=False)


def start_table(rows: Sequence[tuple[str, str]], title: str, *, console: Console | None = None) -> None:
    """Prints what a run is about to do.

    Args:
      rows: pairs of a name and its value.
      title: stands above the table.
      console: where to print; the terminal if left out.
    """
    table = Table(title=Text(title, "bold"), title_justify="left", box=box.SIMPLE_HEAD, show_header=False, pad_edge=False)
    table.add_column(style="cyan", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows:
        table.add_row(Text(name), Text(value))
    (console or _terminal()).print(table)


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


def _values(record: Record, pattern: str) -> dict[str, Any]:
    """The metrics of a record whose name fits the pattern and that are numbers."""
    if "*" not in pattern:
        return {pattern: record[pattern]} if record.get(pattern) is not None else {}
    return {name: record[name] for name in fnmatch.filter(record, pattern) if record[name] is not None}


def _cell(column: Column, record: Record) -> Text:
    value = next(iter(_values(record, column.metric).values()), None)
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


class Panel(NamedTuple):
    """One chart of the page. series: (label, metric), where a metric may hold a *; form: of the numbers in the legend;
    log: logarithmic axis; floor: what lies below is not shown."""

    title: str
    hint: str
    series: tuple[tuple[str, str], ...]
    form: str = ".3g"
    log: bool = False
    floor: float | None = None


PANELS = (
    Panel(
        "Held-out accuracy",
        "Greedy answers on problems that are never trained on.",
        (
            ("accuracy", ACCURACY),
            ("flexible rule", "val-core/*/acc_flexible/mean@1"),
            ("verl rule", "val-core/*/acc_verl/mean@1"),
        ),
        ".1%",
    ),
    Panel("Score", "Mean score of the sampled responses.", (("score", "critic/score/mean"),)),
    Panel(
        "KL",
        "Distance of the policy, in nats a token. It should grow slowly.",
        (("to the reference", "actor/reward_kl_penalty"), ("by the update", "actor/ppo_kl")),
    ),
    Panel(
        "Clip fraction",
        "Share of tokens the clip holds back. Above 0.2 the updates are too large.",
        (("clipped", "actor/pg_clipfrac"), ("dual clip", "actor/pg_clipfrac_lower")),
        ".2%",
    ),
    Panel(
        "Ratio",
        "New over old probability of a token.",
        (("largest", "actor/ratio/max"), ("smallest", "actor/ratio/min")),
        log=True,
    ),
    Panel(
        "Explained variance of the critic",
        "1 knows every return, 0 knows no more than their mean.",
        (("explained", "critic/vf_explained_var"),),
        floor=-1.0,
    ),
    Panel("Response length", "Tokens.", (("mean", "response_length/mean"), ("longest", "response_length/max")), ".0f"),
    Panel("Truncated responses", "Share that ran into the limit.", (("truncated", "training/truncated_frac"),), ".1%"),
    Panel("Entropy", "Nats a token. Near 0 the policy no longer explores.", (("entropy", "actor/entropy"),)),
    Panel("Gradient norms", "Before clipping.", (("actor", "actor/grad_norm"), ("critic", "critic/grad_norm")), log=True),
    Panel(
        "Sampling against training",
        "Largest differences between the two computations: rounding, if all is well.",
        (("probability", "training/rollout_probs_diff_max"), ("first ratio", "training/first_ratio_dev_max")),
        ".1e",
        log=True,
    ),
)
STAGES = ("gen", "reward", "old_log_prob", "ref", "values", "adv", "update_actor", "update_critic", "testing", "save_checkpoint")
POINTS = 400  # a curve with more is drawn as means of equally many neighbours
SMOOTHED = 60  # a curve with as many is drawn with its running mean

# Drawn in these colours, which occur nowhere else, and replaced by variables that follow the light or dark theme.
_INK, _GRID = "#010203", "#040506"
_COLOURS = tuple(f"#a1b2c{k}" for k in range(8))
_THEMED = {_INK: "var(--soft)", _GRID: "var(--line)"} | {c: f"var(--c{k})" for k, c in enumerate(_COLOURS)}

_STYLE = """
:root { color-scheme: light dark; --ink:#1b1f24; --soft:#59636e; --line:#d8dee4; --back:#f6f8fa; --card:#fff;
  --good:#1a7f37; --bad:#cf222e; --mid:#9a6700; --c0:#0969da; --c1:#d9730d; --c2:#1a7f37; --c3:#a33ea1;
  --c4:#b58900; --c5:#0a8a8a; --c6:#d1495b; --c7:#7d8590; }
@media (prefers-color-scheme: dark) { :root { --ink:#e6edf3; --soft:#9aa5b1; --line:#30363d; --back:#0d1117; --card:#161b22;
  --good:#3fb950; --bad:#f85149; --mid:#d29922; --c0:#58a6ff; --c1:#f0883e; --c2:#3fb950; --c3:#d67ad2;
  --c4:#e3b341; --c5:#39c5cf; --c6:#ff7b85; --c7:#8b949e; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1.5rem 1rem 4rem; max-width: 1240px; color: var(--ink); background: var(--back);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }
h1 { font-size: 1.6rem; margin: 0; overflow-wrap: anywhere; }
h2 { font-size: 1.2rem; margin: 2rem 0 0; }
h3 { font-size: 1rem; margin: 0; }
p { margin: .2rem 0; color: var(--soft); font-size: .85rem; }
summary { cursor: pointer; margin-top: 2rem; } summary h2 { display: inline; }
.tiles, .charts { display: grid; gap: .75rem; margin-top: .75rem; }
.tiles { grid-template-columns: repeat(auto-fit, minmax(150px, 1fr)); }
@media (min-width: 360px) { .wide { grid-column: span 2; } }
.charts { grid-template-columns: repeat(auto-fill, minmax(min(340px, 100%), 1fr)); }
.tile, .chart, .sample { background: var(--card); border: 1px solid var(--line); border-radius: 8px; padding: .8rem 1rem; }
.tile b { display: block; font-size: 1.35rem; line-height: 1.35; } .tile span { color: var(--soft); font-size: .85rem; }
.chart { display: flex; flex-direction: column; }
.chart svg { display: block; width: 100%; height: auto; margin-top: auto; } .chart svg text { font-family: inherit !important; }
.key { display: inline-block; margin: 0 .9rem .2rem 0; font-size: .85rem; }
.key i { display: inline-block; width: .7em; height: .7em; border-radius: 2px; margin-right: .35em; }
.sample { margin-top: .75rem; } .facts { font-size: .85rem; display: flex; flex-wrap: wrap; gap: .2rem 1rem; }
.score { font-weight: 700; } .good { color: var(--good); } .bad { color: var(--bad); } .mid { color: var(--mid); }
pre { white-space: pre-wrap; overflow-wrap: anywhere; margin: .5rem 0 0;
  font: 13px/1.5 ui-monospace, Menlo, Consolas, monospace; }
.prompt { color: var(--soft); } .response { border-left: 3px solid currentColor; padding-left: .7rem; }
.response > span { color: var(--ink); }
"""


def _thin(xs: Sequence[float], *rows: Sequence[float]) -> list[list[float]]:
    """Means of equally many neighbours, so that no more than POINTS are left."""
    size = math.ceil(len(xs) / POINTS) or 1
    return [[sum(row[i : i + size]) / len(row[i : i + size]) for i in range(0, len(row), size)] for row in (xs, *rows)]


def _smooth(values: Sequence[float]) -> list[float]:
    """Running mean over a twelfth of the curve. Towards the ends the window shrinks: off its centre it would bend a trend."""
    last = len(values) - 1
    reaches = [min(max(1, len(values) // 24), i, last - i) for i in range(len(values))]
    windows = [values[i - reach : i + reach + 1] for i, reach in enumerate(reaches)]
    return [sum(window) / len(window) for window in windows]


def _curves(panel: Panel, records: Sequence[Record]) -> list[tuple[str, list[float], list[float]]]:
    """(label, iterations, values) of every series that has a value."""
    found: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for record in records:
        for label, pattern in panel.series:
            for name, value in _values(record, pattern).items():
                if not panel.log or value > 0:
                    found.setdefault((label, name), []).append((record["iteration"], value))
    several = len({name for label, name in found if label == panel.series[0][0]}) > 1
    curves = []
    for (label, name), points in found.items():
        dataset = f" {name.split('/')[1]}" if several else ""
        curves.append((label + dataset, [x for x, _ in points], [y for _, y in points]))
    return curves


def _chart(title: str, hint: str, keys: Sequence[str], last: int, draw: Callable[[Any], None]) -> str:
    """A card with a heading, a legend and what `draw` puts on the axes, as SVG; its x axis reaches from 0 to `last`."""
    from matplotlib import rc_context
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    with rc_context({"svg.fonttype": "none", "svg.hashsalt": title, "font.size": 10, "font.family": "DejaVu Sans"}):
        figure = Figure(figsize=(4.7, 2.3), frameon=False)
        axes = figure.add_axes((0.135, 0.12, 0.83, 0.84), frame_on=True, facecolor="none")
        axes.tick_params(colors=_INK, length=0)
        axes.grid(axis="y", color=_GRID, linewidth=0.8)
        axes.set_axisbelow(True)
        for side, spine in axes.spines.items():
            spine.set(visible=side == "bottom", color=_GRID)
        draw(axes)
        axes.set_xlim(-0.01 * last, 1.01 * last + 0.5)
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
        file = io.StringIO()
        FigureCanvasSVG(figure).print_svg(file, metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    svg = file.getvalue()
    svg = re.sub(r"<metadata>.*?</metadata>| id=\"[a-z]+_\d+\"", "", svg[svg.index("<svg") :], flags=re.S)
    svg = re.sub(r"<svg [^>]*?viewBox=", f'<svg role="img" aria-label="{html.escape(title)}" viewBox=', svg, count=1)
    for colour, variable in _THEMED.items():
        svg = svg.replace(colour, variable)
    legend = "".join(
        f'<span class="key"><i style="background:var(--c{k})"></i>{html.escape(key)}</span>' for k, key in enumerate(keys)
    )
    return (
        f'<div class="chart"><h3>{html.escape(title)}</h3><p class="hint">{html.escape(hint)}</p><div>{legend}</div>{svg}</div>'
    )


def _line_chart(panel: Panel, records: Sequence[Record]) -> str:
    curves = _curves(panel, records)

    def draw(axes: Any) -> None:
        from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

        for (_, all_x, all_y), colour in zip(curves, _COLOURS, strict=False):
            x, y = _thin(all_x, all_y)
            noisy = len(x) >= SMOOTHED
            axes.plot(x, y, color=colour, linewidth=1 if noisy else 1.7, alpha=0.35 if noisy else 1)
            if noisy:
                axes.plot(x, _smooth(y), color=colour, linewidth=1.9)
            elif len(x) <= 30:
                axes.plot(x, y, "o", color=colour, markersize=3.5)
        if panel.log:
            axes.set_yscale("log")
            axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5), numticks=8))
            axes.yaxis.set_minor_locator(NullLocator())
        if panel.floor is not None:
            axes.set_ylim(bottom=max(panel.floor, axes.get_ylim()[0]))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{100 * v:.3g}%" if "%" in panel.form else f"{v:.3g}"))

    keys = [f"{label} {y[-1]:{panel.form}}" for label, _, y in curves]
    return _chart(panel.title, panel.hint, keys, max(1, records[-1]["iteration"]), draw) if curves else ""


def _stages(records: Sequence[Record]) -> dict[str, list[float]]:
    """Seconds by stage; what takes less than 1 % of the time, and what no stage counts, is "other"."""
    rows = {s: [r.get(f"timing_s/{s}") or 0.0 for r in records] for s in STAGES}
    whole = [max(r.get("timing_s/step") or 0.0, sum(row[i] for row in rows.values())) for i, r in enumerate(records)]
    largest = sorted(STAGES, key=lambda s: -sum(rows[s]))[: len(_COLOURS) - 1]
    shown = {s: rows[s] for s in largest if sum(rows[s]) >= 0.01 * sum(whole)}
    return shown | {"other": [total - sum(row[i] for row in shown.values()) for i, total in enumerate(whole)]}


def _time_chart(records: Sequence[Record]) -> str:
    timed = [r for r in records if r["iteration"] > 0 and any(r.get(f"timing_s/{s}") for s in STAGES)]
    if not timed:
        return ""
    stages = _stages(timed)
    x, *layers = _thin([r["iteration"] for r in timed], *stages.values())

    def draw(axes: Any) -> None:
        # One point has no area: it is drawn as wide as an iteration.
        edges = [x[0] - 0.5, x[0] + 0.5] if len(x) == 1 else x
        axes.stackplot(edges, [row * 2 if len(x) == 1 else row for row in layers], colors=_COLOURS, linewidth=0, step="mid")

    keys = [f"{name} {sum(row) / len(row):.3g} s" for name, row in stages.items()]
    return _chart(
        "Time of an iteration", "Seconds by stage; the numbers are means over the run.", keys, records[-1]["iteration"], draw
    )


def _load(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def _share(folder: Path, record: Record, name: str) -> str:
    """ "53.1 ± 1.4" in percent with the standard error of a share, sqrt(p (1 - p) / count), where the count is known."""
    share, count = record[name], _load(folder / "eval" / f"{record['iteration']:06d}.json").get("count")
    return f"{100 * share:.1f}" + (
        f"\u00a0±\u00a0{100 * math.sqrt(share * (1 - share) / count):.1f}" if count and 0 <= share <= 1 else ""
    )


def _tiles(folder: Path, records: Sequence[Record], config: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """(name, value, remark) of the headline numbers."""
    tiles = []
    for name in dict.fromkeys(n for r in records for n in _values(r, ACCURACY)):
        found = [r for r in records if r.get(name) is not None]
        ends, best = found[:1] + found[1:][-1:], max(found, key=lambda r: r[name])
        value = " → ".join(_share(folder, r, name) for r in ends)
        remark = f"at iteration {' → '.join(str(r['iteration']) for r in ends)}"
        remark += f"; best {100 * best[name]:.1f} % at {best['iteration']}" if len(ends) > 1 else ""
        tiles.append((f"Held-out accuracy, {name.split('/', 1)[1].removesuffix('/acc/mean@1')}", f"{value}\u00a0%", remark))
    planned = config.get("train", {}).get("iterations")
    steps = sorted(r["timing_s/step"] for r in records if r.get("timing_s/step") is not None)
    wall = next((r["time/wall_s"] for r in reversed(records) if r.get("time/wall_s") is not None), sum(steps))
    tiles.append(("Iterations", str(records[-1]["iteration"]), f"of {planned}" if planned else ""))
    tiles.append(("Time", duration(wall), f"{steps[len(steps) // 2]:.3g} s an iteration" if steps else ""))
    for label, metric, form in (("Score", "critic/score/mean", ".3f"), ("Tokens/s and device", "perf/throughput", ",.0f")):
        values = [r[metric] for r in records if r.get(metric) is not None]
        if values:
            tiles.append((label, f"{values[-1]:{form}}", f"first {values[0]:{form}}"))
    return tiles


SHOWN, LONGEST = 16, 8000  # samples of one file, and characters of one text, that the page shows


def _text(value: Any) -> str:
    text = str(value)
    more = f"\n… {len(text) - LONGEST} more characters" if len(text) > LONGEST else ""
    return html.escape(text[:LONGEST] + more)


def _sample(row: Record) -> str:
    score = row.get("score")
    kind = "mid" if score is None or 0 < score < 1 else "good" if score >= 1 else "bad"
    facts = [
        f'<span class="score {kind}">score {"-" if score is None else format(score, ".3g")}</span>',
        f"<span>answer <b>{_text(row.get('answer', '-'))}</b></span>",
        f"<span>prompt {_text(row.get('prompt_length', '-'))} tokens</span>",
        f"<span>response {_text(row.get('response_length', '-'))} tokens</span>",
    ]
    if row.get("finish") == "length":
        facts.append('<span class="bad">ran into the limit</span>')
    prompt, response = _text(row.get("prompt", "")), _text(row.get("response", ""))
    return (
        f'<div class="sample"><div class="facts">{"".join(facts)}</div><pre dir="auto" class="prompt">{prompt}</pre>'
        f'<pre dir="auto" class="response {kind}"><span>{response}</span></pre></div>'
    )


def _samples(folder: Path) -> str:
    files = sorted((folder / "samples").glob("*.jsonl"))
    parts = []
    for path in dict.fromkeys([*files[-1:], *files[:1]]):
        rows = read_lines(path)
        cards = "".join(_sample(row) for row in rows[:SHOWN])
        latest = path == files[-1]
        title = f"Samples of iteration {path.stem.lstrip('0') or 0}, {'the latest' if latest else 'the first'}"
        shown = f"<p>{min(len(rows), SHOWN)} of {len(rows)}</p>"
        parts.append(
            f"<details{' open' if latest else ''}><summary><h2>{html.escape(title)}</h2></summary>{shown}{cards}</details>"
        )
    return "".join(parts)


def _numbers(folder: Path, records: Sequence[Record], config: Mapping[str, Any]) -> str:
    if not records:
        return "<p>No iteration has finished yet.</p>"
    tiles = []
    for name, value, remark in _tiles(folder, records, config):
        parts = (html.escape(part) for part in (name, value, remark))
        tiles.append('<div class="tile{}"><span>{}</span><b>{}</b><span>{}</span></div>'.format(" wide" * ("→" in value), *parts))
    charts = [*(_line_chart(panel, records) for panel in PANELS), _time_chart(records)]
    hint = "Over iterations. Where a curve is drawn twice, the pale one is what was measured, the strong one its running mean."
    return f'<div class="tiles">{"".join(tiles)}</div><h2>Curves</h2><p>{hint}</p><div class="charts">{"".join(charts)}</div>'


def write_report(workdir: str | Path) -> Path:
    """Writes WORKDIR/report.html: one page with headline numbers, curves, samples and the configuration, which needs no network.

    Args:
      workdir: folder of a run; any of its files may be missing.

    Returns:
      The path of the page.

    Raises:
      InputError: there is no such folder.
    """
    folder = Path(workdir)
    if not folder.is_dir():
        raise InputError(f"{folder}: no such directory")
    config = _load(folder / "config.json")
    title = html.escape(folder.resolve().name)
    subtitle = html.escape(" on ".join(filter(None, (config.get(section, {}).get("path") for section in ("model", "data")))))
    settings = html.escape(json.dumps(config, indent=2, ensure_ascii=False))
    page = (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{title}</title><style>{_STYLE}</style></head><body><h1>{title}</h1><p>{subtitle}</p>"
        f"{_numbers(folder, read(folder), config)}{_samples(folder)}"
        f"<details><summary><h2>Configuration</h2></summary><pre>{settings}</pre></details></body></html>\n"
    )
    path = folder / "report.html"
    replace_file(path, clean_text(page))
    return path
