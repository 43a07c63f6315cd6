"""The page of a run: it needs nothing from outside and shows text as text."""

import json
import math
import re
import time
from html.parser import HTMLParser

import pytest

from jax_ppo.runtime import report
from jax_ppo.runtime.metrics import Writer, write_eval, write_samples
from jax_ppo.types import InputError


class Page(HTMLParser):
    """Collects what the tests ask about: text, tags, attributes, and whether every tag is closed in order."""

    def __init__(self, path):
        super().__init__(convert_charrefs=True)
        self.tags, self.attributes, self.text, self.open = [], [], [], []
        self.source = path.read_bytes().decode("utf-8", "strict")
        self.feed(self.source)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)

    @property
    def words(self):
        return " ".join(" ".join(self.text).replace("\u00a0", " ").split())


def record(i):
    names = {name for panel in report.PANELS for _, name in panel.series if "*" not in name}
    return (
        {name: 0.1 + 0.01 * math.sin(i) for name in names}
        | {f"timing_s/{s}": 1.0 for s in report.STAGES}
        | {"timing_s/step": 12.0}
    )


def sample(**change):
    row = {
        "prompt": "p",
        "response": "r",
        "answer": "18",
        "score": 1.0,
        "finish": "eos",
        "prompt_length": 3,
        "response_length": 5,
    }
    return row | change


def run(folder, iterations, config=None):
    config = config or {"train": {"iterations": 100}, "model": {"path": "m"}, "data": {"path": "d"}}
    writer = Writer(folder, resume_after=0, tensorboard=False, wandb="", config=config)
    for i in range(1, iterations + 1):
        writer.write(i, record(i))
    return writer


def test_page_has_headline_numbers_curves_samples_and_configuration(tmp_path):
    writer = run(tmp_path, 20)
    for i, accuracy in ((21, 0.2), (30, 0.6), (40, 0.5)):
        writer.write(i, record(i) | {"val-core/gsm8k/acc/mean@1": accuracy, "time/wall_s": 3720.0})
        write_eval(tmp_path, i, {"count": 100})
    for i, text in ((1, "early words"), (20, "middle words"), (40, "late words")):
        write_samples(tmp_path, i, [sample(response=text)])
    path = report.write_report(tmp_path)
    page = Page(path)
    assert path == tmp_path / "report.html"
    # sqrt(.2 * .8 / 100) = 0.04 and sqrt(.5 * .5 / 100) = 0.05
    assert "20.0 ± 4.0 → 50.0 ± 5.0 %" in page.words and "best 60.0 % at 30" in page.words
    assert "1h 02m" in page.words and "12 s an iteration" in page.words and "40 of 100" in page.words
    assert page.tags.count("svg") == len(report.PANELS) + 1
    assert "Samples of iteration 40, the latest" in page.words and "Samples of iteration 1, the first" in page.words
    assert "early words" in page.words and "late words" in page.words and "middle words" not in page.words
    assert '"iterations": 100' in page.words and "details" in page.tags


def test_page_refers_to_nothing_outside(tmp_path):
    run(tmp_path, 3)
    write_samples(tmp_path, 1, [sample()])
    page = Page(report.write_report(tmp_path))
    assert not {"script", "link", "img", "iframe", "object", "embed", "base"} & set(page.tags)
    for name, value in page.attributes:
        if name in ("src", "href", "xlink:href", "srcset", "data", "action"):
            assert value.startswith("#"), (name, value)
    assert "@import" not in page.source and "<!ENTITY" not in page.source
    assert all(target.startswith("#") for target in re.findall(r"url\(([^)]*)\)", page.source))
    assert "@media (prefers-color-scheme: dark)" in page.source


def test_text_of_models_and_files_is_shown_as_text(tmp_path):
    evil = "</pre><script>alert('&lt;')</script><img src=x onerror=y>"
    folder = tmp_path / "a<b>&c"
    run(folder, 1, {"model": {"path": evil}, "data": {"path": "d"}})
    write_samples(folder, 1, [sample(prompt=evil, response=evil + " \ud83d", answer=evil)])
    page = Page(report.write_report(folder))
    assert "script" not in page.tags and "img" not in page.tags
    assert page.words.count("</pre><script>alert('&lt;')</script><img src=x onerror=y>") == 5  # subtitle, sample, configuration
    assert "a<b>&c" in page.words and "\ufffd" in page.words


