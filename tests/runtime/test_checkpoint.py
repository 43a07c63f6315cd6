"""Checkpoints survive what happens to them: processes that die, disks that fill up, other meshes, and their own bookkeeping."""

import gc
import math
import shutil
import signal
import subprocess
import sys
import warnings
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jax_ppo.ppo import optimizer
from jax_ppo.runtime import checkpoint
from jax_ppo.runtime.checkpoint import Checkpoints, abstract, restore_params
from jax_ppo.types import InputError, RunError

RATE = optimizer.schedule(1e-2, warmup=0, kind="linear", total=9)
ADAM = optimizer.optimizer(RATE, clip_norm=1.0, b1=0.9, b2=0.99, weight_decay=0.0)
REST = {"iteration": 3, "kl_coef": 0.1 + 0.2, "config": {"a": {"b": [1, None, "ü"]}}}
FOLDED = PartitionSpec("fsdp")


def state(seed, dtype=jnp.float32, transform=ADAM):
    """A train state of random numbers, its moments and counters away from zero."""
    shapes = {name: {"kernel": jax.ShapeDtypeStruct(shape, dtype)} for name, shape in {"a": (16, 8), "b": (8,)}.items()}
    rng = np.random.default_rng(seed)

    def leaf(x):
        return jnp.asarray(rng.normal(size=x.shape) if jnp.issubdtype(x.dtype, jnp.inexact) else rng.integers(1, 10**9), x.dtype)

    return jax.tree.map(leaf, jax.eval_shape(partial(optimizer.start, transform=transform), shapes))


def placed(tree):
    """Shapes and shardings of what exists, to restore onto."""
    return abstract(tree, jax.tree.map(lambda x: x.sharding, tree))


def assert_equal(found, expected):
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(found), jax.tree.leaves(expected), strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape, path
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes(), path


def opened(folder, keep_last=1, keep_best=1):
    return Checkpoints(folder, keep_last=keep_last, keep_best=keep_best)


def saved(folder, scores, **keep):
    """Saves iterations 10, 20, ... with these scores, each made from its number; returns the open checkpoints."""
    made = opened(folder, **keep)
    for i, score in enumerate(scores, 1):
        made.save(10 * i, state(10 * i), state(10 * i + 1), {"iteration": 10 * i}, score)
    made.wait()
    return made


def on_disk(folder):
    return sorted(p.name for p in (folder / "checkpoints").iterdir())


def restored(folder):
    opened(folder)  # as a run does first
    like = placed(state(0))
    return checkpoint.restore(folder, like, like)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_what_was_saved_comes_back_bit_by_bit(tmp_path, dtype):
    actor, critic = state(1, dtype), state(2, dtype)
    assert int(actor.opt_state[1].count) > 0 and int(actor.skipped) > 0 and actor.opt_state[1].mu["b"]["kernel"].dtype == dtype
    first = opened(tmp_path)
    first.save(3, actor, critic, REST, 0.5)
    first.close()
    iteration, found_actor, found_critic, rest, skipped = checkpoint.restore(tmp_path, placed(actor), placed(critic))
    assert (iteration, rest, skipped) == (3, REST, [])
    assert_equal(found_actor, actor)
    assert_equal(found_critic, critic)


def test_a_save_holds_the_state_of_its_moment(tmp_path):
    actor, critic = state(1), state(2)
    expected = jax.device_get(actor)
    made = opened(tmp_path)
    made.save(1, actor, critic, {}, None)
    overwrite = jax.jit(lambda tree: jax.tree.map(lambda x: x * 0 - 1, tree), donate_argnums=0)
    jax.block_until_ready(overwrite(actor))  # the next update donates the buffers while they are being written
    made.wait()
    assert_equal(restored(tmp_path)[1], expected)


