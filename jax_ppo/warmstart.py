"""The optional supervised start: maximum likelihood on worked solutions, with the packed forward and optimizer of PPO."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

from jax_ppo import sharding
from jax_ppo.config import Config, LoraConfig, OptimConfig
from jax_ppo.models.layers import QwenConfig
from jax_ppo.ppo import packing, update
from jax_ppo.steps import Network
from jax_ppo.types import Params, RunError


def warm_start(
    config: Config,
    model: QwenConfig,
    mesh: Any,
    params: Params,
    prompts: list[np.ndarray],
    responses: list[np.ndarray],
    shape: tuple[int, int],
    progress: Callable[[], Any],
) -> tuple[Params, float]:
    """Trains on demonstrations; the learning rate rises over the first twentieth of the updates and falls linearly to 0.

    Args:
      config:    the run.
      model:     shape of the actor.
      mesh:      where it lives.
      params:    its parameters; donated.
      prompts, responses: `warmstart.steps` x `warmstart.batch` sequences, in order.
      shape:     (N, L) of a micro-batch.
      progress:  called after each update.

    Returns:
      The new parameters, and the mean loss of the last tenth of the updates, in nats a token.

    Raises:
      RunError: if the loss is not finite at the end.
    """
    warm = config.warmstart
    optim = OptimConfig(lr=warm.lr, b2=warm.b2, warmup=warm.steps // 20, schedule="linear")
    # All weights are trained, whatever PPO will train.
    everything_trains = dataclasses.replace(config, model=dataclasses.replace(config.model, lora=LoraConfig()))
    network = Network(everything_trains, model, mesh, optim, "lm_head", warm.steps)
    accumulate = network.accumulator(update.supervised_objective)
    state, losses = network.start(params), list[Any]()
    rows, length = shape
    lengths = np.array([len(r) for r in responses], np.int32)
    padded = np.zeros((len(responses), int(lengths.max())), np.int32)
    for i, response in enumerate(responses):
        padded[i, : len(response)] = response
    everything = [np.arange(i, i + warm.batch) for i in range(0, len(prompts), warm.batch)]
    needed = [packing.pack([len(prompts[b]) + lengths[b] for b in chosen], length).rows for chosen in everything]
    shards = sharding.row_shards(mesh)
    rows = min(rows, -(-max(needed) // shards) * shards)
    for chosen in everything:
        grads, total, loss = network.zeros(state.params), jnp.float32(lengths[chosen].sum()), jnp.float32(0.0)
        for batch in packing.layout(prompts, padded, lengths, chosen, rows=rows, row_length=length):
            grads, metrics = accumulate(state.params, grads, {}, sharding.place(batch, sharding.rows(mesh)), total)
            loss = loss + metrics["warmstart/loss"]
        state, _ = network.apply(state, grads)
        losses.append(float(loss))
        progress()
    last = float(np.mean(losses[-max(warm.steps // 10, 1) :]))
    if not np.isfinite(last):
        raise RunError(f"the warm start ended with a loss of {last}; lower config.warmstart.lr={warm.lr}")
    return state.params, last
