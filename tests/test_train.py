"""Whole runs of the built-in task in miniature: what they write, that stopping changes nothing, that the mesh changes nothing."""

import dataclasses
import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import digit_reward
import jax
import numpy as np
import pytest
import tiny
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import AxisType
from transformers import AutoModelForCausalLM, AutoTokenizer

from jax_ppo import config as configs
from jax_ppo import evaluate, job, sharding, train
from jax_ppo.models import hf, qwen
from jax_ppo.runtime import checkpoint, metrics
from jax_ppo.types import InputError, RunError


@pytest.fixture(scope="module", autouse=True)
def compiled_once(tmp_path_factory):
    """All runs of this file have the same programs; only the first one compiles them."""
    jax.config.update("jax_compilation_cache_dir", str(tmp_path_factory.mktemp("compiled")))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    compilation_cache.reset_cache()
    yield
    jax.config.update("jax_compilation_cache_dir", None)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 1.0)
    compilation_cache.reset_cache()


def miniature(**train_keys):
    """The built-in task with a few updates of everything."""
    raw = configs.default_config()
    raw.model.path = raw.data.path = "builtin"
    raw.model.remat = False
    raw.data.max_prompt_tokens, raw.data.train_limit, raw.data.eval_limit = 40, 400, 24
    raw.warmstart.steps, raw.warmstart.batch, raw.warmstart.lr = 12, 16, 1e-2
    raw.rollout.batch, raw.rollout.max_response_tokens, raw.rollout.segment = 16, 16, 4
    raw.ppo.minibatches, raw.ppo.micro_tokens, raw.ppo.kl_coef, raw.ppo.epochs = 2, 1024, 0.01, 2
    raw.reward.custom = f"{Path(__file__).with_name('digit_reward.py')}:score"
    raw.actor_optim.lr, raw.critic_optim.lr = 1e-3, 1e-3
    raw.eval.every, raw.eval.limit = 2, 20
    raw.checkpoint.every = 2
    raw.log.samples = 3
    raw.train.iterations = 4
    raw.train.update(train_keys)
    return configs.resolve(raw)


# What a run measures on the clock or on the machine; everything else must be the same numbers again.
UNSTEADY = ("timing_s/", "time/", "perf/")


def steady(workdir):
    return [{k: v for k, v in line.items() if not k.startswith(UNSTEADY)} for line in metrics.read(workdir)]


def weights(workdir, cfg):
    """The actor's parameters of the newest checkpoint, on one device."""
    model = hf.load_config(workdir / "model")
    mesh = sharding.make_mesh(1, -1, 1)
    with jax.set_mesh(mesh):
        steps = evaluate.Steps(cfg, model, model, mesh)
        shapes = evaluate.checkpoint.abstract(steps.actor.typed_shapes("float32"), steps.actor.shardings)
        return jax.device_get(evaluate.checkpoint.restore_params(workdir, shapes)[1])


def states(workdir, cfg, *sizes, iteration=None):
    """Both networks with their optimizers, on a mesh."""
    model, mesh = hf.load_config(workdir / "model"), mesh_of(*(sizes or (1, 8, 1)))
    with jax.set_mesh(mesh):
        steps = evaluate.Steps(cfg, model, model, mesh)
        wanted = [checkpoint.abstract(n.state_shapes("float32"), n.state_shardings) for n in (steps.actor, steps.critic)]
        return jax.device_get(checkpoint.restore(workdir, *wanted, iteration=iteration)[1:3])


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """Four iterations without a stop."""
    workdir = tmp_path_factory.mktemp("straight")
    train.run(miniature(), workdir)
    return workdir


def test_every_iteration_is_logged_once_in_strict_json(straight):
    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    lines = [json.loads(line, parse_constant=refuse) for line in (straight / "metrics.jsonl").read_text().splitlines()]
    assert [line["iteration"] for line in lines] == [0, 1, 2, 3, 4]
    assert all(metrics.is_documented(name) for line in lines for name in line if name != "iteration")
    assert [("val-core/builtin/acc/mean@1" in line) for line in lines] == [True, False, True, False, True]


