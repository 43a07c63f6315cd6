"""The structures that travel from stage to stage, and the letters that name their axes.

    B sequences         P prompt length      R response length   S = P + R
    N packed rows       L packed row length  T query positions of one call
    V vocabulary        D model width        F MLP width         X layers
    K kv heads          G query heads per kv head                H head size

Alignment, stated once: index t of every [B, R] array belongs to response token t. Its log-probability and its value come
from the position *before* that token; `jax_ppo.ppo.packing.layout` is the one function that knows this.
"""

from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from flax import struct

Params = dict[str, Any]


class InputError(Exception):
    """Something the user gave is wrong: a key, a line of data, a model file. `main` prints it as one line and exits with 2."""


class RunError(Exception):
    """A run that cannot go on, for a reason worth one line: `main` prints it and exits with 1."""


@dataclass(frozen=True)
class Problem:
    """One task for the model.

    question: what is asked.
    answer:   the gold answer as text, for instance "18".
    solution: a worked solution that ends in the answer; only the supervised warm start reads it.
    """

    question: str
    answer: str
    solution: str = ""


@dataclass(frozen=True)
class Prompts:
    """A batch of prompts on the host.

    problems: B problems.
    tokens:   B arrays int32, each as long as its prompt.
    rows:     [B] int64, the number from which a row's randomness is derived; unique within an iteration.
    """

    problems: list[Problem]
    tokens: list[np.ndarray]
    rows: np.ndarray

    @property
    def lengths(self) -> np.ndarray:
        """Prompt lengths, [B] int32."""
        return np.array([len(t) for t in self.tokens], np.int32)


@dataclass(frozen=True)
class Rollout:
    """Sampled responses on the host.

    tokens:   [B, R] int32; the pad id behind each row's length.
    lengths:  [B] int32, counting the end token.
    logprobs: [B, R] float32, of each token under the distribution it was drawn from; 0 behind the length.
    finished: [B] bool; True where the row drew an end token, False where it ran into the limit.
    """

    tokens: np.ndarray
    lengths: np.ndarray
    logprobs: np.ndarray
    finished: np.ndarray

    @property
    def mask(self) -> np.ndarray:
        """[B, R] bool: True on generated tokens, the end token included."""
        return np.arange(self.tokens.shape[1])[None, :] < self.lengths[:, None]


@struct.dataclass
class Experience:
    """What the update learns from, on the device. Every array is [B, R] float32.

    mask:       1 on generated tokens up to and including the end token.
    policy:     the weight of each token in the policy loss (the mask, cut and scaled by the aggregation).
    old_logprobs, ref_logprobs: log-probabilities under the sampling policy and under the reference.
    values:     critic values before the update; 0 without a critic.
    advantages: as the policy learns from them.
    returns:    targets of the critic, from advantages before whitening.
    """

    mask: jax.Array
    policy: jax.Array
    old_logprobs: jax.Array
    ref_logprobs: jax.Array
    values: jax.Array
    advantages: jax.Array
    returns: jax.Array


@struct.dataclass
class PackedBatch:
    """Several sequences a row, [N, L] int32 each.

    tokens:      token ids; 0 where nothing stands.
    positions:   position within the own sequence, from 0.
    segment_ids: 1, 2, ... within a row; 0 marks padding.
    targets:     the response token that follows this position, or 0.
    source:      index into the flattened [B, R] arrays of that response token, or -1.
    last:        index of the sequence whose last token stands here, or -1; its value bootstraps a truncated response.
    """

    tokens: jax.Array | np.ndarray
    positions: jax.Array | np.ndarray
    segment_ids: jax.Array | np.ndarray
    targets: jax.Array | np.ndarray
    source: jax.Array | np.ndarray
    last: jax.Array | np.ndarray


@struct.dataclass
class TrainState:
    """One network in training.

    params:    nested dict of weights in the master dtype.
    opt_state: optax state.
    updates:   int32, optimizer updates applied so far; the schedule reads it.
    skipped:   int32, updates in a row that a non-finite gradient has cost.
    """

    params: Params
    opt_state: Any
    updates: jax.Array
    skipped: jax.Array
