"""What one micro-batch contributes: the losses of actor and critic on packed rows, and the experience they learn from.

A loss here is a sum over the micro-batch divided by a count of the whole minibatch, so gradients of micro-batches add up to the
gradient of the minibatch, however it is cut. The metrics add up in the same way, but for minima and maxima.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from jax_ppo.models import qwen
from jax_ppo.ppo import advantages as adv
from jax_ppo.ppo.logprobs import token_logprobs
from jax_ppo.ppo.losses import policy_loss, value_loss
from jax_ppo.ppo.masked import masked_mean, masked_range, masked_sum, select, whiten
from jax_ppo.types import Experience, PackedBatch, Params

Metrics = dict[str, jax.Array]
# (params, batch) -> final hidden states [N, L, D].
Forward = Callable[[Params, PackedBatch], jax.Array]


def gather(x: jax.Array, source: jax.Array | np.ndarray) -> jax.Array:
    """Carries a [B, R] array to packed positions [N, L]: x of the response token that a position predicts, else 0."""
    return jnp.where(source >= 0, x.reshape(-1)[jnp.maximum(source, 0)], 0.0)


def scatter(out: jax.Array, values: jax.Array, index: jax.Array) -> jax.Array:
    """Writes packed values [N, L] back: out.flat[index] = values where index >= 0. Every other entry stays."""
    flat = out.reshape(-1)
    flat = flat.at[jnp.where(index >= 0, index, flat.shape[0])].set(values, mode="drop")
    return flat.reshape(out.shape)


def combine(total: Metrics, part: Metrics) -> Metrics:
    """Adds the metrics of a micro-batch to those before it; names that end in min or max keep the extreme."""
    rules = {"min": jnp.minimum, "max": jnp.maximum}
    return {name: rules.get(name[-3:], jnp.add)(total[name], value) for name, value in part.items()}


def policy_scores(forward: Forward, params: Params, batch: PackedBatch, *, temperature: float) -> tuple[jax.Array, jax.Array]:
    """Log-probabilities of the response tokens, and entropies, at packed positions; both [N, L] float32."""
    return token_logprobs(forward(params, batch), qwen.unembedding(params), jnp.asarray(batch.targets), temperature=temperature)


def actor_objective(
    params: Params,
    forward: Forward,
    batch: PackedBatch,
    experience: Experience,
    total: jax.Array,
    tokens: jax.Array,
    *,
    temperature: float,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None,
    entropy_coef: float,
    kl_loss_coef: float,
    kl_kind: str,
) -> tuple[jax.Array, Metrics]:
    """Policy loss - entropy_coef * entropy + kl_loss_coef * KL, of one micro-batch.

    Args:
      params:     the actor.
      forward:    the network.
      batch:      packed rows.
      experience: of the whole rollout.
      total:      what weighted sums are divided by, a count of the whole minibatch.
      tokens:     policy tokens of the whole minibatch, by which means are weighted.
      temperature, clip_low, clip_high, dual_clip, entropy_coef, kl_loss_coef, kl_kind: see `jax_ppo.config.PPOConfig`.

    Returns:
      The loss, and metrics that `combine` adds up.
    """
    weights = gather(experience.policy, batch.source)
    logprobs, entropy = policy_scores(forward, params, batch, temperature=temperature)
    loss, metrics = policy_loss(
        logprobs,
        gather(experience.old_logprobs, batch.source),
        gather(experience.advantages, batch.source),
        weights,
        clip_low=clip_low,
        clip_high=clip_high,
        dual_clip=dual_clip,
        total=total,
    )
    share = jnp.sum(weights > 0) / tokens
    for name in ("actor/pg_clipfrac", "actor/pg_clipfrac_lower", "actor/ppo_kl", "actor/ppo_kl_k3"):
        metrics[name] = metrics[name] * share
    here = share > 0
    metrics["actor/ratio/min"] = jnp.where(here, metrics["actor/ratio/min"], jnp.inf)
    metrics["actor/ratio/max"] = jnp.where(here, metrics["actor/ratio/max"], -jnp.inf)
    if entropy_coef:
        loss = loss - entropy_coef * masked_sum(entropy, weights) / total
    if kl_loss_coef:
        reference = select(gather(experience.ref_logprobs, batch.source), weights)
        kl = masked_sum(adv.kl_estimate(select(logprobs, weights), reference, kl_kind), weights) / total
        loss, metrics["actor/kl_loss"] = loss + kl_loss_coef * kl, kl
    return loss, metrics


def critic_objective(
    params: Params, forward: Forward, batch: PackedBatch, experience: Experience, total: jax.Array, *, clip: float | None
) -> tuple[jax.Array, Metrics]:
    """Value loss of one micro-batch.

    Args:
      params:     the critic.
      forward:    its network.
      batch:      packed rows.
      experience: of the whole rollout.
      total:      response tokens of the whole minibatch.
      clip:       range of the value clip; None is off.

    Returns:
      The loss, and metrics that `combine` adds up.
    """
    mask = gather(experience.mask, batch.source)
    loss, metrics = value_loss(
        qwen.values(params, forward(params, batch)),
        gather(experience.values, batch.source),
        gather(experience.returns, batch.source),
        mask,
        clip=clip,
        total=total,
    )
    share = jnp.sum(mask) / total
    for name in ("critic/vf_clipfrac", "critic/vpred_mean"):
        metrics[name] = metrics[name] * share
    return loss, metrics


def supervised_objective(params: Params, forward: Forward, batch: PackedBatch, total: jax.Array) -> tuple[jax.Array, Metrics]:
    """Mean negative log-likelihood of the response tokens, -sum(log p) / total; `total` tokens in the whole batch."""
    logprobs, _ = policy_scores(forward, params, batch, temperature=1.0)
    loss = -masked_sum(logprobs, jnp.asarray(batch.source) >= 0) / total
    return loss, {"warmstart/loss": loss}


def estimate(
    rewards: jax.Array,
    values: jax.Array,
    mask: jax.Array,
    learns: jax.Array,
    bootstrap: jax.Array | None,
    *,
    estimator: str,
    samples: int,
    gamma: float,
    lam_actor: float | jax.Array,
    lam_critic: float,
) -> tuple[jax.Array, jax.Array]:
    """The advantages that the policy learns from, and the targets of the critic.

    "gae" and "reinforce" are whitened over all tokens that learn; "rloo" and "grpo" give every token of a response the advantage
    of its sum of token rewards beside those of the other responses to the prompt.

    Args:
      rewards, values: [B, R] float32; without a critic the values are 0.
      mask:      [B, R], 1 on generated tokens.
      learns:    [B, R] bool, tokens of the policy loss.
      bootstrap: [B] float32, the value after the last token, or None.
      samples:   responses a prompt, which stand in a row.
      estimator, gamma, lam_actor, lam_critic: see `jax_ppo.config.PPOConfig`; `lam_actor` may be [B].

    Returns:
      Both [B, R] float32.
    """
    if estimator in ("rloo", "grpo"):
        beside = adv.group_advantages(masked_sum(rewards, mask, axis=1), samples, estimator)
        return jnp.where(mask != 0, beside[:, None], 0.0), values
    if estimator == "reinforce":
        lam_actor = lam_critic = 1.0  # with values of 0 the advantage is the return to go
    advantages, returns = adv.gae(rewards, values, mask, gamma=gamma, lam=lam_actor, bootstrap=bootstrap)
    if isinstance(lam_actor, jax.Array) or lam_actor != lam_critic:
        _, returns = adv.gae(rewards, values, mask, gamma=gamma, lam=lam_critic, bootstrap=bootstrap)
    return whiten(advantages, learns), returns


def make_experience(
    scores: jax.Array,
    mask: jax.Array,
    finished: jax.Array,
    policy: jax.Array,
    old_logprobs: jax.Array,
    ref_logprobs: jax.Array,
    values: jax.Array,
    after: jax.Array,
    kl_coef: jax.Array,
    *,
    estimator: str,
    samples: int,
    gamma: float,
    lam_actor: float,
    lam_critic: float,
    lam_length: float,
    clip_advantage: float,
    kl_kind: str,
    bootstrap_truncated: bool,
) -> tuple[Experience, Metrics]:
    """Token rewards, advantages and targets; see `estimate`.

    Args:
      scores:       [B] float32.
      mask:         [B, R] float32, 1 on generated tokens.
      finished:     [B] bool, whether an end token was drawn.
      policy:       [B, R] float32, weight of each token in the policy loss.
      old_logprobs, ref_logprobs, values: [B, R] float32.
      after:        [B] float32, the critic's value behind the last token.
      kl_coef:      weight of the KL penalty.
      samples:      responses a prompt, which stand in a row.
      estimator, gamma, lam_actor, lam_critic, lam_length, clip_advantage, kl_kind: see `jax_ppo.config.PPOConfig`. Without a
        critic the values are 0.
      bootstrap_truncated: truncated responses continue with `after` instead of 0.

    Returns:
      The experience, and the metrics of the batch.
    """
    kl = adv.kl_estimate(old_logprobs, ref_logprobs, kl_kind)
    rewards = adv.token_rewards(scores, kl, mask, kl_coef=kl_coef)
    bootstrap = jnp.where(finished, 0.0, after) if bootstrap_truncated else None
    learned, returns = estimate(
        rewards,
        values,
        mask,
        policy > 0,
        bootstrap,
        estimator=estimator,
        samples=samples,
        gamma=gamma,
        lam_actor=adv.length_lambda(mask, lam_length) if lam_length else lam_actor,
        lam_critic=lam_critic,
    )
    if clip_advantage:
        learned = jnp.clip(learned, -clip_advantage, clip_advantage)
    experience = Experience(mask, policy, old_logprobs, ref_logprobs, values, learned, returns)
    metrics = {
        "actor/reward_kl_penalty": jnp.mean(masked_mean(kl, mask, axis=1)),
        "actor/reward_kl_penalty_coeff": kl_coef,
    }
    sums = {"score": scores, "rewards": masked_sum(rewards, mask, axis=1)}
    for name, x in sums.items():
        metrics |= {f"critic/{name}/mean": x.mean(), f"critic/{name}/max": x.max(), f"critic/{name}/min": x.min()}
    tokens = {"advantages": learned}
    if estimator == "gae":
        metrics["critic/vf_explained_var"] = adv.explained_variance(values, returns, mask)
        tokens |= {"returns": returns, "values": values}
    for name, x in tokens.items():
        low, high = masked_range(x, mask)
        metrics |= {f"critic/{name}/mean": masked_mean(x, mask), f"critic/{name}/max": high, f"critic/{name}/min": low}
    return experience, metrics