def test_scores_are_coloured_and_truncation_is_said(tmp_path):
    run(tmp_path, 1)
    rows = [sample(score=1.0), sample(score=0.0, finish="length"), sample(score=0.1), sample(score=math.nan), sample(score=-0.5)]
    write_samples(tmp_path, 1, rows)
    page = Page(report.write_report(tmp_path))
    assert re.findall(r'class="score (\w+)">score ([-.\w]+)<', page.source) == [
        ("good", "1"),
        ("bad", "0"),
        ("mid", "0.1"),
        ("mid", "-"),
        ("bad", "-0.5"),
    ]
    assert page.words.count("ran into the limit") == 2  # one sample, and the hint of the chart


def test_long_text_and_many_samples_are_cut_and_say_so(tmp_path):
    run(tmp_path, 1)
    write_samples(tmp_path, 1, [sample(response="x" * 10_000)] + [sample(response="end")] * 99)
    page = Page(report.write_report(tmp_path))
    assert "16 of 100" in page.words and page.words.count("end") == 15
    assert "x" * 8000 + " … 2000 more characters" in page.words and "x" * 8001 not in page.words


def test_no_iteration_one_iteration_and_damaged_files(tmp_path):
    assert "No iteration has finished yet" in Page(report.write_report(tmp_path)).words
    run(tmp_path, 1)
    assert Page(report.write_report(tmp_path)).tags.count("svg") == len(report.PANELS)  # no accuracy yet, but times
    (tmp_path / "config.json").write_text("{")
    (tmp_path / "samples").mkdir()
    (tmp_path / "samples" / "000001.jsonl").write_text('{"prompt": "only a prompt"}\n{"half')
    (tmp_path / "metrics.jsonl").write_text('{"iteration": 1}\n{"iteration": 2, "actor/entropy": null, "actor/grad_norm": 0.0}\n')
    page = Page(report.write_report(tmp_path))
    assert "only a prompt" in page.words and "svg" not in page.tags
    with pytest.raises(InputError, match="nowhere"):
        report.write_report(tmp_path / "nowhere")


def test_the_curve_is_where_the_numbers_are(tmp_path):
    writer = run(tmp_path, 0)
    for i, entropy in enumerate([1.0, None, 3.0, 2.0, 1.0], 1):
        writer.write(i, {"actor/entropy": entropy})
    source = report.write_report(tmp_path).read_text(encoding="utf-8")
    assert source.count("<svg") == 1
    (path,) = re.findall(r'<path d="([^"]*)"[^>]*stroke: var\(--c0\)[^>]*stroke-linecap: square', source)
    points = [tuple(map(float, xy)) for xy in re.findall(r"[ML] ([-.\d]+) ([-.\d]+)", path)]
    (x1, y1), (x3, y3), (x4, y4), (x5, y5) = points  # iteration 2 has no number
    assert (x3 - x1) / (x4 - x3) == pytest.approx(2) and x5 - x4 == pytest.approx(x4 - x3)
    assert y1 == y5 and y3 < y4 < y1 and (y1 - y3) / (y4 - y3) == pytest.approx(2)  # SVG counts downwards


def test_neighbours_are_averaged_and_running_means_do_not_bend_a_line():
    xs = list(range(800))
    thin_x, thin_y = report._thin(xs, [7.0 * x for x in xs])
    assert (len(thin_x), thin_x[0], thin_y[-1]) == (400, 0.5, 7 * 798.5)
    line = [0.5 * x for x in range(100)]
    assert report._smooth(line) == pytest.approx(line)
    assert report._smooth([0.0] * 30 + [3.0] + [0.0] * 30)[28:33] == pytest.approx([0.6] * 5)  # reach 61 // 24 = 2


def test_time_that_no_stage_counts_is_other():
    stages = report._stages([{"timing_s/gen": 6.0, "timing_s/reward": 0.01, "timing_s/step": 10.0}, {"timing_s/gen": 5.0}])
    assert stages == {"gen": [6.0, 5.0], "other": [4.0, 0.0]}


def test_two_thousand_iterations_are_quick_and_small(tmp_path):
    run(tmp_path, 0)
    rows = ({"iteration": i, **record(i), "val-core/gsm8k/acc/mean@1": 0.5} for i in range(1, 2001))
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    write_samples(tmp_path, 1, [sample(response="<" * 9000, prompt="&" * 9000)] * 100)
    write_samples(tmp_path, 2000, [sample(response="<" * 9000, prompt="&" * 9000)] * 100)
    began = time.monotonic()
    path = report.write_report(tmp_path)
    assert time.monotonic() - began < 5
    assert path.stat().st_size < 3_000_000
