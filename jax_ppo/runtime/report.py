"""WORKDIR/report.html: a run on one page, to read afterwards or while it goes on."""

import html
import io
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jax_ppo.runtime.display import ACCURACY, Record, duration, numbers
from jax_ppo.runtime.metrics import clean_text, read, read_lines, replace_file
from jax_ppo.types import InputError


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
COLOURS = tuple(f"#a1b2c{k}" for k in range(8))
_THEMED = {_INK: "var(--soft)", _GRID: "var(--line)"} | {c: f"var(--c{k})" for k, c in enumerate(COLOURS)}

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
            for name, value in numbers(record, pattern).items():
                if not panel.log or value > 0:
                    found.setdefault((label, name), []).append((record["iteration"], value))
    several = len({name for label, name in found if label == panel.series[0][0]}) > 1
    curves = []
    for (label, name), points in found.items():
        dataset = f" {name.split('/')[1]}" if several else ""
        curves.append((label + dataset, [x for x, _ in points], [y for _, y in points]))
    return curves


def chart(title: str, hint: str, keys: Sequence[str], last: int, draw: Callable[[Any], None]) -> str:
    """A card with a heading, a legend and what `draw` puts on the axes, as SVG.

    Args:
      title, hint: above the chart.
      keys:  of the legend, in the order of COLOURS.
      last:  the x axis reaches from 0 to it.
      draw:  called with the matplotlib axes.
    """
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

        for (_, all_x, all_y), colour in zip(curves, COLOURS, strict=False):
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
    return chart(panel.title, panel.hint, keys, max(1, records[-1]["iteration"]), draw) if curves else ""


def _stages(records: Sequence[Record]) -> dict[str, list[float]]:
    """Seconds by stage; what takes less than 1 % of the time, and what no stage counts, is "other"."""
    rows = {s: [r.get(f"timing_s/{s}") or 0.0 for r in records] for s in STAGES}
    whole = [max(r.get("timing_s/step") or 0.0, sum(row[i] for row in rows.values())) for i, r in enumerate(records)]
    largest = sorted(STAGES, key=lambda s: -sum(rows[s]))[: len(COLOURS) - 1]
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
        axes.stackplot(edges, [row * 2 if len(x) == 1 else row for row in layers], colors=COLOURS, linewidth=0, step="mid")

    keys = [f"{name} {sum(row) / len(row):.3g} s" for name, row in stages.items()]
    return chart(
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
    for name in dict.fromkeys(n for r in records for n in numbers(r, ACCURACY)):
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
    subtitle = html.escape(" on ".join(filter(None, (config.get(section, {}).get("path") for section in ("model", "data")))))
    settings = html.escape(json.dumps(config, indent=2, ensure_ascii=False))
    body = (
        f"<p>{subtitle}</p>{_numbers(folder, read(folder), config)}{_samples(folder)}"
        f"<details><summary><h2>Configuration</h2></summary><pre>{settings}</pre></details>"
    )
    path = folder / "report.html"
    replace_file(path, page(folder.resolve().name, body))
    return path


def page(title: str, body: str, style: str = "") -> str:
    """A page that needs no network: a heading, HTML below it, and more style than the report's own."""
    title = html.escape(title)
    return clean_text(
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{title}</title><style>{_STYLE}{style}</style></head><body><h1>{title}</h1>{body}</body></html>\n"
    )
