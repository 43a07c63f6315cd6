"""What people see while a run goes on: columns that stand still, and lines that survive a log file."""

import io
import math
import re

import pytest
from rich.console import Console

from jax_ppo.runtime.display import Display, duration, start_table

FULL = {
    "critic/score/mean": 0.512,
    "val-core/gsm8k/acc/mean@1": 0.4634,
    "response_length/mean": 203.4,
    "actor/reward_kl_penalty": 0.00213,
    "actor/pg_clipfrac": 0.013,
    "critic/vf_explained_var": 0.62,
    "timing_s/step": 41.23,
}


def console(width=80, **options):
    return Console(file=io.StringIO(), width=width, highlight=False, **options)


def printed(console):
    return console.file.getvalue().splitlines()


def test_a_log_gets_plain_lines_only():
    out = console()
    now = [0.0]
    with Display(3, console=out, clock=lambda: now[0]) as display:
        for i in (1, 2, 3):
            display.stage("rollout", 10, 20)
            now[0] += 100 if i == 1 else 40
            display.iteration(i, FULL)
    text = out.file.getvalue()
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f]", text) and "rollout" not in text
    assert all(len(line) <= 80 for line in text.splitlines())
    rows = [line.split() for line in text.splitlines() if re.match(r" *\d/3 ", line)]
    same = ["0.512", "46.3%", "203", "0.0021", "1.3%", "0.62", "41.2"]
    # 100 s an iteration, two to go; then 40 s, as the first one compiled; then none.
    assert rows == [["1/3", *same, "3m", "20s"], ["2/3", *same, "40s"], ["3/3", *same, "0s"]]
    assert sum(line.startswith("iteration ") for line in text.splitlines()) == 1


@pytest.mark.parametrize("width", [80, 120])
def test_headings_stand_above_their_numbers_and_are_explained(width):
    out = console(width)
    with Display(2000, 5, console=out) as display:
        display.iteration(6, FULL | {"actor/entropy": 0.3, "perf/throughput": 5123.0, "training/truncated_frac": 0.02})
    lines = printed(out)
    heading, row = lines[-2:]
    assert max(map(len, lines)) <= width
    ends = {m.group(): m.end() for m in re.finditer(r"\S+", heading)}
    assert row[: ends["score"]].endswith("0.512") and row[: ends["held-out"]].endswith("46.3%")
    assert row[: ends["KL"]].endswith("0.0021") and row[: ends["iteration"]].endswith("6/2000")
    assert ("tokens/s" in ends) == (width == 120)
    for name in set(ends) - {"iteration"}:
        assert sum(line.strip().startswith(name + " ") for line in lines[:-2]) == 1, name


def test_missing_extreme_and_non_finite_numbers_keep_the_columns():
    out = console()
    wild = FULL | {"critic/score/mean": None, "critic/vf_explained_var": -123456.0, "actor/reward_kl_penalty": math.nan}
    with Display(10, console=out) as display:
        display.iteration(1, {})
        display.iteration(2, wild)
        display.iteration(3, FULL | {"actor/skipped": 2, "critic/skipped": 0})
    *_, empty, row, full, warning = printed(out)
    assert empty.split()[:8] == ["1/10", *"-------"]
    assert row.split()[1:7] == ["-", "46.3%", "203", "nan", "1.3%", "-1.2e+05"]
    assert len(empty) == len(row) == len(full)
    assert "actor" in warning and "critic" not in warning and warning.endswith(": 2")


def test_long_work_in_a_log_speaks_every_half_minute():
    out, now = console(), [0.0]
    with Display(0, console=out, clock=lambda: now[0]) as display:
        advance = display.bar("evaluation", 100)
        for _ in range(10):
            now[0] += 9
            advance(10)
    assert printed(out) == ["evaluation 40/100", "evaluation 80/100"]  # after 36 s and 72 s


def test_a_terminal_gets_bars_that_disappear():
    out = console(force_terminal=True, force_interactive=True, color_system=None, _environ={"TERM": "xterm"})
    with Display(2, console=out) as display:
        advance = display.bar("loading", 2)
        display._progress.refresh()
        advance()
        advance()
        display.stage("rollout", 3, 8)
        display._progress.refresh()
        display.stage("update", 1, 4)
        display._progress.refresh()
        assert {task.description for task in display._progress.tasks} == {"iteration", "update"}
        display.iteration(1, FULL)
    text = out.file.getvalue()
    assert all(part in text for part in ("loading", "0/2", "3/8", "1/4", "46.3%", "\x1b["))


def test_forced_colour_does_not_animate_a_pipe(monkeypatch, capsys):
    monkeypatch.setenv("FORCE_COLOR", "1")
    with Display(1) as display:
        display.stage("rollout", 1, 2)
        display.iteration(1, FULL)
    text = capsys.readouterr().out
    assert "46.3%" in text and "rollout" not in text and "\x1b[?25l" not in text  # the cursor is not hidden


def test_start_table_shows_text_as_it_is():
    out = console()
    start_table([("model", "dir [bold]x[/bold]"), ("data", "word " * 40)], "jax_ppo [0.1]", console=out)
    text = out.file.getvalue()
    assert "jax_ppo [0.1]" in text and "dir [bold]x[/bold]" in text and text.count("word") == 40
    assert max(map(len, text.splitlines())) <= 80


def test_start_table_has_two_columns_and_leaves_paths_whole():
    out, path = console(40), "/a/very/long/path/to/a-file/that-does-not-fit/into-the-line.json"
    start_table(
        [("a", "one two three four five six seven"), ("", "more"), ("written to", path), ("empty", "")], "title", console=out
    )
    assert printed(out) == [
        "title",
        "a           one two three four five six",
        "            seven",
        "            more",
        f"written to  {path}",
        "empty       ",
        "",
    ]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0s"), (59.4, "59s"), (59.6, "1m 00s"), (200, "3m 20s"), (3720, "1h 02m"), (183600, "2d 03h"), (86399, "23h 59m")],
)
def test_duration(seconds, text):
    assert duration(seconds) == text
