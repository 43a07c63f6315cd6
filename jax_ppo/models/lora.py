"""Low-rank adapters (LoRA, arXiv 2106.09685): what is trained where the weights themselves are frozen.

A kernel W [X, in, out] acts as W + scale A B, with "lora_a" A [X, in, r] and "lora_b" B [X, r, out] beside it in the tree. B
starts at zero, so a network with fresh adapters is the network without.
"""

from collections.abc import Collection, Mapping

import jax
import jax.numpy as jnp

from jax_ppo.types import Params


def trained(plain: Params, rank: int, targets: Collection[str]) -> Params:
    """Shapes of what trains: adapters on every projection that is named, and the critic's head, which starts from nothing.

    Args:
      plain:   shapes of the whole network, of an actor or a critic.
      rank:    r.
      targets: names of projections, such as "q_proj".
    """
    adapters: Params = {}
    for block, modules in plain["model"]["layers"].items():
        for name in sorted(targets & modules.keys()):
            layers, inputs, outputs = modules[name]["kernel"].shape
            adapters.setdefault(block, {})[name] = {
                "lora_a": jax.ShapeDtypeStruct((layers, inputs, rank), jnp.float32),
                "lora_b": jax.ShapeDtypeStruct((layers, rank, outputs), jnp.float32),
            }
    return {"model": {"layers": adapters}} | {name: plain[name] for name in ("score",) if name in plain}


def init(key: jax.Array, shapes: Params) -> Params:
    """Fresh adapters: A uniform within 1 / sqrt(inputs), all else 0.

    Args:
      key:    PRNG key.
      shapes: from `trained`.
    """

    def leaf(path, shape):
        if path[-1].key != "lora_a":
            return jnp.zeros(shape.shape, shape.dtype)
        bound = shape.shape[-2] ** -0.5
        return jax.random.uniform(keys[path[-2].key], shape.shape, minval=-bound, maxval=bound).astype(shape.dtype)

    names = sorted(path[-2].key for path, _ in jax.tree_util.tree_leaves_with_path(shapes) if path[-1].key == "lora_a")
    keys = dict(zip(names, jax.random.split(key, max(len(names), 1)), strict=False))
    return jax.tree_util.tree_map_with_path(leaf, shapes)


def attach(base: Params, params: Params, scale: float) -> Params:
    """One tree of the frozen weights and of what trains; a weight in both is the trained one. No array is copied.

    Args:
      base:   frozen weights; empty where everything trains.
      params: what trains. Its "lora_b" are multiplied by `scale`.
      scale:  alpha / r.
    """
    whole = dict(base)
    for name, value in params.items():
        if isinstance(value, Mapping):
            whole[name] = attach(base.get(name, {}), dict(value), scale)
        else:
            whole[name] = value * scale if name == "lora_b" else value
    return whole


def fold(params: Params) -> Params:
    """The same network without adapters: every kernel W + A B, added in float32, in the dtype of W.

    Args:
      params: from `attach`; comes back as it is where there are no adapters.
    """
    if "lora_a" in params:
        product = jnp.matmul(params["lora_a"], params["lora_b"], precision="float32", preferred_element_type=jnp.float32)
        kernel = (params["kernel"].astype(jnp.float32) + product).astype(params["kernel"].dtype)
        return {"kernel": kernel} | {name: w for name, w in params.items() if name not in ("kernel", "lora_a", "lora_b")}
    return {name: fold(dict(value)) if isinstance(value, Mapping) else value for name, value in params.items()}
