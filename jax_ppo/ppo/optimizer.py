"""AdamW with clipping and a schedule counted in updates, and the guard against non-finite gradients."""

import jax
import jax.numpy as jnp
import optax

from jax_ppo.types import Params, TrainState

MATRICES = ("kernel", "lora_a", "lora_b")


def schedule(lr: float, *, warmup: int, kind: str, total: int) -> optax.Schedule:
    """Learning rate by update: 0 to `lr` over `warmup` updates, then "constant", or "linear" or "cosine" down to 0 at `total`.

    Args:
      lr:     the peak.
      warmup: updates, below `total` unless the schedule is constant.
      kind:   the shape after the warmup.
      total:  updates of the whole run.
    """
    rest = max(total - warmup, 1)
    after = {
        "constant": lambda: optax.constant_schedule(lr),
        "linear": lambda: optax.linear_schedule(lr, 0.0, rest),
        "cosine": lambda: optax.cosine_decay_schedule(lr, rest),
    }[kind]()
    # The first update of a warmup moves already: update i (from 0) has lr (i + 1) / warmup.
    rise = lambda count: lr * (count + 1) / max(warmup, 1)  # noqa: E731
    return optax.join_schedules([rise, after], [warmup])


def optimizer(
    learning_rate: optax.Schedule, *, clip_norm: float, b1: float, b2: float, weight_decay: float
) -> optax.GradientTransformation:
    """Clip by global norm, Adam with epsilon 1e-8 outside the root, decoupled weight decay on matrices only.

    Args:
      learning_rate: from `schedule`.
      clip_norm:     largest global gradient norm; 0 is off.
      b1, b2:        Adam's decay rates.
      weight_decay:  decoupled decay per unit of learning rate.
    """
    matrices = lambda params: jax.tree_util.tree_map_with_path(lambda p, _: p[-1].key in MATRICES, params)  # noqa: E731
    return optax.chain(
        optax.clip_by_global_norm(clip_norm) if clip_norm else optax.identity(),
        optax.scale_by_adam(b1, b2, eps=1e-8),
        optax.add_decayed_weights(weight_decay, matrices) if weight_decay else optax.identity(),
        optax.scale_by_learning_rate(learning_rate),
    )


def start(params: Params, transform: optax.GradientTransformation) -> TrainState:
    """A fresh train state around `params`."""
    return TrainState(params, transform.init(params), jnp.zeros((), jnp.int32), jnp.zeros((), jnp.int32))


def apply(
    state: TrainState, grads: Params, transform: optax.GradientTransformation, learning_rate: optax.Schedule
) -> tuple[TrainState, dict[str, jax.Array]]:
    """One update, or none: a non-finite gradient leaves weights and moments as they are, and is counted.

    Args:
      state:         the network.
      grads:         summed gradients, the tree of the parameters.
      transform:     from `optimizer`.
      learning_rate: from `schedule`, for the metric.

    Returns:
      The new state, and {"grad_norm", "lr", "skipped", "update_ratio"}; update_ratio is |update| / |params|.
    """
    norm = optax.tree.norm(grads)

    def move(old: TrainState, grads: Params) -> tuple[TrainState, jax.Array]:
        typed = jax.tree.map(lambda g, p: g.astype(p.dtype), grads, old.params)
        updates, opt_state = transform.update(typed, old.opt_state, old.params)
        params = optax.apply_updates(old.params, updates)
        size = optax.tree.norm(updates) / jnp.maximum(optax.tree.norm(params), 1e-30)
        return TrainState(params, opt_state, old.updates + 1, jnp.zeros_like(old.skipped)), size.astype(jnp.float32)

    def stay(old: TrainState, grads: Params) -> tuple[TrainState, jax.Array]:
        return TrainState(old.params, old.opt_state, old.updates, old.skipped + 1), jnp.zeros(())

    # A branch, not a selection: that would hold old and new weights and moments at the same time.
    good = jnp.isfinite(norm)
    new, size = jax.lax.cond(good, move, stay, state, grads)
    metrics = {
        "grad_norm": norm,
        "lr": jnp.asarray(learning_rate(state.updates), jnp.float32),
        "skipped": 1.0 - good.astype(jnp.float32),
        "update_ratio": size,
    }
    return new, metrics
