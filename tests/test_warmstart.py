"""The warm start on a tiny Qwen: it learns by heart, tells the loss that a plain loop computes, and refuses one that is not finite."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from jax.sharding import AxisType, Mesh

from jax_ppo import sharding
from jax_ppo.config import Config, ModelConfig, WarmstartConfig
from jax_ppo.models import qwen
from jax_ppo.types import Params, RunError
from jax_ppo.warmstart import warm_start

VOCAB = 64
MODEL = tiny.model(vocab_size=VOCAB, tie_word_embeddings=True)


@pytest.fixture(scope="module", autouse=True)
def quick_compilation() -> Iterator[None]:
    """Every call compiles programs of its own; without most optimisations that takes half the time."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture(scope="module")
def mesh() -> Mesh:
    return jax.make_mesh((1, 1, 1), sharding.AXES, axis_types=(AxisType.Auto,) * 3, devices=jax.devices()[:1])


def fresh(seed: int, mesh: Mesh) -> Params:
    """Parameters with std 0.2, norm weights around 1 and biases that are not zero, on the mesh."""
    rng = np.random.default_rng(seed)

    def draw(path: Any, leaf: jax.Array) -> jax.Array:
        norm = "norm" in jax.tree_util.keystr(path)
        return jnp.float32(rng.normal(norm, 0.3 if norm else 0.2, leaf.shape))

    params = jax.tree_util.tree_map_with_path(draw, jax.eval_shape(lambda: qwen.init(jax.random.key(0), MODEL)))
    return jax.device_put(params, sharding.parameter_specs(params, mesh))


def config(steps: int, batch: int, lr: float) -> Config:
    return dataclasses.replace(
        Config(), model=ModelConfig(compute_dtype="float32"), warmstart=WarmstartConfig(steps=steps, batch=batch, lr=lr)
    )


def run(
    mesh: Mesh, config: Config, prompts: list[np.ndarray], responses: list[np.ndarray], shape: tuple[int, int], params: Params
) -> tuple[Params, float, int]:
    """The new parameters, the loss, and how often progress was told."""
    told: list[None] = []
    with jax.set_mesh(mesh):
        after, loss = warm_start(config, MODEL, mesh, params, prompts, responses, shape, lambda: told.append(None))
    return after, loss, len(told)


def sequences(lengths: list[tuple[int, int]]) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Random prompts and responses of these lengths."""
    rng = np.random.default_rng(0)
    draw = lambda n: rng.integers(0, VOCAB, n).astype(np.int32)  # noqa: E731
    return [draw(p) for p, _ in lengths], [draw(n) for _, n in lengths]


@jax.jit
def negative_log_likelihood(params: Params, row: jax.Array) -> jax.Array:
    """[T - 1]: what the tokens of a single sequence cost, from the second on."""
    logprobs = jax.nn.log_softmax(qwen.logits(params, MODEL, row[None])[0, :-1])
    return -jnp.take_along_axis(logprobs, row[1:, None], axis=-1)[:, 0]


def padded(prompt: np.ndarray, response: np.ndarray) -> np.ndarray:
    """[16]: one sequence alone; causality makes the zeros behind it harmless."""
    row = np.zeros(16, np.int32)
    row[: len(prompt) + len(response)] = np.concatenate([prompt, response])
    return row


def test_it_learns_demonstrations_by_heart(mesh: Mesh) -> None:
    """Eight random sequences, shown 150 times; a response of random tokens costs log(64) = 4.16 nats a token or more before."""
    prompts, responses = sequences([(3, 5), (4, 8), (2, 6), (6, 2), (5, 7), (2, 3), (4, 4), (3, 8)])
    params = fresh(0, mesh)
    before = jax.tree.map(np.array, params)
    after, loss, told = run(mesh, config(150, 8, 1e-2), prompts * 150, responses * 150, (8, 16), params)
    assert told == 150
    assert loss < 0.01
    for prompt, response in zip(prompts, responses, strict=True):
        costs = [
            np.asarray(negative_log_likelihood(p, padded(prompt, response)))[len(prompt) - 1 :][: len(response)]
            for p in (before, after)
        ]
        assert costs[0].mean() > 3
        assert costs[1].max() < 0.01
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(after), jax.tree.leaves(before), strict=True):
        assert np.any(np.asarray(a) != b), jax.tree_util.keystr(path)


def test_the_loss_is_that_of_every_token_of_the_last_updates(mesh: Mesh) -> None:
    """Twenty updates without movement. The last two are told, and they are cut into one and four micro-batches."""
    small, large = [(1, 2)] * 4, [(9, 7), (5, 11), (8, 8), (2, 14)]
    prompts, responses = sequences(small * 19 + large)
    assert len(prompts) == 80
    params = fresh(1, mesh)
    costs = []
    for chosen in (range(72, 76), range(76, 80)):
        pairs = [(prompts[b], responses[b]) for b in chosen]
        tokens = [np.asarray(negative_log_likelihood(params, padded(p, r)))[len(p) - 1 :][: len(r)] for p, r in pairs]
        costs.append(np.concatenate(tokens).mean())
    assert abs(costs[0] - costs[1]) > 0.1
    _, loss, _ = run(mesh, config(20, 4, 1e-12), prompts, responses, (1, 24), params)
    assert loss == pytest.approx(np.mean(costs), rel=1e-5)


def test_a_loss_that_is_not_finite_is_refused(mesh: Mesh) -> None:
    prompts, responses = sequences([(2, 3)] * 4)
    params = fresh(2, mesh)
    params["model"]["norm"]["weight"] = params["model"]["norm"]["weight"].at[0].set(jnp.nan)
    with pytest.raises(RunError, match=r"loss of nan; lower config.warmstart.lr=0.5"):
        run(mesh, config(2, 2, 0.5), prompts, responses, (2, 16), params)