@pytest.mark.parametrize(
    ("scores", "keep_last", "keep_best", "left"),
    [
        ([0.5, 0.6, 0.4, math.nan, 0.3], 1, 1, [20, 50]),
        ([0.5, 0.6, 0.4, 0.3, 0.2], 2, 1, [20, 40, 50]),
        ([0.5, math.nan, 0.4, 0.3], 1, 1, [10, 40]),
        ([0.1, 0.5, 0.4, 0.3], 1, 2, [20, 30, 40]),
        ([0.5, 0.5, 0.5], 1, 1, [30]),
        ([None, math.inf, None, math.nan], 2, 2, [30, 40]),
        ([0.9, 0.2, 0.1], 1, 0, [30]),
        ([0.0, None, None], 1, 1, [10, 30]),
    ],
)
def test_the_newest_and_the_best_stay(tmp_path, scores, keep_last, keep_best, left):
    made = saved(tmp_path, scores, keep_last=keep_last, keep_best=keep_best)
    made.close()
    assert on_disk(tmp_path) == [str(step) for step in left]
    assert opened(tmp_path).steps() == left
    assert restored(tmp_path)[0] == 10 * len(scores)


def test_the_best_is_remembered_by_the_next_process(tmp_path):
    saved(tmp_path, [0.5, 0.6, 0.4]).close()
    later = opened(tmp_path)
    for step, score in ((40, 0.55), (50, None)):
        later.save(step, state(step), state(step + 1), {}, score)
    later.close()
    assert on_disk(tmp_path) == ["20", "50"]


def broken(folder):
    """A workdir with a whole checkpoint 10, and what dying processes and clumsy people leave behind."""
    saved(folder, [0.1, 0.2, 0.3, 0.4, 0.5], keep_last=5).close()
    inside = folder / "checkpoints"
    shutil.rmtree(inside / "20" / "critic")
    (inside / "30" / "rest" / "metadata").write_text('{"rest": {"iter')
    for path in (inside / "40").iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    (inside / "50" / "actor" / "_METADATA").write_text("")
    (inside / "60.orbax-checkpoint-tmp").mkdir()
    (inside / "60.orbax-checkpoint-tmp" / "actor").mkdir()
    (inside / "60.orbax-checkpoint-tmp-1").mkdir()


def test_broken_checkpoints_are_passed_over_and_named(tmp_path):
    broken(tmp_path)
    made = opened(tmp_path, keep_last=5)
    iteration, actor, critic, rest, skipped = restored(tmp_path)
    assert iteration == 10 and rest == {"iteration": 10}
    assert_equal(actor, state(10))
    assert_equal(critic, state(11))
    assert [line.split(":")[0] for line in skipped] == [f"checkpoint {step} is broken" for step in (50, 40, 30, 20)]
    assert all("\n" not in line and len(line) < 500 for line in skipped)
    assert "Expecting value" in skipped[0] and "actor" in skipped[1] and "Unterminated" in skipped[2] and "critic" in skipped[3]
    made.discard_after(iteration)
    for step in (20, 30, 60):
        made.save(step, state(step), state(step + 1), {}, 0.0)
    made.close()
    assert on_disk(tmp_path) == ["10", "20", "30", "60"]
    assert restored(tmp_path)[0] == 60


def test_nothing_whole_is_an_error_that_names_everything(tmp_path):
    saved(tmp_path, [0.1]).close()
    shutil.rmtree(tmp_path / "checkpoints" / "10" / "actor")
    with pytest.raises(RunError, match=r"no checkpoint can be read: checkpoint 10 is broken: .*actor"):
        restored(tmp_path)


@pytest.mark.parametrize("step", [20, 19, 10, 5])
def test_a_checkpoint_that_is_not_the_newest_is_refused(tmp_path, step):
    made = saved(tmp_path, [0.1, 0.2], keep_last=2)
    with pytest.raises(RunError, match=rf"checkpoint {step}: .* already holds \[10, 20\]"):
        made.save(step, state(1), state(2), {}, None)
    made.close()
    assert on_disk(tmp_path) == ["10", "20"]
    assert_equal(restored(tmp_path)[1], state(20))


