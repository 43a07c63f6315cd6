"""A game whose value function and optimum are known exactly, played through the same engine, learner and steps as a real run.

A prompt asks for a response of three tokens. Each token that is the prompt's target at its position earns a share of the score,
and the score arrives with the last token. Under the uniform policy, which every game starts from, a response is right at a
position with chance 1 / V whatever stands before it, so the value of a prefix follows from what it has already earned.
"""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh

from jax_ppo import sharding
from jax_ppo.config import Config, OptimConfig, PPOConfig, RolloutConfig, TrainConfig
from jax_ppo.learner import Learner, row_shape
from jax_ppo.models.layers import QwenConfig
from jax_ppo.rollout.engine import Engine
from jax_ppo.steps import Steps
from jax_ppo.types import Params, Problem, Prompts, Rollout

VOCABULARY, BATCH = 4, 256
# Without two different tokens in front, a model that knows relative positions only cannot count the tokens after them.
PROMPTS = (np.array([1, 0], np.int32), np.array([2, 3, 0], np.int32))
TARGETS = np.array([[2, 0, 1], [1, 3, 0]])
RESPONSE = TARGETS.shape[1]
# A prefix of two tokens is seen a fourth as often as one of one token, so what is still to come after it is made to vary less.
SHARES = np.array([0.6, 0.3, 0.1])
EVEN = np.full(RESPONSE, 1 / RESPONSE)
# Wider than the longest prompt, so that micro-batches hold several sequences a row.
PROMPT_WIDTH = 8

MODEL = QwenConfig(
    vocab_size=VOCABULARY,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    rope_theta=100.0,
    rms_norm_eps=1e-6,
    tie_word_embeddings=False,
    attention_bias=True,
    qk_norm=False,
)


def one_device() -> Mesh:
    """A mesh of one device; eight would only take turns on a CPU."""
    return Mesh(np.array(jax.devices()[:1]).reshape(1, 1, 1), sharding.AXES, axis_types=(AxisType.Auto,) * 3)


def redrawn(shapes: Params, seed: int) -> Params:
    """Weights large enough to learn from at once, and heads of zero: a uniform policy, and a critic that values nothing."""
    rng = np.random.default_rng(seed)

    def leaf(path: Any, x: Any) -> jax.Array:
        names = [p.key for p in path]
        drawn = rng.normal(size=x.shape) * (1.0 if "embed_tokens" in names else x.shape[-2] ** -0.5 if names[-1] == "kernel" else 0.0)
        start = "weight" == names[-1] and "embed_tokens" not in names
        return jnp.asarray(0.0 * drawn if names[0] in ("lm_head", "score") else start + drawn, jnp.float32)

    return jax.tree_util.tree_map_with_path(leaf, shapes)


class Game:
    """A run of the game.

    config:  its configuration.
    learner: both networks.
    shares:  [R], what each token is worth.
    """

    def __init__(self, seed: int, iterations: int, *, actor: OptimConfig, critic: OptimConfig, shares: np.ndarray = SHARES, **ppo: Any):
        """Args: how long, two optimizers, the score, and the keys of the configuration's section ppo that differ."""
        self.shares = shares
        self.config = Config(
            rollout=RolloutConfig(batch=BATCH, max_response_tokens=RESPONSE),
            ppo=replace(PPOConfig(kl_coef=0.0, epochs=2, minibatches=4, micro_tokens=512), **ppo),
            actor_optim=actor,
            critic_optim=critic,
            train=TrainConfig(iterations=iterations, seed=seed),
        )
        mesh = one_device()
        steps = Steps(self.config, MODEL, MODEL, mesh)
        networks = [n.start(redrawn(n.shapes, seed + i)) for i, n in enumerate((steps.actor, steps.critic))]
        self.learner = Learner(self.config, steps, row_shape(self.config, PROMPT_WIDTH, 1), *networks, None)
        self.engine = Engine(
            prefill=steps.prefill,
            decode=steps.decode,
            widen=steps.widen,
            slots=BATCH,
            prompt_width=PROMPT_WIDTH,
            limit=RESPONSE,
            segment=RESPONSE,
            end_ids=(VOCABULARY,),  # never drawn: every response has three tokens
            pad_id=0,
        )
        self.kinds = np.arange(BATCH) % len(PROMPTS)
        self.prompts = Prompts([Problem("", "")] * BATCH, [PROMPTS[k] for k in self.kinds], np.arange(BATCH))

    def play(self, iteration: int, *, temperature: float = 1.0) -> Rollout:
        """Responses of the present policy."""
        params = self.learner.actor.params
        key = jax.random.fold_in(jax.random.key(self.config.train.seed), iteration)
        weights = self.learner.steps.decode_weights(params)
        return self.engine.generate(params, weights, self.prompts, key, temperature=temperature)

    def hits(self, rollout: Rollout) -> np.ndarray:
        """[B, R] bool, where a response meets its target."""
        return rollout.tokens == TARGETS[self.kinds]

    def scores(self, rollout: Rollout) -> np.ndarray:
        """[B] float32, from 0 to 1."""
        return (self.hits(rollout) @ self.shares).astype(np.float32)

    def iterate(self, iteration: int) -> dict[str, Any]:
        """One iteration of PPO, from 1; returns its metrics."""
        rollout = self.play(iteration)
        experience, metrics = self.learner.experience(self.prompts, rollout, self.scores(rollout), 0.0)
        return metrics | self.learner.update(self.prompts, rollout, experience, iteration)

    def values(self, rollout: Rollout) -> np.ndarray:
        """[B, R], what the critic says of the prefix before each token."""
        experience, _ = self.learner.experience(self.prompts, rollout, self.scores(rollout), 0.0)
        return np.asarray(experience.values)

    def true_values(self, rollout: Rollout) -> np.ndarray:
        """[B, R], the same under the uniform policy: gamma^(R-1-t) (earned before t + chance x shares from t on)."""
        earned = self.hits(rollout) * self.shares
        to_come = np.cumsum(self.shares[::-1])[::-1] / VOCABULARY
        discount = self.config.ppo.gamma ** np.arange(RESPONSE - 1, -1, -1)
        return (np.cumsum(earned, axis=1) - earned + to_come) * discount