def test_the_first_minibatch_is_on_policy(straight):
    first, *later = steady(straight)[1:]
    assert all(line["training/first_ratio_dev_max"] <= 1e-5 for line in (first, *later))
    assert all(line["training/rollout_probs_diff_max"] <= 1e-5 for line in (first, *later))
    assert first["actor/reward_kl_penalty"] == 0.0
    # The policy moves, and the second epoch sees it.
    assert later[-1]["actor/reward_kl_penalty"] != 0.0
    assert first["actor/ratio/max"] > 1.0 > first["actor/ratio/min"]


def test_updates_are_counted(straight):
    assert [line["training/updates"] for line in steady(straight)[1:]] == [4, 8, 12, 16]


def test_samples_and_evaluations_are_written(straight):
    rows = [json.loads(line) for line in (straight / "samples" / "000002.jsonl").read_text().splitlines()]
    assert len(rows) == 3
    for row in rows:
        assert row["response_length"] == 16 if row["finish"] == "length" else row["response_length"] <= 16
        assert row["score"] == pytest.approx(digit_reward.score(row["prompt"], row["response"], row["answer"]))
    result = json.loads((straight / "eval" / "000004.json").read_text())
    assert result["count"] == 20
    assert (straight / "report.html").exists()


@pytest.mark.slow
def test_stopping_twice_changes_no_number(tmp_path):
    """Twelve iterations, across the end of an epoch, with a KL coefficient that moves."""

    def cfg(iterations):
        made = miniature(iterations=iterations)
        data, log = dataclasses.replace(made.data, train_limit=100), dataclasses.replace(made.log, samples=16)
        return dataclasses.replace(made, data=data, log=log, ppo=dataclasses.replace(made.ppo, kl_target=0.01))

    train.run(cfg(12), tmp_path / "straight")
    for iterations in (3, 7, 12):
        train.run(cfg(iterations), tmp_path / "stopped")
    straight, stopped = (steady(tmp_path / name) for name in ("straight", "stopped"))
    # Where a run was to end it evaluates once more; that is the only difference.
    for line in (stopped[3], stopped[7]):
        for name in [n for n in line if n.startswith("val-")]:
            del line[name]
    assert stopped == straight
    assert {line["training/epoch"] for line in straight[1:]} == {0, 1}
    assert len({line["actor/reward_kl_penalty_coeff"] for line in straight[1:]}) == 12
    for i in range(1, 13):
        assert len({(tmp_path / name / "samples" / f"{i:06d}.jsonl").read_text() for name in ("straight", "stopped")}) == 1
    one, other = (states(tmp_path / name, cfg(12)) for name in ("straight", "stopped"))
    jax.tree.map(np.testing.assert_array_equal, one, other)


@pytest.mark.slow
def test_a_run_without_its_last_checkpoint_repeats_the_same_numbers(straight, tmp_path):
    cfg = miniature()
    prepared = job.prepare(cfg, tmp_path)
    with jax.set_mesh(prepared.mesh), train.Display(4) as display:
        trainer = train.Trainer(prepared, display)
        trainer.saved.wait()
        trainer.iterate(1)  # and the process dies: nothing after the warm start was saved
    del trainer
    train.run(cfg, tmp_path)
    assert steady(tmp_path) == steady(straight)


@pytest.mark.slow
def test_a_signal_ends_the_run_after_an_iteration_saved(straight, tmp_path):
    prepared = job.prepare(miniature(), tmp_path)
    with jax.set_mesh(prepared.mesh), train.Display(4) as display:
        train.Trainer(prepared, display).train([signal.SIGTERM])
    assert [line["iteration"] for line in metrics.read(tmp_path)] == [0, 1]
    assert {p.name for p in (tmp_path / "checkpoints").iterdir()} >= {"1"}
    train.run(miniature(), tmp_path)
    assert [line["iteration"] for line in metrics.read(tmp_path)] == [0, 1, 2, 3, 4]


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_ends_the_process_at_once(number):
    program = """if True:
        import os, sys
        from jax_ppo.train import _signals
        with _signals() as received:
            for _ in range(2):
                os.kill(os.getpid(), int(sys.argv[1]))
                print(received, flush=True)"""
    done = subprocess.run(
        [sys.executable, "-c", program, str(int(number))], capture_output=True, text=True, cwd=Path(__file__).parents[1]
    )
    # A shell shows 128 + the number: 143 and 130.
    assert (done.returncode, done.stdout, done.stderr) == (-number, f"[{int(number)}]\n", "")