def test_a_relative_workdir(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    saved(Path("runs/x"), [0.1]).close()
    assert on_disk(tmp_path / "runs" / "x") == ["10"]
    assert restore_params(Path("runs/x"), placed(state(0)).params)[0] == 10


def mesh(data, fsdp):
    devices = np.array(jax.devices()[: data * fsdp]).reshape(data, fsdp)
    return jax.sharding.Mesh(devices, ("data", "fsdp"), axis_types=(AxisType.Auto,) * 2)


def on(where, tree):
    """The state on a mesh: everything with an axis of 8 or 16 split, the counters everywhere."""
    return jax.tree.map(lambda x: NamedSharding(where, FOLDED if x.ndim else PartitionSpec()), tree)


@pytest.mark.parametrize(("before", "after"), [((1, 8), (1, 1)), ((1, 8), (2, 4)), ((1, 1), (4, 2)), ((2, 4), (8, 1))])
def test_another_mesh(tmp_path, before, after):
    actor, critic = state(1), state(2)
    first = opened(tmp_path)
    first.save(1, *(jax.device_put(x, on(mesh(*before), x)) for x in (actor, critic)), {}, None)
    first.close()
    wanted = [on(mesh(*after), x) for x in (actor, critic)]
    with jax.set_mesh(mesh(*after)):
        _, *found, _, _ = checkpoint.restore(tmp_path, abstract(actor, wanted[0]), abstract(critic, wanted[1]))
        params = restore_params(tmp_path, abstract(actor.params, wanted[0].params))[1]
    for a, b, where in zip([*found, params], [actor, critic, actor.params], [*wanted, wanted[0].params], strict=True):
        assert_equal(a, b)
        assert jax.tree.map(lambda x: x.sharding, a) == where


def test_parameters_alone_need_neither_optimizer_nor_critic_nor_rest(tmp_path):
    other = optimizer.optimizer(RATE, clip_norm=0.0, b1=0.9, b2=0.99, weight_decay=0.1)
    actor = state(1, transform=other)
    assert jax.tree.structure(actor) != jax.tree.structure(state(1))
    made = opened(tmp_path)
    made.save(7, actor, state(2), {}, None)
    made.close()
    for item in ("critic", "rest"):
        shutil.rmtree(tmp_path / "checkpoints" / "7" / item)
    iteration, params, skipped = restore_params(tmp_path, placed(state(0)).params)
    assert (iteration, skipped) == (7, [])
    assert_equal(params, actor.params)


def test_parameters_of_the_newest_whole_checkpoint_and_nothing_changes_on_disk(tmp_path):
    broken(tmp_path)
    before = sorted(str(p) for p in tmp_path.rglob("*"))
    iteration, params, skipped = restore_params(tmp_path, placed(state(0)).params)
    assert iteration == 30  # its actor is whole
    assert_equal(params, state(30).params)
    assert [line.split(":")[0] for line in skipped] == ["checkpoint 50 is broken", "checkpoint 40 is broken"]
    # A run that goes on may be writing there: a reader leaves its half-written folders alone.
    assert sorted(str(p) for p in tmp_path.rglob("*")) == before


def test_parameters_of_no_checkpoint(tmp_path):
    with pytest.raises(InputError, match="no checkpoint yet"):
        restore_params(tmp_path, placed(state(0)).params)
    (tmp_path / "checkpoints" / "30").mkdir(parents=True)
    with pytest.raises(InputError, match="no checkpoint can be read: checkpoint 30 is broken"):
        restore_params(tmp_path, placed(state(0)).params)


@pytest.mark.parametrize("item", ["actor", "critic"])
@pytest.mark.parametrize("iteration", [None, 10, 20])
def test_parameters_of_a_certain_network_and_checkpoint(tmp_path, item, iteration):
    saved(tmp_path, [0.1, 0.2], keep_last=2).close()
    found, params, _ = restore_params(tmp_path, placed(state(0)).params, item=item, iteration=iteration)
    assert found == (iteration or 20)
    assert_equal(params, state(found + (item == "critic")).params)


def test_a_certain_checkpoint_has_no_substitute(tmp_path):
    broken(tmp_path)
    with pytest.raises(InputError, match=r"no checkpoint can be read: checkpoint 50 is broken: [^;]*$"):
        restore_params(tmp_path, placed(state(0)).params, iteration=50)
    with pytest.raises(InputError, match=r"no checkpoint 7; there are 10, 20, 30, 40, 50$"):
        restore_params(tmp_path, placed(state(0)).params, iteration=7)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_parameters_keep_the_dtype_they_were_saved_in(tmp_path, dtype):
    made = opened(tmp_path)
    made.save(1, state(1, dtype), state(2), {}, None)
    made.close()
    for asked in (jnp.float32, jnp.bfloat16):
        assert_equal(restore_params(tmp_path, placed(state(0, asked)).params, cast=False)[1], state(1, dtype).params)
        params = restore_params(tmp_path, placed(state(0, asked)).params)[1]
        assert_equal(params, jax.tree.map(lambda x, asked=asked: x.astype(asked), state(1, dtype).params))


@pytest.mark.parametrize(("item", "other"), [("actor", "critic"), ("critic", "actor")])
def test_parameters_without_a_run(tmp_path, item, other):
    checkpoint.save_params(tmp_path, state(1).params, item)
    iteration, params, skipped = restore_params(tmp_path, placed(state(0)).params, item=item)
    assert (iteration, skipped) == (0, [])
    assert_equal(params, state(1).params)
    with pytest.raises(InputError, match=f"checkpoint 0 is broken: it has no {other}, only a {item}"):
        restore_params(tmp_path, placed(state(0)).params, item=other)


@pytest.mark.parametrize("cast", [True, False])
def test_parameters_of_another_model(tmp_path, cast):
    """Neither cut, padded, left out nor made up."""
    saved(tmp_path, [0.1]).close()
    params = placed(state(0)).params
    leaf = params["b"]["kernel"]
    wide = jax.ShapeDtypeStruct((24, 8), leaf.dtype, sharding=leaf.sharding)
    for other, said in (
        (params | {"a": {"kernel": wide}}, "parameter a/kernel: (16, 8) in the checkpoint, (24, 8) in the model"),
        ({"a": params["a"]}, "parameter b/kernel: (8,) in the checkpoint, none in the model"),
        (params | {"c": leaf}, "parameter c: none in the checkpoint, (8,) in the model"),
    ):
        with pytest.raises(InputError) as caught:
            restore_params(tmp_path, other, cast=cast)
        assert str(caught.value).endswith(f"no checkpoint can be read: checkpoint 10 is broken: {said}")


def test_where_a_path_leads(tmp_path, monkeypatch):
    run, home = tmp_path / "checkpoints" / "7", tmp_path / "home"
    (run / "checkpoints" / "12").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(home))
    assert checkpoint.locate(run) == (run, None), "a run whose name is a number"
    assert checkpoint.locate(run / "checkpoints" / "12") == (run, 12)
    assert checkpoint.locate(Path("checkpoints/7/checkpoints/000012")) == (run, 12)
    assert checkpoint.locate(run / "checkpoints") == (run / "checkpoints", None)
    assert checkpoint.locate(Path("~/x")) == (home / "x", None)
    assert checkpoint.locate(tmp_path / "12") == (tmp_path / "12", None)


