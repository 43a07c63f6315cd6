"""Choosing an attention, with a faked platform and kernels that work, fail or lie."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest
import tiny

from jax_ppo import config, probe, sharding, steps
from jax_ppo.models import attention
from jax_ppo.types import InputError

SPLASH, CUDNN = partial(attention.by_splash, interpret=True), partial(attention.by_cudnn, implementation="xla")


@pytest.fixture
def pretend(monkeypatch):
    """Sets the platform, and which function stands where the kernels are."""
    probe.failure.cache_clear()

    def set_up(backend, *, splash=SPLASH, cudnn=CUDNN):
        monkeypatch.setattr(jax, "default_backend", lambda: backend)
        monkeypatch.setattr(attention, "by_splash", splash)
        monkeypatch.setattr(attention, "by_cudnn", cudnn)

    yield set_up
    probe.failure.cache_clear()


def choose(asked, dtype="bfloat16"):
    return probe.choose(asked, tiny.MODEL, dtype, jax.jit)


def broken(*arrays):
    raise NotImplementedError("no such kernel\nand many lines of a stack")


def lies(q, k, v, segment_ids):
    """Causal, but across segments."""
    return CUDNN(q, k, v, jnp.ones_like(segment_ids))


def backward_lies(q, k, v, segment_ids):
    return CUDNN(q, k, jax.lax.stop_gradient(v), segment_ids)


@pytest.mark.parametrize("asked", ["auto", "full", "blockwise"])
def test_a_cpu_runs_xla_without_trying_anything(pretend, asked):
    pretend("cpu", splash=broken, cudnn=broken)
    assert choose(asked) == (asked, "")
    assert probe.failure.cache_info().misses == 0


@pytest.mark.parametrize(("backend", "kernel"), [("tpu", "splash"), ("gpu", "cudnn")])
@pytest.mark.parametrize("asked", ["auto", "by name"])
def test_the_kernel_of_the_platform_where_it_works(pretend, backend, kernel, asked):
    pretend(backend)
    chosen = choose(kernel if asked == "by name" else asked)
    assert chosen == (kernel, "")
    assert chosen.describe(64) == chosen.describe(4096) == kernel


def test_it_is_tried_once(pretend):
    calls = []
    pretend("gpu", cudnn=lambda *x: calls.append(1) or CUDNN(*x))
    assert choose("auto") == choose("auto") == choose("cudnn") == ("cudnn", "")
    assert len(calls) == 1


def test_inside_the_mesh_of_a_run(pretend):
    """Two rows on one device are tried, though the mesh has eight."""
    pretend("tpu")
    with jax.set_mesh(sharding.make_mesh(2, 2, 2)):
        assert choose("auto") == ("splash", "")


@pytest.mark.parametrize(
    ("kernel", "reason"),
    [
        (broken, "NotImplementedError: no such kernel"),
        (lies, "the result is wrong by "),
        (backward_lies, "dv is wrong by 1 of the largest entry"),
        (lambda *x: CUDNN(*x) * jnp.nan, "the result is wrong by nan"),
    ],
)
def test_what_fails_or_lies_is_left_for_xla_and_said(pretend, kernel, reason):
    pretend("gpu", cudnn=kernel)
    chosen = choose("auto")
    assert chosen.method == "auto"
    assert chosen.note.startswith(f"cudnn does not run here: {reason}")
    assert chosen.describe(64) == f"full; {chosen.note}"
    assert chosen.describe(4096) == f"blockwise; {chosen.note}"
    assert "\n" not in chosen.note
    with pytest.raises(InputError, match=r"^config.model.attention='cudnn': does not run here: .*; auto, full and blockwise do$"):
        choose("cudnn")


@pytest.mark.parametrize("asked", ["cudnn", "splash"])
def test_a_kernel_of_another_platform_is_refused(asked):
    """By the steps of a run, before there is a weight."""
    wanted = config.Config(model=config.ModelConfig(attention=asked))
    with pytest.raises(InputError) as error:
        steps.Steps(wanted, tiny.MODEL, None, sharding.make_mesh(1, -1, 1))
    words = {"cudnn": "a CUDA GPU", "splash": "a TPU"}[asked]
    reason = f"it needs {words}, and this is cpu; auto, full and blockwise do"
    assert str(error.value) == f"config.model.attention='{asked}': does not run here: {reason}"


def test_the_real_kernels_of_other_platforms_do_not_prove_themselves_here():
    """What a CPU makes of them is one readable line, so a platform without them falls back too."""
    for kernel in ("cudnn", "splash"):
        reason = probe.failure(kernel, 2, 64, "bfloat16", jax.jit)
        assert reason and "\n" not in reason and len(reason) < 300, reason
