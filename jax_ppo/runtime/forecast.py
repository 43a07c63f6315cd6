"""What a run will do and need, said before it starts."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_ppo import schema, sharding
from jax_ppo.config import Config, keys
from jax_ppo.data.task import Task
from jax_ppo.models import attention
from jax_ppo.ppo.logprobs import BLOCK_ELEMENTS
from jax_ppo.steps import Network, Steps

# Part of a device's name -> peak of dense bfloat16 products with float32 sums, operations a second.
PEAK_FLOPS = {
    "h200": 989e12,
    "h100": 989e12,
    "b200": 2250e12,
    "a100": 312e12,
    "l40s": 362e12,
    "a10g": 70e12,
    "rtx 4090": 165e12,
    "rtx 3090": 71e12,
    "tpu v4": 275e12,
    "tpu v5 lite": 197e12,
    "tpu v5e": 197e12,
    "tpu v5p": 459e12,
    "tpu v5": 459e12,
    "tpu v6": 918e12,
}


def shard_bytes(shapes: Any, shardings: Any) -> int:
    """Bytes of one device's part of a tree of arrays."""
    parts = jax.tree.map(lambda x, s: math.prod(s.shard_shape(x.shape)) * x.dtype.itemsize, shapes, shardings)
    return sum(jax.tree.leaves(parts))


def memory(config: Config, steps: Steps, shape: tuple[int, int], prompt_width: int) -> dict[str, int]:
    """A forecast of bytes on one device, item by item.

    Weights and moments are exact; the reference is counted in the dtype of the weights, though it may be stored in a smaller
    one; activations are what the backward pass keeps with rematerialisation: the input of every layer, the insides of one
    layer, and one block of logits.

    Args:
      config: the run.
      steps:  its jitted functions.
      shape:  (N, L) of a micro-batch.
      prompt_width: P.

    Returns:
      "actor" and "critic" with their moments, "base" that adapters stand on, "reference", "gradients" of one network, "rollout": weights and cache of the token
      loop, and "activations".
    """
    master, mesh, actor = config.model.param_dtype, steps.mesh, steps.actor
    nets = [n for n in (actor, steps.critic) if n]
    state = {name: shard_bytes(n.state_shapes(master), n.state_shardings) for name, n in zip(("actor", "critic"), nets)}  # noqa: B905
    weights = [shard_bytes(n.typed_shapes(master), n.shardings) for n in nets]
    # The sum over micro-batches is in float32; beside it stands the gradient of one of them.
    gradients = [shard_bytes(n.typed_shapes(jnp.float32), n.shardings) + w for n, w in zip(nets, weights, strict=True)]
    adapted = config.model.lora.rank > 0
    # One frozen copy serves actor, critic and reference; a critic from elsewhere has one of its own.
    base = [_plain_bytes(n) for n in nets[: 2 if config.critic.path else 1]] if adapted else [0]
    return {
        "critic": 0,
        **state,
        "base": sum(base),
        "reference": weights[0] if not adapted and (config.ppo.kl_coef or config.ppo.kl_loss_coef) else 0,
        "gradients": max(gradients),
        "rollout": shard_bytes(_typed(actor.plain, actor.dtype), sharding.decode_specs(actor.plain, mesh))
        + _cache(config, actor, prompt_width),
        "activations": max(activations(n, shape) for n in nets),
    }


def peak(parts: dict[str, int]) -> int:
    """The largest sum of what stands in memory at the same time: rollout and update do not overlap."""
    update = parts["gradients"] + parts["activations"]
    return parts["actor"] + parts["critic"] + parts["base"] + parts["reference"] + max(parts["rollout"], update)


def update_flops(network: Network, lengths: np.ndarray) -> float:
    """Floating-point operations that one pass of updates over some sequences needs; what is computed again does not count.

    Forward and backward of every matrix are 6 operations a weight and token, 4 where the weight is frozen; those of causal
    attention 6 x G K H x length^2 a layer. A head on another network's hidden states needs their forward pass alone.

    Args:
      network: in training.
      lengths: [B] tokens of each sequence, prompt and response.
    """
    model, tokens = network.model, float(np.sum(lengths))
    size = lambda shapes: sum(  # noqa: E731
        math.prod(x.shape)
        for path, x in jax.tree_util.tree_leaves_with_path(shapes)
        if path[-1].key in ("kernel", "lora_a", "lora_b")
    )
    tied = model.vocab_size * model.hidden_size if "lm_head" not in network.plain and "score" not in network.plain else 0
    whole, trained = size(network.plain) + tied, size(network.shapes)
    squares = (
        model.num_hidden_layers * model.num_attention_heads * model.head_dim * float(np.sum(np.square(lengths, dtype=np.float64)))
    )
    if network.alone:
        return 2 * whole * tokens + 2 * squares + 4 * trained * tokens
    weights = 6 * whole if network.shapes is network.plain else 4 * whole + 6 * trained
    return weights * tokens + 6 * squares


def peak_flops(device_kind: str) -> float | None:
    """Peak rate of dense bfloat16 products of one device, in operations a second, from the makers' data sheets; None if unknown."""
    return next((rate for name, rate in PEAK_FLOPS.items() if name in device_kind.lower()), None)


