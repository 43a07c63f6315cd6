"""What is done with a rollout: experience, then epochs x minibatches x micro-batches of updates for both networks.

Host code around the jitted functions of `jax_ppo.steps`; everything runs on packed rows of one fixed shape.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_ppo import sharding
from jax_ppo.config import Config
from jax_ppo.ppo import losses, packing, update
from jax_ppo.runtime import forecast
from jax_ppo.steps import Steps
from jax_ppo.types import Experience, InputError, PackedBatch, Params, Prompts, Rollout, RunError, TrainState

# Mean difference of probabilities up to which the sampler's log-probabilities may stand for the scored ones: above what
# bfloat16 brings about, far below what a wrong temperature or mask does.
TRUSTED = 0.01

Clock = Callable[[str], AbstractContextManager[Any]]


def row_shape(config: Config, prompt_width: int, shards: int) -> tuple[int, int]:
    """(N, L) of a micro-batch: rows that hold the longest sequence, as many as `ppo.micro_tokens` allows on these shards, but
    no more than a minibatch has sequences.

    Raises:
      InputError: if there are not enough tokens for one row a shard.
    """
    length = -(-(prompt_width + config.rollout.max_response_tokens) // 8) * 8
    rows = config.ppo.micro_tokens // length // shards * shards
    needed = -(-(config.sequences // config.ppo.minibatches) // shards) * shards
    if rows == 0:
        raise InputError(
            f"config.ppo.micro_tokens={config.ppo.micro_tokens}: must hold one row of {length} tokens on each of the"
            f" {shards} row shards of the mesh, {length * shards}"
        )
    return min(rows, needed), length


class Learner:
    """Both networks, and PPO on them.

    actor, critic: train states; replaced by every update. No critic where the advantages need none.
    reference:     parameters of the reference policy, or None where no KL is asked for.
    base:          frozen weights that they stand on, by network; empty where everything trains.
    """

    def __init__(
        self,
        config: Config,
        steps: Steps,
        shape: tuple[int, int],
        actor: TrainState,
        critic: TrainState | None,
        reference: Params | None,
        base: Mapping[str, Params] | None = None,
    ):
        """Args: the run, its jitted functions, (N, L) of a micro-batch, the networks, and what they stand on."""
        self.config, self.steps, self.shape = config, steps, shape
        self.actor, self.critic, self.reference = actor, critic, reference
        self.base = base or {"actor": {}, "critic": {}}
        self._everywhere = sharding.replicated(steps.mesh)
        self._rows = sharding.rows(steps.mesh)

    def experience(
        self, prompts: Prompts, rollout: Rollout, scores: np.ndarray, kl_coef: float, clock: Clock = nullcontext
    ) -> tuple[Experience, dict[str, Any]]:
        """Old and reference log-probabilities, values, token rewards and advantages of a rollout.

        Args:
          prompts: B prompts.
          rollout: B responses.
          scores:  [B] float32.
          kl_coef: weight of the KL penalty in this iteration.
          clock:   clock(stage) is a context that times a stage.

        Returns:
          The experience, and metrics.
        """
        laid = self._layout(prompts, rollout, np.arange(len(scores)))
        batches = [sharding.place(batch, self._rows) for batch in laid]
        zeros = lambda *shape: sharding.place(np.zeros(shape, np.float32), self._everywhere)  # noqa: E731
        shape, mask = rollout.tokens.shape, rollout.mask
        with clock("old_log_prob"):
            old, entropy, checked, differences = self._old_policy(rollout, laid, batches)
        with clock("ref"):
            reference = old
            if self.reference is not None:
                reference, _ = self._scored(self.reference, batches, shape)
            jax.block_until_ready(reference)
        values, after = zeros(*shape), zeros(shape[0])
        if self.critic and self.steps.critic:
            with clock("values"):
                critic = self.steps.critic.whole(self.critic.params, self._under("critic"))
                for batch in batches:
                    values, after = self.steps.score_values(critic, batch, values, after)
                jax.block_until_ready(values)
        with clock("adv"):
            counted = mask & rollout.finished[:, None] if self.config.ppo.truncated == "mask" else mask
            policy = losses.aggregation_weights(jnp.asarray(counted), self.config.ppo.aggregation, norm=shape[1])
            made = self.steps.experience(
                np.asarray(scores, np.float32),
                mask.astype(np.float32),
                rollout.finished,
                policy,
                old,
                reference,
                values,
                after,
                np.float32(kl_coef),
            )
            experience, metrics = made[0], {k: float(v) for k, v in jax.device_get(made[1]).items()}
        metrics |= {
            "actor/entropy": float(np.asarray(entropy)[checked].mean()),
            "training/rollout_probs_diff_mean": float(differences.mean()),
            "training/rollout_probs_diff_max": float(differences.max()),
            "training/scored_frac": float(checked.sum() / mask.sum()),
            "perf/packing_fill": packing.fill(laid),
        }
        if self.reference is None:
            del metrics["actor/reward_kl_penalty"], metrics["actor/reward_kl_penalty_coeff"]
        return experience, metrics

    def logprobs(self, prompts: Prompts, rollout: Rollout) -> tuple[jax.Array, jax.Array]:
        """Log-probabilities and entropies [B, R] of the responses under the actor as it is now, 0 behind them."""
        batches = list(self.packed(prompts, rollout, np.arange(len(rollout.lengths))))
        return self._scored(self.policy, batches, rollout.tokens.shape)

    def _scored(self, params: Params, batches: Sequence[PackedBatch], shape: tuple[int, ...]) -> tuple[jax.Array, jax.Array]:
        """Log-probabilities and entropies [B, R] of the tokens in these micro-batches, 0 elsewhere."""
        logprobs, entropy = (sharding.place(np.zeros(shape, np.float32), self._everywhere) for _ in range(2))
        for batch in batches:
            logprobs, entropy = self.steps.score_policy(params, batch, logprobs, entropy)
        return jax.block_until_ready((logprobs, entropy))

    def _old_policy(
        self, rollout: Rollout, laid: Sequence[PackedBatch], batches: Sequence[PackedBatch]
    ) -> tuple[jax.Array, jax.Array, np.ndarray, np.ndarray]:
        """Log-probabilities of the policy that sampled, [B, R]; and of the tokens that were scored: entropies [B, R], which they
        are [B, R] bool, and by how much their probability differs from the sampler's.

        Where the sampler is to be believed one micro-batch is scored to see whether it can be; if not, all are.
        """
        sampled, shape = self.config.ppo.old_logprobs == "rollout", rollout.tokens.shape
        for count in [1, len(laid)] if sampled else [len(laid)]:
            scored, entropy = self._scored(self.policy, batches[:count], shape)
            checked = np.zeros(shape, bool)
            for batch in laid[:count]:  # as they stand on the host: a device may hold a part of their rows
                source = np.asarray(batch.source)
                checked.reshape(-1)[source[source >= 0]] = True
            differences = np.abs(np.exp(np.asarray(scored)) - np.exp(rollout.logprobs))[checked]
            if sampled and differences.mean() <= TRUSTED:
                return sharding.place(rollout.logprobs, self._everywhere), entropy, checked, differences
        return scored, entropy, checked, differences

    def update(
        self,
        prompts: Prompts,
        rollout: Rollout,
        experience: Experience,
        iteration: int,
        clock: Clock = nullcontext,
        progress: Callable[[str, int, int], Any] = lambda stage, done, total: None,
    ) -> dict[str, Any]:
        """Trains the actor, then the critic; they share nothing but the experience, so the order does not matter.

        Args:
          prompts, rollout, experience: of this iteration.
          iteration: from 1; with the seed it gives the order of the sequences in each epoch.
          clock:     clock(stage) is a context that times a stage.
          progress:  called with (stage, minibatches done, all).

        Returns:
          Metrics.

        Raises:
          RunError: if too many gradients in a row were not finite.
        """
        ppo, metrics = self.config.ppo, dict[str, Any]()
        minibatches = list(self._minibatches(len(prompts.tokens), iteration))
        epochs = partial(
            self._epochs,
            minibatches=minibatches,
            packed=partial(self.packed, prompts, rollout),
            experience=experience,
            progress=progress,
        )
        policy, lengths = np.asarray(experience.policy), prompts.lengths + rollout.lengths

        def work(name: str, updates: int) -> dict[str, float]:
            flops = forecast.update_flops(getattr(self.steps, name), lengths[np.concatenate(minibatches[:updates])])
            return {f"perf/update_tflop/{name}": flops / 1e12}

        if iteration > ppo.critic_warmup:

            def actor_counts(chosen):
                tokens, sequences = np.sum(policy[chosen] > 0), np.sum(np.any(policy[chosen] > 0, axis=1))
                total = losses.aggregation_total(float(tokens), float(sequences), ppo.aggregation)
                return np.float32(total), np.float32(max(tokens, 1))

            with clock("update_actor"):
                self.actor, parts = epochs("actor", self.actor, actor_counts)
            metrics |= _summary(parts) | work("actor", len(parts))
            first = parts[0]
            metrics["training/first_ratio_dev_max"] = max(abs(first["actor/ratio/min"] - 1), abs(first["actor/ratio/max"] - 1))
        if self.critic:
            with clock("update_critic"):
                self.critic, parts = epochs("critic", self.critic, lambda chosen: (np.float32(rollout.lengths[chosen].sum()),))
            metrics |= _summary(parts) | work("critic", len(parts))
        for name, state in (("actor", self.actor), ("critic", self.critic)):
            if state and int(state.skipped) >= self.config.train.max_skipped:
                raise RunError(f"iteration {iteration}: {int(state.skipped)} gradients of the {name} in a row were not finite")
        return metrics

    def packed(self, prompts: Prompts, rollout: Rollout, chosen: np.ndarray) -> Iterator[PackedBatch]:
        """Micro-batches of the chosen sequences, on their devices."""
        for batch in self._layout(prompts, rollout, chosen):
            yield sharding.place(batch, self._rows)

    def _layout(self, prompts: Prompts, rollout: Rollout, chosen: np.ndarray) -> list[PackedBatch]:
        """The same on the host."""
        rows, length = self.shape
        return packing.layout(prompts.tokens, rollout.tokens, rollout.lengths, chosen, rows=rows, row_length=length)

    @property
    def policy(self) -> Params:
        """All weights of the actor that act."""
        return self.steps.actor.whole(self.actor.params, self.base["actor"])

    def _under(self, name: str) -> Params:
        """What a network stands on: its frozen weights, or the actor under a critic that is a head alone."""
        return self.policy if name == "critic" and self.config.critic.trunk == "actor" else self.base[name]

    def _minibatches(self, count: int, iteration: int) -> Iterator[np.ndarray]:
        """The sequences of each update, shuffled afresh in each epoch."""
        for epoch in range(self.config.ppo.epochs):
            order = np.random.default_rng([self.config.train.seed, iteration, epoch]).permutation(count)
            yield from np.split(order, self.config.ppo.minibatches)

    def _epochs(
        self,
        name: str,
        state: TrainState,
        counts: Callable[[np.ndarray], tuple[np.float32, ...]],
        *,
        minibatches: Sequence[np.ndarray],
        packed: Callable[[np.ndarray], Iterator[PackedBatch]],
        experience: Experience,
        progress: Callable[[str, int, int], Any],
    ) -> tuple[TrainState, list[dict[str, float]]]:
        """One network over all minibatches. Returns its state and the metrics of each update."""
        network, accumulate = getattr(self.steps, name), getattr(self.steps, f"update_{name}")
        base = self._under(name)
        updates = []
        for done, chosen in enumerate(minibatches, start=1):
            grads, parts, totals = network.zeros(state.params), [], counts(chosen)
            for batch in packed(chosen):
                grads, part = accumulate(state.params, grads, base, batch, experience, *totals)
                parts.append(part)
            state, applied = network.apply(state, grads)
            jax.block_until_ready(applied)  # so that the progress is true
            updates.append((parts, {f"{name}/{key}": value for key, value in applied.items()}))
            progress(f"update {name}", done, len(minibatches))
            if name == "actor" and self.config.ppo.target_kl:
                kl = sum(float(part["actor/ppo_kl_k3"]) for part in parts)
                if kl > self.config.ppo.target_kl:
                    break
        return state, [_merge(parts) | {k: float(v) for k, v in applied.items()} for parts, applied in jax.device_get(updates)]


def _merge(parts: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Metrics of a minibatch from those of its micro-batches."""
    total = parts[0]
    for part in parts[1:]:
        total = update.combine(total, part)
    return {name: float(value) for name, value in total.items()}


def _summary(updates: Sequence[dict[str, float]]) -> dict[str, float]:
    """Metrics of an iteration from those of its updates: means, but extremes, counts and the last learning rate as such.

    An update that was skipped has no finite loss; the others still have one to tell.
    """
    rules: dict[str, Callable[[list[float]], float]] = {"min": min, "max": max, "skipped": sum, "lr": lambda x: x[-1]}
    columns = {name: [u[name] for u in updates if np.isfinite(u[name])] or [np.nan] for name in updates[0]}
    return {name: float(rules.get(name.rsplit("/", 1)[1], np.mean)(column)) for name, column in columns.items()}