@pytest.mark.slow
def test_one_device_or_eight(straight, tmp_path):
    one = jax.make_mesh((1, 1, 1), sharding.AXES, axis_types=(AxisType.Auto,) * 3, devices=jax.devices()[:1])
    prepared = dataclasses.replace(job.prepare(miniature(), tmp_path), mesh=one)
    train.carry_out(prepared)
    for alone, together in zip(steady(tmp_path), steady(straight), strict=True):
        assert alone.keys() == together.keys()
        for name in alone:
            assert alone[name] == pytest.approx(together[name], rel=1e-3, abs=2e-5), name
    # Sampled tokens are the same, not merely their statistics.
    samples = lambda workdir: (workdir / "samples" / "000001.jsonl").read_text()  # noqa: E731
    assert samples(tmp_path) == samples(straight)


def mesh_of(*sizes):
    devices = jax.devices()[: np.prod(sizes)]
    return jax.make_mesh(sizes, sharding.AXES, axis_types=(AxisType.Auto,) * 3, devices=devices)


@pytest.fixture(scope="module")
def eight(tmp_path_factory):
    """Three iterations on a mesh of (8, 1, 1), with the checkpoints behind the second and the third."""
    workdir = tmp_path_factory.mktemp("eight")
    train.carry_out(dataclasses.replace(job.prepare(kept(3), workdir), mesh=mesh_of(8, 1, 1)))
    return workdir


def kept(iterations, **keys):
    """The miniature that keeps its checkpoints."""
    made = miniature(iterations=iterations, **keys)
    return dataclasses.replace(made, checkpoint=configs.CheckpointConfig(every=1, keep_last=9))


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(1, 1, 1), (2, 2, 2)])
def test_a_run_continues_on_another_mesh_and_back(eight, tmp_path, sizes):
    """What was saved on eight devices that split the rows is the same on others, and the other way round."""
    shutil.copytree(eight, tmp_path, dirs_exist_ok=True)
    shutil.rmtree(tmp_path / "checkpoints" / "3")
    prepared = dataclasses.replace(job.prepare(kept(3), tmp_path), mesh=mesh_of(*sizes))
    with jax.set_mesh(prepared.mesh), train.Display(3) as display:
        trainer = train.Trainer(prepared, display)
        here = lambda: jax.device_get((trainer.learner.actor, trainer.learner.critic))  # noqa: E731
        jax.tree.map(np.testing.assert_array_equal, here(), states(eight, kept(3), 8, 1, 1, iteration=2))
        trainer.train([])
        jax.tree.map(np.testing.assert_array_equal, here(), states(tmp_path, kept(3), 8, 1, 1, iteration=3))
    there, usual = steady(tmp_path)[-1], steady(eight)[-1]
    assert there.keys() == usual.keys()
    for name in usual:
        assert there[name] == pytest.approx(usual[name], rel=1e-5, abs=1e-5), name


