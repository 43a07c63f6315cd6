"""The host half of sampling: which rows are decoded when, and how wide their cache is."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_ppo.rollout.decoding import Sampling, Slots
from jax_ppo.types import Params, Prompts, Rollout


@dataclass(frozen=True)
class Engine:
    """Samples responses with the jitted functions of `jax_ppo.steps`.

    Rows are decoded `slots` at a time, prompts right-aligned in `prompt_width` columns so that one write column serves every
    row. The cache starts `segment` columns wider than the prompts and doubles its room whenever it is full, so attention reads
    at most about twice the live columns, and a run compiles one program for each of a few widths. The host looks at the rows
    once a segment.

    prefill, decode, widen: jitted; see `jax_ppo.rollout.decoding`.
    slots:        rows decoded at once; a multiple of the row shards of the mesh.
    prompt_width: P, at least the longest prompt.
    limit:        R, the longest response.
    segment:      room of the first cache.
    end_ids:      ids that end a response.
    pad_id:       what stands behind the end.
    """

    prefill: Callable[..., Slots]
    decode: Callable[..., Slots]
    widen: Callable[..., Slots]
    slots: int
    prompt_width: int
    limit: int
    segment: int
    end_ids: tuple[int, ...]
    pad_id: int

    def generate(
        self,
        params: Params,
        weights: Params,
        prompts: Prompts,
        key: jax.Array,
        *,
        temperature: float,
        top_k: int = 0,
        top_p: float = 1.0,
        progress: Callable[[int, int], Any] = lambda done, total: None,
    ) -> Rollout:
        """Samples one response a prompt.

        Args:
          params:      the actor's stacked parameters, for the prefill.
          weights:     the same from `qwen.decode_weights`, for the token loop.
          prompts:     B prompts, none longer than `prompt_width`.
          key:         the iteration's PRNG key.
          temperature: 0 is greedy.
          top_k, top_p: filters; 0 and 1 are off.
          progress:    called with (responses done, all responses) between segments.

        Returns:
          The responses, in the order of the prompts.
        """
        sampling = Sampling(
            key=key,
            temperature=jnp.float32(temperature),
            top_k=jnp.int32(top_k),
            top_p=jnp.float32(top_p),
            end_ids=jnp.asarray(self.end_ids, jnp.int32),
            pad_id=jnp.int32(self.pad_id),
        )
        count = len(prompts.tokens)
        parts = []
        for first in range(0, count, self.slots):
            last = min(first + self.slots, count)
            tokens, lengths, rows, live = self._arrange(prompts, first, last)
            slots = self.prefill(params, tokens, lengths, rows, live, sampling, width=self._widths()[0], limit=self.limit)
            for width in self._widths():
                if width > slots.cache[0][0].shape[1]:
                    slots = self.widen(slots, width=width)
                slots = self.decode(weights, slots, sampling)
                done = np.asarray(slots.done)[: last - first]
                progress(first + int(done.sum()), count)
                if done.all():
                    break
            parts.append([x[: last - first] for x in jax.device_get((slots.tokens, slots.lengths, slots.logprobs, slots.done))])
        return Rollout(*(np.concatenate(x) for x in zip(*parts, strict=True)))

    def _widths(self) -> list[int]:
        """Cache widths: room for `segment` tokens, then twice as many, up to the limit."""

        def room() -> Iterator[int]:
            size = self.segment
            while size < self.limit:
                yield size
                size *= 2
            yield self.limit

        return [self.prompt_width + size for size in room()]

    def _arrange(self, prompts: Prompts, first: int, last: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Right-aligned prompts; free slots hold a prompt of one token and are not live."""
        tokens = np.full((self.slots, self.prompt_width), self.pad_id, np.int32)
        lengths, rows, live = np.ones(self.slots, np.int32), np.zeros(self.slots, np.int32), np.zeros(self.slots, bool)
        for slot, b in enumerate(range(first, last)):
            prompt = prompts.tokens[b]
            tokens[slot, self.prompt_width - len(prompt) :] = prompt
            lengths[slot], rows[slot], live[slot] = len(prompt), prompts.rows[b], True
        return tokens, lengths, rows, live