def test_nothing_is_printed(tmp_path, capfd):
    broken(tmp_path)
    made = opened(tmp_path, keep_last=5)
    made.discard_after(restored(tmp_path)[0])
    made.check()
    made.close()
    restore_params(tmp_path, placed(state(0)).params)
    assert capfd.readouterr() == ("", "")


# A process of its own, because it limits the size of its files, or kills itself. `big` holds the writing thread up for long.
PROGRAM = """
import os, resource, signal, sys, time
from pathlib import Path
import jax, jax.numpy as jnp
from jax_ppo.ppo import optimizer
from jax_ppo.runtime import cli
from jax_ppo.runtime.checkpoint import Checkpoints, abstract, restore

transform = optimizer.optimizer(lambda _: 1e-2, clip_norm=1.0, b1=0.9, b2=0.99, weight_decay=0.0)

def state(value, size):
    noise = jax.random.normal(jax.random.key(0), (size, 8))
    return optimizer.start({"w": {"kernel": noise.at[0].set(value)}}, transform)

def job(config, values):
    saved, size = Checkpoints(values.workdir, keep_last=1, keep_best=1), int(values.size)
    saved.save(1, state(1.0, 16), state(1.0, 16), {}, 0.1)
    saved.wait()
    if values.ending == "killed":
        saved.save(2, state(2.0, size), state(2.0, size), {}, 0.2)
        os.kill(os.getpid(), signal.SIGKILL)
    if values.ending == "torn":
        saved.save(2, state(2.0, 16), state(2.0, 16), {}, 0.0)
        saved.wait()
        for path in (values.workdir / "checkpoints" / "2" / "critic" / "d").iterdir():
            path.write_bytes(path.read_bytes()[:-9])
        like = abstract(state(0.0, 16), jax.tree.map(lambda x: x.sharding, state(0.0, 16)))
        sys.stdout.write(f"{restore(values.workdir, like, like)[0::4]}")
        return
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
    saved.save(2, state(2.0, size), state(2.0, size), {}, 0.2)
    began = time.monotonic()
    while time.monotonic() < began + 60:
        if values.ending == "check":
            saved.check()
        elif values.ending == "close":
            saved.close()
        else:
            saved.save(3, state(3.0, size), state(3.0, size), {}, 0.3)
        time.sleep(0.01)

strings = {"ending": "how it ends", "size": "of the second checkpoint"}
sys.exit(cli.main(sys.argv, job, module="test", strings=strings))
"""