@pytest.mark.slow
def test_a_new_workdir_starts_from_the_checkpoint_of_another_run(eight, tmp_path):
    """With everything: the next iteration is the one that followed there."""
    path, workdir = eight / "checkpoints" / "2", tmp_path / "run"
    before = sorted((str(p), p.stat().st_mtime) for p in eight.rglob("*"))
    prepared = job.prepare(kept(3, resume=str(path)), workdir)
    assert prepared.origin == (eight, 2)
    train.carry_out(dataclasses.replace(prepared, mesh=mesh_of(8, 1, 1)))
    assert steady(workdir) == steady(eight)[3:]
    jax.tree.map(np.testing.assert_array_equal, *(states(w, kept(3), 8, 1, 1) for w in (workdir, eight)))
    assert sorted((str(p), p.stat().st_mtime) for p in eight.rglob("*")) == before
    assert sorted(p.name for p in (workdir / "checkpoints").iterdir()) == ["2", "3"]
    assert not (workdir / "builtin").exists() and (workdir / "model" / "model.safetensors").is_file()
    # The same command again continues; one that names another origin is refused.
    again = job.prepare(kept(4, resume=str(path)), workdir)
    assert again.resuming and again.origin is None and again.source == workdir / "model"
    with pytest.raises(InputError, match=r"config\.train\.resume=.*has checkpoints of its own"):
        job.prepare(kept(3, resume=str(eight)), workdir)
    with pytest.raises(InputError, match=r"no such checkpoint; there are 0, 1, 2, 3$"):
        job.prepare(kept(3, resume=str(path.with_name("7"))), tmp_path / "new")
    with pytest.raises(InputError, match=r"train.seed: 0 then, 1 now"):
        job.prepare(kept(3, resume=str(eight), seed=1), tmp_path / "new")
    with pytest.raises(InputError, match="neither auto, never, nor a run with checkpoints"):
        job.prepare(kept(3, resume=str(tmp_path / "nowhere")), tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_more_iterations_bend_a_falling_rate_and_say_so():
    def notes(schedule, iterations):
        made = kept(iterations)
        cfg = dataclasses.replace(made, actor_optim=dataclasses.replace(made.actor_optim, schedule=schedule))
        return job._bends(cfg, configs.to_dict(kept(3)))

    assert notes("constant", 9) == notes("cosine", 3) == ()
    (line,) = notes("linear", 9)
    assert line.startswith("train.iterations was 3 and is 9: actor_optim.schedule=linear now ends at iteration 9")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["grpo", "trunk"])
def test_a_run_without_a_critic_or_with_a_head_alone_continues(kind, tmp_path):
    def cfg(iterations):
        made = miniature(iterations=iterations)
        if kind == "trunk":
            return dataclasses.replace(made, critic=dataclasses.replace(made.critic, trunk="actor"))
        return dataclasses.replace(
            made,
            ppo=dataclasses.replace(made.ppo, estimator="grpo"),
            rollout=dataclasses.replace(made.rollout, batch=4, n=4),
        )

    train.run(cfg(3), tmp_path / "straight")
    for iterations in (2, 3):
        train.run(cfg(iterations), tmp_path / "stopped")
    straight, stopped = (steady(tmp_path / name)[-1] for name in ("straight", "stopped"))
    assert straight == stopped
    assert ("critic/vf_loss" in straight) == (kind == "trunk")
    assert all(metrics.is_documented(name) for name in straight if name != "iteration")
    items = {p.name for p in (tmp_path / "stopped" / "checkpoints" / "3").iterdir()}
    assert ("critic" in items) == (kind == "trunk")


def test_a_key_that_is_new_had_its_default(straight, tmp_path):
    """A run of an earlier version continues under a later one."""
    old = json.loads((straight / "config.json").read_text())
    del old["ppo"]["estimator"], old["critic"]
    (tmp_path / "checkpoints" / "1").mkdir(parents=True)
    (tmp_path / "config.json").write_text(json.dumps(old))
    assert job._before(miniature(), tmp_path)[1]


def test_another_configuration_does_not_continue_a_run(straight):
    other = dataclasses.replace(miniature(), ppo=dataclasses.replace(miniature().ppo, gamma=0.5))
    with pytest.raises(InputError, match=r"ppo.gamma: 1.0 then, 0.5 now"):
        job.prepare(other, straight)
    with pytest.raises(InputError, match="has checkpoints"):
        job.prepare(miniature(resume="never"), straight)


def test_a_finished_run_has_nothing_left_to_do(straight, capsys):
    before = (straight / "metrics.jsonl").read_text()
    assert train.run(miniature(), straight) == {}
    assert (straight / "metrics.jsonl").read_text() == before
    assert "iteration 4 of 4 is done" in capsys.readouterr().out


def test_evaluate_reads_the_newest_checkpoint(straight, tmp_path):
    cfg = miniature()
    result = evaluate.run(cfg, str(straight), tmp_path)
    assert result["count"] == 24  # all that were kept, not the few of an evaluation during training
    assert (straight / "eval" / "000004-full.json").exists()
    start = evaluate.run(cfg, str(straight / "model"), tmp_path)
    assert (tmp_path / "eval" / "000000-full.json").exists()
    assert start["count"] == 24


