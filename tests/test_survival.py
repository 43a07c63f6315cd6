"""A run that is killed again and again, each time without a warning, ends with the numbers of one that was left alone."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest

from jax_ppo import sharding
from jax_ppo.config import default_config, resolve
from jax_ppo.models import hf
from jax_ppo.runtime import checkpoint, metrics
from jax_ppo.steps import Steps

ROOT = Path(__file__).parents[1]
DEATHS = 10
CONFIG = f"""
from jax_ppo.config import default_config


def get_config():
    config = default_config()
    config.model.path = config.data.path = "builtin"
    config.data.max_prompt_tokens, config.data.train_limit, config.data.eval_limit = 40, 100, 16
    config.warmstart.steps, config.warmstart.batch = 8, 16
    config.rollout.batch, config.rollout.max_response_tokens = 16, 16
    config.ppo.minibatches, config.ppo.micro_tokens = 2, 1024
    config.reward.custom = {str(ROOT / "tests" / "digit_reward.py")!r} + ":score"
    config.actor_optim.lr = config.critic_optim.lr = 1e-3
    config.eval.every = 4
    config.checkpoint.every = 1
    config.train.iterations = 12
    return config
"""
# What is measured on the clock or on the machine.
UNSTEADY = ("timing_s/", "time/", "perf/")


def start(config, workdir, cache):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_COMPILATION_CACHE_DIR": str(cache)}
    environment |= {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    command = [sys.executable, "-m", "jax_ppo.main", f"--config={config}", f"--workdir={workdir}"]
    return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def steady(workdir):
    return [{k: v for k, v in line.items() if not k.startswith(UNSTEADY)} for line in metrics.read(workdir)]


def newest(workdir):
    """Both networks of the newest checkpoint, with everything that their optimizers remember."""
    config = resolve(json.loads((workdir / "config.json").read_text()))
    model = hf.load_config(workdir / "model")
    mesh = jax.make_mesh((1, 1, 1), sharding.AXES, axis_types=(jax.sharding.AxisType.Auto,) * 3, devices=jax.devices()[:1])
    with jax.set_mesh(mesh):
        steps = Steps(config, model, model, mesh)
        wanted = [checkpoint.abstract(n.state_shapes("float32"), n.state_shardings) for n in (steps.actor, steps.critic)]
        return jax.device_get(checkpoint.restore(workdir, *wanted)[:3])


@pytest.mark.slow
def test_ten_deaths_change_no_number(tmp_path):
    assert default_config().checkpoint.keep_last == 1
    config, cache, rng = tmp_path / "small.py", tmp_path / "cache", random.Random(0)
    config.write_text(CONFIG)
    for name in ("straight", "again"):
        began = time.monotonic()
        process = start(config, tmp_path / name, cache)
        said, _ = process.communicate()
        assert process.returncode == 0, said
        whole = time.monotonic() - began  # of the second one: its programs lie in the cache, like those of all that follow
    assert steady(tmp_path / "again") == steady(tmp_path / "straight")
    deaths, restarts = 0, 0
    while True:
        process = start(config, tmp_path / "killed", cache)
        if deaths == DEATHS:
            said, _ = process.communicate()
            assert process.returncode == 0, said
            break
        try:
            process.communicate(timeout=rng.uniform(0.3, 0.9) * whole)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            process.communicate()
            deaths += 1
        else:
            # It got to the end first: the next deaths are those of another run from the start.
            assert process.returncode == 0
            assert steady(tmp_path / "killed") == steady(tmp_path / "straight")
            shutil.rmtree(tmp_path / "killed")
            restarts += 1
            assert restarts < 20
    assert steady(tmp_path / "killed") == steady(tmp_path / "straight")
    for one, other in zip(newest(tmp_path / "killed"), newest(tmp_path / "straight"), strict=True):
        jax.tree.map(np.testing.assert_array_equal, one, other)
