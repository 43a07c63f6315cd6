"""The lens shows what the run does: its numbers are those of the log, token by token they obey the equations, nothing else changes."""

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest

from jax_ppo import config as configs
from jax_ppo import train
from jax_ppo.ppo import advantages
from jax_ppo.runtime import metrics

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def lens(tool):
    """The script as a module."""
    return tool("lens")


@pytest.fixture(scope="module")
def workdir(tmp_path_factory):
    """Three iterations of the built-in task, each saved."""
    raw = configs.default_config()
    raw.model.path = raw.data.path = "builtin"
    raw.data.max_prompt_tokens, raw.data.train_limit, raw.data.eval_limit = 40, 200, 8
    raw.warmstart.steps, raw.warmstart.batch, raw.warmstart.lr = 12, 16, 1e-2
    raw.rollout.batch, raw.rollout.max_response_tokens, raw.rollout.segment = 16, 16, 4
    raw.ppo.minibatches, raw.ppo.micro_tokens, raw.ppo.kl_coef, raw.ppo.epochs = 2, 1024, 0.1, 2
    raw.ppo.kl_target = 0.01
    raw.reward.custom = f"{ROOT / 'tests' / 'digit_reward.py'}:score"
    raw.actor_optim.lr = raw.critic_optim.lr = 1e-2
    raw.eval.every, raw.checkpoint.every, raw.checkpoint.keep_last, raw.train.iterations = 0, 1, 9, 3
    folder = tmp_path_factory.mktemp("run")
    train.run(configs.resolve(raw), folder)
    return folder


def contents(workdir):
    files = [p for p in sorted(workdir.rglob("*")) if p.is_file() and p.parent.name != "lens"]
    return {str(p): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}


@pytest.fixture(scope="module")
def rows(lens, workdir):
    """All 16 responses of iteration 3."""
    before = contents(workdir)
    page = lens.look(workdir / "checkpoints" / "2", 16)
    assert contents(workdir) == before
    assert page == workdir / "lens" / "000003.html"
    return [json.loads(line) for line in page.with_suffix(".jsonl").read_text().splitlines()]


def flat(rows, name):
    return np.array([x for row in rows for x in row[name]])


def test_it_is_the_iteration_of_the_log(rows, workdir):
    (logged,) = [line for line in metrics.read(workdir) if line["iteration"] == 3]
    scores = [row["score"] for row in rows]
    assert np.mean(scores) == pytest.approx(logged["critic/score/mean"], rel=1e-6)
    assert np.mean([len(row["ids"]) for row in rows]) == logged["response_length/mean"]
    for name, metric in {"advantage": "advantages", "value": "values", "return": "returns"}.items():
        x = flat(rows, name)
        found = [logged[f"critic/{metric}/{kind}"] for kind in ("min", "max", "mean")]
        np.testing.assert_allclose([x.min(), x.max(), x.mean()], found, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(flat(rows, "entropy").mean(), logged["actor/entropy"], rtol=1e-5)
    kl = np.mean([np.mean(row["kl"]) for row in rows])
    np.testing.assert_allclose(kl, logged["actor/reward_kl_penalty"], rtol=1e-4, atol=1e-7)


def test_the_log_and_the_lens_do_not_differ_in_a_digit(rows, workdir):
    assert (
        "metrics compared with the log of the run: not one differs in a digit." in (workdir / "lens" / "000003.html").read_text()
    )


def test_each_token_obeys_the_equations(rows, workdir):
    (logged,) = [line for line in metrics.read(workdir) if line["iteration"] == 3]
    coefficient = logged["actor/reward_kl_penalty_coeff"]
    for row in rows:
        get = lambda name, row=row: np.array(row[name])[None]  # noqa: E731
        np.testing.assert_allclose(get("sampler"), get("old"), atol=1e-5)
        np.testing.assert_allclose(get("kl"), get("old") - get("reference"), atol=1e-6)
        rewards = -coefficient * get("kl")
        rewards[0, -1] += row["score"]
        np.testing.assert_allclose(get("reward"), rewards, atol=1e-6)
        real, ppo = np.ones_like(rewards, bool), configs.Config().ppo
        _, returns = advantages.gae(rewards, get("value"), real, gamma=ppo.gamma, lam=ppo.lam_critic)
        np.testing.assert_allclose(get("return"), returns, atol=1e-5)
        np.testing.assert_allclose(get("ratio"), np.exp(get("new") - get("old")), rtol=1e-5)
        better, ratio = get("advantage") > 0, get("ratio")
        np.testing.assert_array_equal(get("clipped"), np.where(better, ratio > 1.2, ratio < 0.8))
    assert flat(rows, "clipped").any()
    assert np.abs(flat(rows, "ratio") - 1).max() > 0.05  # the updates were made


def test_right_and_wrong_ones_in_turn(lens):
    assert lens.choose(np.array([0.0, 1.0, 0.5, 0.25]), 4) == [1, 0, 2, 3]
    assert lens.choose(np.array([0.0, 1.0]), 8) == [1, 0]


def test_an_iteration_that_is_still_to_come(lens, workdir, rows, capsys):
    assert lens.main([str(workdir), "--show=2"]) == 0
    out = capsys.readouterr().out
    assert "Iteration 4, done once more from checkpoint 3. The run has not logged it yet." in out
    assert len((workdir / "lens" / "000004.jsonl").read_text().splitlines()) == 2


def test_without_critic_and_reference(lens, workdir, tmp_path, rows):
    text = json.loads((workdir / "config.json").read_text())
    text["ppo"] |= {"estimator": "reinforce", "kl_coef": 0.0, "kl_target": 0.0}
    text["train"]["iterations"] = 1
    train.run(configs.resolve(text), tmp_path)
    page = lens.look(tmp_path / "checkpoints" / "0", 3)
    (row, *_) = [json.loads(line) for line in page.with_suffix(".jsonl").read_text().splitlines()]
    assert not {"value", "return", "reference", "kl"} & row.keys()
    assert {"sampler", "old", "entropy", "reward", "advantage", "new", "ratio"} <= row.keys()
    assert "not one differs in a digit" in page.read_text()


def test_what_is_wrong_is_one_line(lens, workdir, tmp_path, capsys):
    (tmp_path / "torn" / "checkpoints" / "1").mkdir(parents=True)
    for words, said in [
        ([tmp_path / "none"], "not a run with checkpoints"),
        ([workdir / "checkpoints" / "7"], "no such checkpoint; there are 0, 1, 2, 3"),
        ([workdir, "--show=0"], "--show=0: must be at least 1"),
        ([workdir, "--sow=1"], "unrecognized arguments: --sow=1"),
        ([tmp_path / "torn"], "config.json: cannot be read"),
        ([], "the following arguments are required: WORKDIR"),
    ]:
        assert lens.main([str(word) for word in words]) == 2
        out, err = capsys.readouterr()
        assert out == "" and err.count("\n") == 1 and said in err, err