def overview(config: Config, steps: Steps, task: Task, shape: tuple[int, int]) -> list[tuple[str, str]]:
    """The rows of the table at the start of a run."""
    device, ppo, rollout = jax.devices()[0], config.ppo, config.rollout
    updates, minibatch = config.updates_per_iteration, config.sequences // ppo.minibatches
    parts = memory(config, steps, shape, task.prompt_width)
    limit = (device.memory_stats() or {}).get("bytes_limit") if device.platform != "cpu" else None
    total = f"{size(peak(parts))} a device at the peak, forecast" + (f"; it has {size(limit)}" if limit else "")
    if limit and peak(parts) > limit:
        total += ": too little; lower ppo.micro_tokens or rollout.slots, or use more devices"
    said = lambda *names: ", ".join(f"{name} {size(parts[name])}" for name in names)  # noqa: E731
    mesh = " ".join(f"{axis}={count}" for axis, count in steps.mesh.shape.items())
    return [
        ("devices", f"{jax.device_count()} x {device.device_kind}, mesh {mesh}"),
        ("actor", _describe(steps.actor)),
        ("critic", _describe(steps.critic) if steps.critic else f"none; advantages by {ppo.estimator}"),
        ("numbers", f"weights {config.model.param_dtype}, compute {jnp.dtype(steps.actor.dtype).name}"),
        ("attention", steps.actor.attention.describe(shape[1])),
        ("data", f"{task.name}: {len(task.train):,} training and {len(task.test):,} held-out problems"),
        ("prompts", f"up to {task.prompt_width} tokens"),
        ("responses", f"up to {rollout.max_response_tokens} tokens, ended by {' or '.join(map(str, task.end_ids))}"),
        ("rollout", f"{_count(rollout.batch, 'prompt')} x {rollout.n} = {_count(config.sequences, 'response')} an iteration"),
        ("update", f"{_count(ppo.epochs, 'epoch')} x {ppo.minibatches} minibatches of {minibatch} = {_count(updates, 'update')}"),
        ("run", f"{_count(config.train.iterations, 'iteration')}, {_count(config.total_updates, 'update')}"),
        ("micro-batch", f"{shape[0]} rows x {shape[1]} tokens"),
        ("memory", total),
        ("", "always: " + said("actor", "critic", *(["base"] if parts["base"] else []), "reference")),
        ("", f"by turns: {said('rollout')}; {said('gradients', 'activations')}"),
        ("changed keys", ", ".join(changed(config)) or "none"),
    ]


def changed(config: Config) -> list[str]:
    """key=value of everything that differs from the defaults."""
    values = {name: schema.read(config, name) for name in keys()}
    return [f"{name}={values[name]}" for name, key in keys().items() if values[name] != key.default]


def size(count: float) -> str:
    """Bytes for people: "0.4 MB", "37 MB", "5.9 GB"."""
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.0f} MB" if count >= 1e7 else f"{count / 1e6:.1f} MB"


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'s' * (number != 1)}"


def _describe(network: Network) -> str:
    model = network.model
    count, whole = (sum(math.prod(x.shape) for x in jax.tree.leaves(shapes)) for shapes in (network.shapes, network.plain))
    if network.alone:
        return f"{count:,} parameters: a head on the actor's hidden states"
    shape = f"{model.num_hidden_layers} layers, width {model.hidden_size}, vocabulary {model.vocab_size:,}"
    return f"{whole:,} parameters: {shape}" + (f"; frozen, {count:,} beside them are trained" if count < whole else "")


def _typed(shapes: Any, dtype: Any) -> Any:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.dtype(dtype)), shapes)


def _plain_bytes(network: Network) -> int:
    """Frozen weights, counted in the compute dtype, which is that of most files."""
    return shard_bytes(_typed(network.plain, network.dtype), network.plain_shardings)


def _cache(config: Config, actor: Network, prompt_width: int) -> int:
    """The keys and values of all layers at full width; one layer is there twice while it moves."""
    model, mesh = actor.model, actor.mesh
    rows = -(-config.slots // sharding.row_shards(mesh))
    columns = prompt_width + config.rollout.max_response_tokens
    heads = model.num_key_value_heads // mesh.shape["tensor"]
    return 2 * rows * columns * (model.num_hidden_layers + 1) * heads * model.head_dim * jnp.dtype(actor.dtype).itemsize


def activations(network: Network, shape: tuple[int, int]) -> int:
    """Bytes of one device for the backward pass of one network over a micro-batch of shape (N, L)."""
    model, itemsize = network.model, jnp.dtype(network.dtype).itemsize
    rows, length = shape[0] // sharding.row_shards(network.mesh), shape[1]
    kept = model.num_hidden_layers * (1 if network.remat else 12) * model.hidden_size
    inside = 4 * model.hidden_size + 4 * model.intermediate_size
    block = {"blockwise": min(length, 2 * attention.BLOCK), "full": length}.get(attention.by_xla(network.method, length), 0)
    scores = 2 * rows * model.num_attention_heads * block * length * 4
    if network.method == "cudnn":
        scores = 3 * rows * length * length * itemsize  # the mask as a bias, its gradient, and the mask
    logits = 3 * min(BLOCK_ELEMENTS, rows * length * model.vocab_size) * 4
    return rows * length * (kept + inside) * itemsize + scores + logits
