"""The host half of sampling: which rows are decoded when, in which slots, and how wide their cache is."""

import itertools
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from jax_ppo import sharding
from jax_ppo.rollout.decoding import Programs, Rows, Sampling
from jax_ppo.types import Params, Prompts, Rollout

# Prompt tokens that one prefill reads on each row shard: enough to keep an accelerator busy, few enough that the last,
# half-filled one wastes little.
PREFILL_TOKENS = 2048
NARROWEST = 32
FREE = -1


@dataclass(frozen=True)
class Engine:
    """Samples responses in slots, each of which holds one row at a time.

    All rows end in the same column of the cache, so one scalar says where the next key is written. The host looks at the rows
    once a segment: finished ones leave, waiting prompts enter, and where the cache is full, or wider or taller than the live
    rows need, they are moved to the left of a cache of another size. So attention reads about what is alive, and no row waits
    for the longest. What a row says depends on none of that.

    Sizes come from short ladders, so a rollout needs few programs; `compile` makes them all, and no rollout compiles after it.

    programs:     what runs on the device.
    shards:       row shards of the mesh; a row never leaves its shard.
    slots:        rows decoded at once; a multiple of `shards`.
    prompt_width: P, at least the longest prompt.
    limit:        R, the longest response.
    size:         tokens of a segment.
    end_ids:      ids that end a response.
    pad_id:       what stands behind the end.
    """

    programs: Programs
    shards: int
    slots: int
    prompt_width: int
    limit: int
    size: int
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
        min_tokens: int = 0,
        limit: int | None = None,
        progress: Callable[[int, int], Any] = lambda done, total: None,
        listen: Callable[[int, list[int]], Any] = lambda b, tokens: None,
    ) -> Rollout:
        """Samples one response a prompt.

        Args:
          params:      the actor's stacked parameters, for the prefill.
          weights:     the same from `qwen.decode_weights`, for the token loop.
          prompts:     B prompts, none longer than `prompt_width`. Equal ones are read once.
          key:         the iteration's PRNG key.
          temperature: 0 is greedy.
          top_k, top_p: filters; 0 and 1 are off.
          min_tokens:  no end id is drawn before these.
          limit:       a smaller limit than R.
          progress:    called with (responses done, all responses) between segments.
          listen:      called with (index of the prompt, its next tokens) between segments.

        Returns:
          The responses, in the order of the prompts.

        Raises:
          ValueError: for a limit that is not from 1 to R, or below `min_tokens`.
        """
        limit = self.limit if limit is None else limit
        if not max(1, min_tokens) <= limit <= self.limit:
            raise ValueError(f"limit={limit}: must be from max(1, min_tokens={min_tokens}) to {self.limit}")
        sampling = self._sampling(key, temperature, top_k, top_p, min_tokens, limit)
        return _Run(self, params, weights, prompts, sampling, progress, listen).finish()

    def compile(self, params: Params, weights: Params, progress: Callable[[int, int], Any] = lambda done, total: None) -> None:
        """Compiles everything that any rollout may need, several programs at a time.

        Args:
          params, weights: as `generate` takes them, or their shapes and shardings; nothing is computed.
          progress:        called with (programs done, all programs).
        """
        programs, shards, rows = self.programs, self.shards, self.prefill_rows
        sampling = self._sampling(jax.random.key(0), 1.0, 0, 1.0, 0, self.limit)
        integers: Any = lambda *shape: np.zeros(shape, np.int32)  # noqa: E731
        number = integers()[()]
        prefills = {p: programs.prefill.lower(params, integers(rows, p), integers(rows)) for p in self.prompt_widths}
        fresh = {p: sharding.result(prefill) for p, prefill in prefills.items()}
        lowered = [*prefills.values()]
        for height, width in itertools.product(self.heights, self.widths):
            cache, each = sharding.result(programs.empty.lower(height, width)), integers(height)
            idle = Rows(each, each, each, each, each == 0)
            lowered.append(programs.segment.lower(weights, cache, idle, number, number, sampling))
            for slots, wanted in itertools.product([h for h in self.heights if h <= height], self.widths):
                source = integers(shards, slots // shards)
                lowered.append(programs.arrange.lower(cache[0], source, number, width=wanted))
            for prompts in [kept for p, kept in fresh.items() if p <= width]:
                lowered.append(programs.admit.lower(cache[0], prompts, number, integers(shards, height // shards), number))
        with ThreadPoolExecutor(4) as pool:
            for done, _ in enumerate(pool.map(lambda program: program.compile(), lowered), start=1):
                progress(done, len(lowered))

    def _sampling(self, key: jax.Array, temperature: float, top_k: int, top_p: float, min_tokens: int, limit: int) -> Sampling:
        # Of the host: every process has them, and none has to be told.
        fields: dict[str, Any] = {
            "temperature": np.float32(temperature),
            "top_k": np.int32(top_k),
            "top_p": np.float32(top_p),
            "end_ids": np.asarray(self.end_ids, np.int32),
            "min_tokens": np.int32(min_tokens),
            "limit": np.int32(limit),
        }
        return Sampling(key=key, **fields)

    @property
    def heights(self) -> list[int]:
        """Numbers of slots, from the smallest: a quarter serves the last rows of a large batch."""
        quarter = -(-self.slots // (4 * self.shards)) * self.shards
        return [quarter, self.slots] if self.slots >= 32 * self.shards else [self.slots]

    @property
    def widths(self) -> list[int]:
        """Widths of the cache, from the smallest."""
        return ladder(min(self.prompt_width + self.size, 2 * self.prompt_width), self.prompt_width + self.limit)

    @property
    def prompt_widths(self) -> list[int]:
        """Widths of a prefill, from the smallest."""
        return ladder(min(self.prompt_width, NARROWEST), self.prompt_width)

    @property
    def prefill_rows(self) -> int:
        """C: prompts of one prefill."""
        return self.shards * max(1, min(self.slots // self.shards, PREFILL_TOKENS // self.prompt_width))


def ladder(low: int, high: int) -> list[int]:
    """Sizes that double from `low`, and `high`; none so close below it that it is not worth a program."""
    sizes = []
    while 1.3 * low <= high:
        sizes.append(low)
        low *= 2
    return [*sizes, high]


def fitting(sizes: Sequence[int], need: int) -> int:
    """The smallest size that is enough."""
    return next(size for size in sizes if size >= need)


class _Run:
    """One call of `Engine.generate`: what is where.

    holder: [S] the prompt that each slot works on, or FREE. The slots of a row shard stand together.
    cache:  keys [S, K, H, W] and values [S, K, W, H] of each layer. A row's last token is not in it: the next step reads it.
    column: where the next key is written; every row ends just before it.
    """

    def __init__(
        self,
        engine: Engine,
        params: Params,
        weights: Params,
        prompts: Prompts,
        sampling: Sampling,
        progress: Callable[[int, int], Any],
        listen: Callable[[int, list[int]], Any],
    ):
        self.engine, self.params, self.weights, self.sampling = engine, params, weights, sampling
        self.progress, self.listen, self.limit = progress, listen, int(sampling.limit)
        self.prompts, self.numbers, count = prompts.tokens, prompts.rows.astype(np.int32), len(prompts.tokens)
        self.tokens = np.full((count, engine.limit), engine.pad_id, np.int32)
        self.logprobs = np.zeros((count, engine.limit), np.float32)
        self.counts, self.ended = np.zeros(count, np.int32), np.zeros(count, bool)
        # Copies of a prompt stand together, prompts of about one length too, so that a prefill wastes little.
        self.text = [tokens.tobytes() for tokens in self.prompts]
        self.waiting = deque(sorted(range(count), key=lambda b: (-len(self.text[b]), self.text[b])))
        rows = engine.shards * -(-count // engine.shards)
        self.holder = np.full(fitting(engine.heights, min(rows, engine.slots)), FREE)
        self.cache: list[tuple[jax.Array, jax.Array]] = []
        self.column = 0

    @property
    def live(self) -> np.ndarray:
        """The prompts being worked on."""
        return self.holder[self.holder != FREE]

    def finish(self) -> Rollout:
        """Decodes until nothing waits and nothing lives."""
        count = len(self.prompts)
        while self.waiting or self.live.size:
            prefills = self._seat()
            self._make_room(max((tokens.shape[1] for tokens, _, _ in prefills), default=0))
            for prefill in prefills:
                self._admit(*prefill)
            self._decode()
            self.progress(count - len(self.waiting) - self.live.size, count)
        return Rollout(self.tokens, self.counts, self.logprobs, self.ended)

    def _seat(self) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """Gives free slots to waiting prompts; copies of one prompt share a shard, and a line of its prefill.

        Returns:
          The prefills they need: tokens [C, P], lengths [C], and which line each slot takes, [shards, S / shards] or -1.
        """
        shards, per_shard = self.engine.shards, self.engine.prefill_rows // self.engine.shards
        slots = np.arange(len(self.holder)).reshape(shards, -1)
        free = [deque(row[self.holder[row] == FREE].tolist()) for row in slots]
        seats: list[dict[bytes, list[int]]] = [{} for _ in range(shards)]
        while self.waiting and any(free):
            shard = max(range(shards), key=lambda i: len(free[i]))
            text = self.text[self.waiting[0]]
            while free[shard] and self.waiting and self.text[self.waiting[0]] == text:
                slot = free[shard].popleft()
                self.holder[slot] = self.waiting.popleft()
                seats[shard].setdefault(text, []).append(slot)
        prefills = []
        for first in range(0, max(map(len, seats)), per_shard):
            lines = [list(s.values())[first : first + per_shard] for s in seats]
            read = {(i, j): self.prompts[self.holder[line[0]]][:-1] for i, row in enumerate(lines) for j, line in enumerate(row)}
            tokens = np.zeros((shards, per_shard, fitting(self.engine.prompt_widths, max(map(len, read.values())))), np.int32)
            lengths, source = np.zeros((shards, per_shard), np.int32), np.full(slots.size, -1, np.int32)
            for (i, j), prompt in read.items():
                tokens[i, j, tokens.shape[2] - len(prompt) :], lengths[i, j] = prompt, len(prompt)
                source[lines[i][j]] = j
            prefills.append((tokens.reshape(-1, tokens.shape[2]), lengths.reshape(-1), source.reshape(shards, -1)))
        return prefills

    def _make_room(self, prompt_width: int) -> None:
        """Sees to it that `prompt_width` columns lie before the column, a segment behind it, and not much else.

        Where that needs another place or size, live rows move to the front of their shard, and the longest to column 0.
        """
        engine, programs, shards = self.engine, self.engine.programs, self.engine.shards
        live = self.live
        reach = max(int(self._lengths(live).max()), prompt_width)
        room = min(engine.size, self.limit - int(self.counts[live].min()))
        width = fitting(engine.widths, min(reach + room, engine.widths[-1]))
        seats = (self.holder.reshape(shards, -1) != FREE).sum(axis=1)
        height = len(self.holder) if self.waiting else fitting(engine.heights, int(seats.max()) * shards)
        if not self.cache:
            self.cache, self.column = programs.empty(len(self.holder), width), reach
            return
        same = (height, width) == (len(self.holder), self.cache[0][0].shape[3])
        if same and self.column >= prompt_width and self.column + room <= width:
            return
        holder = self.holder.reshape(shards, -1)
        source = np.argsort(holder == FREE, axis=1, kind="stable")[:, : height // shards].astype(np.int32)
        start = np.int32(self.column - reach)
        for layer, pair in enumerate(self.cache):
            self.cache[layer] = programs.arrange(pair, source, start, width=width)
        self.holder, self.column = np.take_along_axis(holder, source, axis=1).reshape(-1), reach

    def _admit(self, tokens: np.ndarray, lengths: np.ndarray, source: np.ndarray) -> None:
        fresh = self.engine.programs.prefill(self.params, tokens, lengths)
        for layer, pair in enumerate(self.cache):
            self.cache[layer] = self.engine.programs.admit(pair, fresh, np.int32(layer), source, np.int32(self.column))

    def _decode(self) -> None:
        """One segment, and the host's only look at the device: what was drawn."""
        slots, smallest, live = len(self.holder), self.engine.heights[0], self.live.size
        # Stop once so few rows are left that a prefill, or a move into fewer slots, is worth it.
        left = live - max(1, slots // 8) if self.waiting else smallest if live > smallest else 0
        self.cache, drawn = self.engine.programs.segment(
            self.weights, self.cache, self._rows(), np.int32(self.column), np.int32(slots - left), self.sampling
        )
        drawn = jax.device_get(drawn)
        self.column += int(drawn.steps)
        for slot in np.flatnonzero(self.holder != FREE):
            b = self.holder[slot]
            before, self.counts[b] = self.counts[b], drawn.count[slot]
            new = drawn.count[slot] - before
            self.tokens[b, before : before + new] = drawn.tokens[slot, :new]
            self.logprobs[b, before : before + new] = drawn.logprobs[slot, :new]
            self.ended[b] = drawn.ended[slot]
            self.listen(int(b), drawn.tokens[slot, :new].tolist())
            if drawn.ended[slot] or self.counts[b] == self.limit:
                self.holder[slot] = FREE

    def _lengths(self, b: np.ndarray) -> np.ndarray:
        """Tokens in the cache of these prompts: all but the last one."""
        return np.array([len(self.prompts[i]) for i in b], np.int32) + self.counts[b] - 1

    def _rows(self) -> Rows:
        live = self.holder != FREE
        b = self.holder[live]
        fields: list[Any] = [*np.zeros((4, len(live)), np.int32), ~live]
        token, length, count, number, done = fields
        token[live] = [self.tokens[i, self.counts[i] - 1] if self.counts[i] else self.prompts[i][-1] for i in b]
        length[live], count[live], number[live] = self._lengths(b), self.counts[b], self.numbers[b]
        return Rows(token, length, count, number, done)