def program(folder, ending, size):
    config = Path(__file__).parents[2] / "configs" / "quickstart.py"
    flags = [f"--config={config}", f"--workdir={folder}", f"--ending={ending}", f"--size={size}"]
    command = [sys.executable, "-c", PROGRAM, *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, cwd=Path(__file__).parents[2])


@pytest.mark.parametrize("ending", ["check", "close", "save"])
def test_a_full_disk_ends_the_run_with_one_line_and_the_checkpoint_before_is_whole(tmp_path, ending):
    done = program(tmp_path, ending, 4096)
    assert done.returncode == 1, done.stderr
    assert done.stdout == ""
    line = done.stderr.removesuffix("\n")
    assert "\n" not in line
    assert line.startswith("failed: saving checkpoint 2 failed: ") and "File too large" in line
    assert_resumes_from_one(tmp_path)


def test_writes_that_never_began_are_not_news():
    async def write():
        pass

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        checkpoint._quiet()
        write()
        gc.collect()
        warnings.warn("coroutine lost", RuntimeWarning, stacklevel=1)
    assert [str(warning.message) for warning in said] == ["coroutine lost"]


def test_killed_while_saving(tmp_path):
    done = program(tmp_path, "killed", 200_000)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert (done.stdout, done.stderr) == ("", "")
    assert any("tmp" in name for name in on_disk(tmp_path))  # it was in the middle
    assert_resumes_from_one(tmp_path)


def test_torn_data_is_passed_over_quietly(tmp_path):
    done = program(tmp_path, "torn", 16)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("(1, ['checkpoint 2 is broken: OUT_OF_RANGE")


def assert_resumes_from_one(folder):
    params = {"w": {"kernel": jnp.zeros((16, 8))}}
    like = placed(optimizer.start(params, ADAM))
    made = opened(folder)
    iteration, actor, _, _, skipped = checkpoint.restore(folder, like, like)
    assert (iteration, skipped) == (1, [])
    assert np.all(np.asarray(actor.params["w"]["kernel"])[0] == 1.0)
    made.save(2, actor, actor, {}, 0.2)
    made.close()
    assert on_disk(folder) == ["2"]


def test_the_error_is_one_short_line():
    line = checkpoint._line(ValueError('OUT_OF_RANGE: "x": too large [os_error_code=\'27\'] [tensorstore_spec={"a": 1}]\nmore'))
    assert line == "OUT_OF_RANGE: \"x\": too large [os_error_code='27']"
    long = checkpoint._line(ValueError(f"writing {'x' * 1000}: No space left on device"))
    assert len(long) <= 300 and long.startswith("writing xx") and long.endswith("xx: No space left on device")
    assert checkpoint._line(KeyError("no 'actor'")) == "no 'actor'"
    assert checkpoint._line(ValueError()) == "ValueError"
