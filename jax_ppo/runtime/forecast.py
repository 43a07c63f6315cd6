"""What a run will need, said before it starts."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jax_ppo.config import Config, default_config, to_dict
from jax_ppo.data.task import Task
from jax_ppo.models.layers import QwenConfig
from jax_ppo.ppo.logprobs import BLOCK_ELEMENTS
from jax_ppo.steps import Network, Steps

GB = 1e9


def shard_bytes(shapes: object, shardings: object, itemsize: int) -> int:
    """Bytes of one device's part of a tree of arrays."""
    parts = jax.tree.map(lambda x, s: int(np.prod(s.shard_shape(x.shape))) * itemsize, shapes, shardings)
    return sum(jax.tree.leaves(parts))


def memory(config: Config, steps: Steps, shape: tuple[int, int], prompt_width: int) -> dict[str, float]:
    """A forecast of bytes on one device, item by item.

    The networks count exactly; activations are the larger of what the backward pass keeps with rematerialisation (the input of
    every layer, one layer's insides, one block of logits) and what decoding keeps.

    Args:
      config: the run.
      steps:  its jitted functions.
      shape:  (N, L) of a micro-batch.
      prompt_width: P.
    """
    actor, critic = steps.actor, steps.critic
    master, compute = jnp.dtype(config.model.param_dtype).itemsize, jnp.dtype(actor.dtype).itemsize
    network = lambda n: shard_bytes(n.shapes, n.shardings, master)  # noqa: E731
    devices = steps.mesh.size
    rows = -(-(config.rollout.slots or config.sequences) * steps.mesh.shape["tensor"] // devices)
    model = actor.model
    width = prompt_width + config.rollout.max_response_tokens
    cache = 2 * rows * width * model.num_hidden_layers * model.num_key_value_heads * model.head_dim * compute
    tensor = steps.mesh.shape["tensor"]
    needs = bool(config.ppo.kl_coef or config.ppo.kl_loss_coef)
    return {
        "actor weights and moments": 3 * network(actor),
        "critic weights and moments": 3 * network(critic),
        "reference": float(needs * shard_bytes(actor.shapes, actor.shardings, min(master, 4))),
        "gradients (one network)": 2 * shard_bytes(actor.shapes, actor.shardings, 4),
        "rollout: weights and cache": shard_bytes(actor.shapes, actor.shardings, compute) + cache / tensor,
        "update: activations": _activations(actor, shape, compute) * tensor / devices,
    }


def peak(parts: dict[str, float]) -> float:
    """The largest sum of what stands in memory at the same time: rollout and update do not overlap."""
    apart = ("rollout: weights and cache", "gradients (one network)", "update: activations")
    always = sum(size for name, size in parts.items() if name not in apart)
    return always + max(parts[apart[0]], parts[apart[1]] + parts[apart[2]])


def overview(config: Config, steps: Steps, task: Task, shape: tuple[int, int]) -> list[tuple[str, str]]:
    """The rows of the table at the start of a run."""
    device = jax.devices()[0]
    parts = memory(config, steps, shape, task.prompt_width)
    limit = (device.memory_stats() or {}).get("bytes_limit") if device.platform != "cpu" else None
    rows = [
        ("devices", f"{jax.device_count()} x {device.device_kind}, mesh {dict(steps.mesh.shape)}"),
        ("actor", _describe(steps.actor.model, steps.actor)),
        ("critic", _describe(steps.critic.model, steps.critic)),
        ("numbers", f"weights {config.model.param_dtype}, compute {jnp.dtype(steps.actor.dtype).name}"),
        ("data", f"{task.name}: {len(task.train)} training and {len(task.test)} held-out problems"),
        ("tokens", f"prompts up to {task.prompt_width}, responses up to {config.rollout.max_response_tokens}, end ids {list(task.end_ids)}"),
        (
            "iteration",
            f"{config.rollout.batch} prompts x {config.rollout.n} = {config.sequences} responses, {config.ppo.epochs} epochs x"
            f" {config.ppo.minibatches} minibatches = {config.updates_per_iteration} updates, {config.train.iterations} iterations",
        ),
        ("micro-batch", f"{shape[0]} rows x {shape[1]} tokens"),
    ]
    rows += [(f"memory: {name}", f"{size / GB:.2f} GB") for name, size in parts.items()]
    total = f"{peak(parts) / GB:.2f} GB a device, forecast" + (f", of {limit / GB:.2f} GB" if limit else "")
    return [*rows, ("memory: peak", total), ("changed keys", ", ".join(changed(config)) or "none")]


def changed(config: Config) -> Sequence[str]:
    """key=value of everything that differs from the defaults."""
    default = default_config().to_dict()
    return [
        f"{section}.{key}={value}"
        for section, keys in to_dict(config).items()
        for key, value in keys.items()
        if value != default[section][key]
    ]


def _describe(model: QwenConfig, network: Network) -> str:
    count = sum(int(np.prod(x.shape)) for x in jax.tree.leaves(network.shapes))
    return f"{count:,} parameters, {model.num_hidden_layers} layers, width {model.hidden_size}, vocabulary {model.vocab_size}"


def _activations(network: Network, shape: tuple[int, int], itemsize: int) -> float:
    model, tokens = network.model, shape[0] * shape[1]
    kept = model.num_hidden_layers if network.remat else 12 * model.num_hidden_layers
    inside = 4 * model.hidden_size + 4 * model.intermediate_size
    logits = 3 * min(BLOCK_ELEMENTS, tokens * model.vocab_size) * 4
    return tokens * (kept * model.hidden_size + inside) * itemsize + logits