@pytest.mark.parametrize(("which", "head"), [("actor", "lm_head"), ("critic", "score")])
def test_an_export_is_what_was_trained(straight, tmp_path, convert, which, head):
    convert.export_model(straight, tmp_path / "export", which)
    config = hf.load_config(tmp_path / "export")
    exported = hf.load_params(tmp_path / "export", config, dtype="float32", head=head)
    shapes = evaluate.checkpoint.abstract(*convert.places(config, which))
    trained = evaluate.checkpoint.restore_params(straight, shapes, item=which)[1]
    assert hf.stored_head(tmp_path / "export") == head
    jax.tree.map(np.testing.assert_array_equal, exported, trained)
    start = hf.load_params(straight / "model", config, dtype="float32", head=head)
    for one, other in zip(jax.tree.leaves(exported), jax.tree.leaves(start), strict=True):
        assert np.any(np.asarray(one) != other), "training changes every parameter"


def test_transformers_answers_as_the_run_does(straight, tmp_path, convert):
    """It finds every tensor that it looks for, uses all that it finds, and computes the same logits."""
    torch = pytest.importorskip("torch", reason="compares with transformers, which computes with torch")
    convert.export_model(straight, tmp_path / "export")
    model, report = AutoModelForCausalLM.from_pretrained(tmp_path / "export", dtype=torch.float32, output_loading_info=True)
    assert not any(report.values()), report
    config, tokenizer = hf.load_config(tmp_path / "export"), AutoTokenizer.from_pretrained(tmp_path / "export")
    tokens = np.array(tokenizer("17 + 25 = ?")["input_ids"])[None]
    params = hf.load_params(tmp_path / "export", config, dtype="float32")
    with torch.no_grad():
        theirs = model.eval()(torch.tensor(tokens)).logits.numpy()
    ours = np.asarray(jax.jit(qwen.logits, static_argnames="config")(params, config, tokens.astype(np.int32)))
    assert np.max(np.abs(ours - theirs)) < 1e-4 * theirs.std()


@pytest.mark.slow
def test_a_run_continues_without_the_directories_it_came_from(straight, tmp_path, convert):
    """Its critic has another shape than its actor, and nothing needs their weights after the start."""
    actor, critic, workdir = tmp_path / "actor", tmp_path / "critic", tmp_path / "run"
    shutil.copytree(straight / "model", actor)
    shape = dataclasses.replace(hf.load_config(actor), num_hidden_layers=1)
    hf.save_params(tiny.redrawn(0, shape, "score"), shape, critic, dtype="float32")
    cfg = configs.to_dict(miniature(iterations=1))
    cfg["model"]["path"], cfg["critic"]["path"] = str(actor), str(critic)
    cfg["ppo"]["kl_coef"], cfg["warmstart"]["steps"] = 0.0, 0
    train.run(configs.resolve(cfg), workdir)
    assert not list(workdir.glob("*/*.safetensors"))
    shutil.rmtree(actor)
    shutil.rmtree(critic)
    cfg["train"]["iterations"] = 2
    train.run(configs.resolve(cfg), workdir)
    assert [line["iteration"] for line in metrics.read(workdir)] == [0, 1, 2]
    convert.export_model(workdir, tmp_path / "export", "critic")
    assert hf.load_config(tmp_path / "export") == shape


@pytest.mark.slow
def test_a_broken_reward_function_ends_the_run(tmp_path):
    (tmp_path / "mine.py").write_text("def score(prompt, response, answer):\n    return float('nan')\n")
    cfg = dataclasses.replace(miniature(), reward=configs.RewardConfig(custom=f"{tmp_path}/mine.py:score"))
    with pytest.raises(RunError, match="row 0"):
        train.run(cfg, tmp_path / "run")


def test_utilisation_is_of_a_known_peak(straight, monkeypatch):
    """On a CPU there is none; where there is one, it is the work of the updates over time, devices and peak."""
    line = metrics.read(straight)[1]
    assert line["perf/update_tflop/actor"] > line["perf/update_tflop/critic"] > 0 and "perf/mfu/actor" not in line
    monkeypatch.setattr(train.forecast, "peak_flops", lambda kind: 1e12)
    trainer = object.__new__(train.Trainer)
    trainer.seconds = {"update_actor": 2.0}
    found = trainer._utilisation({"perf/update_tflop/actor": 4.0})
    assert found == {"perf/mfu/actor": 4.0 / 2.0 / jax.device_count()}
