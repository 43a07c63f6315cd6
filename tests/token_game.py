"""A game whose value function and optimum are known exactly, played through the same engine, learner and steps as a real run.

A prompt asks for a response of three tokens. Each token that is the prompt's target at its position earns a share of the score,
and the score arrives with the last token. The first policy of every game draws each token evenly from CHOICES ids, so a response
is right at a position with chance 1 / CHOICES whatever stands before it, and the value of a prefix follows from what it has earned.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import AxisType, Mesh

from jax_ppo import sharding
from jax_ppo.config import Config, OptimConfig, PPOConfig, RolloutConfig, TrainConfig
from jax_ppo.learner import Learner, row_shape
from jax_ppo.models.layers import QwenConfig
from jax_ppo.rollout.engine import Engine
from jax_ppo.steps import Steps
from jax_ppo.types import Params, Problem, Prompts, Rollout

# Responses are made of the ids 0 to 3. The others stand in prompts only: a model that knows no absolute positions cannot count
# equal tokens without a token of another kind in front of them.
CHOICES, END, PAD, VOCABULARY = 4, 6, 7, 8
PROMPTS = (np.array([4, 5], np.int32), np.array([4, 4, 6], np.int32))
TARGETS = np.array([[2, 0, 1], [1, 3, 0]])
RESPONSE = TARGETS.shape[1]
# A prefix of two tokens is seen a fourth as often as one of one token; in return, less is left to chance after it.
SHARES = np.array([0.6, 0.3, 0.1])
EVEN = np.full(RESPONSE, 1 / RESPONSE)
BATCH = 256
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


@contextmanager
def compile_once(folder: Path) -> Iterator[None]:
    """Keeps compiled programs in `folder`: several `Steps` have most of theirs in common, and compiling is what takes the time."""
    settings = {
        "jax_compilation_cache_dir": str(folder),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    before = {name: getattr(jax.config, name) for name in settings}
    try:
        for name, value in settings.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()
        yield
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()


def one_device() -> Mesh:
    """A mesh of one device; eight would only take turns on a CPU."""
    return Mesh(np.array(jax.devices()[:1]).reshape(1, 1, 1), sharding.AXES, axis_types=(AxisType.Auto,) * 3)


def first_weights(shapes: Params, seed: int) -> Params:
    """Weights large enough to learn from at once; a critic that says 0, or an actor that draws evenly from CHOICES ids.

    Hidden dimension 0 is the same positive number for every token, so a negative weight there keeps a token from being drawn.
    """
    rng = np.random.default_rng(seed)

    def leaf(path: Any, shape: Any) -> jax.Array:
        names = [p.key for p in path]
        x = np.zeros(shape.shape)
        if names[-1] == "kernel" and "layers" in names:
            x = rng.normal(size=x.shape) * x.shape[-2] ** -0.5
            if "o_proj" in names or "down_proj" in names:
                x[..., 0] = 0.0
        elif "embed_tokens" in names:
            x = rng.normal(size=x.shape)
            x[:, 0] = 2.0
        elif names[0] == "lm_head":
            x[0, CHOICES:] = -40.0
        elif names[-1] == "weight":
            x += 1.0
        return jnp.asarray(x, jnp.float32)

    return jax.tree_util.tree_map_with_path(leaf, shapes)


class Game:
    """A run of the game.

    config:  its configuration.
    learner: both networks.
    shares:  [R], what each token is worth.
    """

    def __init__(self, seed: int, iterations: int, *, actor: float, critic: OptimConfig, shares: np.ndarray = SHARES, **ppo: Any):
        """Args: how long, the actor's learning rate, the critic's optimizer, the score, and keys of `config.ppo`."""
        self.shares = shares
        self.config = Config(
            rollout=RolloutConfig(batch=BATCH, max_response_tokens=RESPONSE),
            ppo=replace(PPOConfig(kl_coef=0.0, epochs=2, minibatches=4, micro_tokens=512), **ppo),
            actor_optim=OptimConfig(lr=actor),
            critic_optim=critic,
            train=TrainConfig(iterations=iterations, seed=seed),
        )
        self.mesh = one_device()
        steps = Steps(self.config, MODEL, MODEL, self.mesh)
        networks = [n.start(first_weights(n.shapes, seed + i)) for i, n in enumerate((steps.actor, steps.critic))]
        self.learner = Learner(self.config, steps, row_shape(self.config, PROMPT_WIDTH, 1), *networks, None)
        self.engine = Engine(
            programs=steps.rollout,
            shards=1,
            slots=BATCH,
            prompt_width=PROMPT_WIDTH,
            limit=RESPONSE,
            size=RESPONSE,
            end_ids=(END,),
            pad_id=PAD,
        )
        self.kinds = np.arange(BATCH) % len(PROMPTS)
        self.prompts = Prompts([Problem("", "")] * BATCH, [PROMPTS[k] for k in self.kinds], np.arange(BATCH))

    def play(self, iteration: int, *, temperature: float = 1.0) -> Rollout:
        """Responses of the present policy."""
        with jax.set_mesh(self.mesh):
            params = self.learner.actor.params
            key = jax.random.fold_in(jax.random.key(self.config.train.seed), iteration)
            return self.engine.generate(
                params, self.learner.steps.decode_weights(params), self.prompts, key, temperature=temperature
            )

    def hits(self, rollout: Rollout) -> np.ndarray:
        """[B, R] bool, where a response meets its target."""
        return rollout.tokens == TARGETS[self.kinds]

    def scores(self, rollout: Rollout) -> np.ndarray:
        """[B] float32, from 0 to 1."""
        return (self.hits(rollout) @ self.shares).astype(np.float32)

    def iterate(self, iteration: int) -> dict[str, Any]:
        """One iteration of PPO, from 1; returns its metrics."""
        rollout = self.play(iteration)
        with jax.set_mesh(self.mesh):
            experience, metrics = self.learner.experience(self.prompts, rollout, self.scores(rollout), 0.0)
            return metrics | self.learner.update(self.prompts, rollout, experience, iteration)

    def run(self) -> list[dict[str, Any]]:
        """All iterations; returns the metrics of each."""
        return [self.iterate(i) for i in range(1, self.config.train.iterations + 1)]

    def values(self, rollout: Rollout) -> np.ndarray:
        """[B, R], what the critic says of the prefix before each token."""
        with jax.set_mesh(self.mesh):
            experience, _ = self.learner.experience(self.prompts, rollout, self.scores(rollout), 0.0)
        return np.asarray(experience.values)

    def true_values(self, rollout: Rollout) -> np.ndarray:
        """[B, R], the same under the first policy: gamma^(R-1-t) (earned before t + chance x shares from t on)."""
        earned = self.hits(rollout) * self.shares
        to_come = np.cumsum(self.shares[::-1])[::-1] / CHOICES
        discount = self.config.ppo.gamma ** np.arange(RESPONSE - 1, -1, -1)
        return (np.cumsum(earned, axis=1) - earned + to_come) * discount
