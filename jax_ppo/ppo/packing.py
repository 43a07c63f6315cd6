"""Several sequences in one row, so that no work is spent on padding.

Host code of numpy arrays: the lengths are known there. This is the one place that knows how response tokens, positions and
[B, R] arrays are aligned.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jax_ppo.types import PackedBatch


class Placement(NamedTuple):
    """Where each sequence stands.

    row, start: [B] int32, the row of a sequence and its first column.
    rows:       how many rows are used.
    """

    row: np.ndarray
    start: np.ndarray
    rows: int


def pack(lengths: Sequence[int] | np.ndarray, row_length: int) -> Placement:
    """First-fit decreasing: the longest sequence first, each into the first row that has room.

    Args:
      lengths:    [B] tokens of each sequence; a sequence of 0 tokens takes no room.
      row_length: L, columns of a row.

    Returns:
      The placement; sequences in a row do not overlap.

    Raises:
      ValueError: if a sequence is longer than a row, or a length is negative.
    """
    lengths = np.asarray(lengths, np.int64)
    if lengths.size and (lengths.max() > row_length or lengths.min() < 0):
        worst = int(np.argmax(np.where(lengths < 0, np.iinfo(np.int64).max, lengths)))
        raise ValueError(f"sequence {worst} has {lengths[worst]} tokens, a row holds 0 to {row_length}")
    row, start = np.zeros(len(lengths), np.int32), np.zeros(len(lengths), np.int32)
    used = np.zeros(len(lengths) + 1, np.int64)
    rows = 0
    for i in np.argsort(-lengths, kind="stable"):
        # The row behind the last one is empty and always fits, so argmax finds a True.
        r = int(np.argmax(used[: rows + 1] + lengths[i] <= row_length))
        row[i], start[i] = r, used[r]
        used[r] += lengths[i]
        rows = max(rows, r + 1)
    return Placement(row, start, rows)


def layout(
    prompts: Sequence[np.ndarray],
    responses: np.ndarray,
    lengths: np.ndarray,
    chosen: np.ndarray,
    *,
    rows: int,
    row_length: int,
) -> list[PackedBatch]:
    """Packs the chosen sequences into micro-batches of one fixed shape.

    Response token t of sequence b stands right behind its prompt and its tokens before t; its log-probability and value come
    from the position before it. So `source` at position p - 1 + t of the sequence (p its prompt length) is b R + t, and
    `targets` there is the token.

    Args:
      prompts:    B arrays int32.
      responses:  [B, R] int32.
      lengths:    [B] int32 response lengths.
      chosen:     indices of the sequences to take.
      rows:       N, rows of a micro-batch; the last one is filled with empty rows.
      row_length: L.

    Returns:
      Micro-batches in which every chosen sequence stands exactly once.
    """
    chosen = np.asarray(chosen)
    prompt_lengths = np.array([len(prompts[b]) for b in chosen], np.int64)
    place = pack(prompt_lengths + lengths[chosen], row_length)
    total = max(-(-place.rows // rows), 1) * rows
    tokens, positions, segments, targets = (np.zeros((total, row_length), np.int32) for _ in range(4))
    source, last = np.full((2, total, row_length), -1, np.int32)
    segment_of_row = np.zeros(total, np.int32)
    for b, row, start, p in zip(chosen, place.row, place.start, prompt_lengths, strict=True):
        n = int(lengths[b])
        segment_of_row[row] += 1
        here = slice(start, start + p + n)
        tokens[row, here] = np.concatenate([prompts[b], responses[b, :n]])
        positions[row, here] = np.arange(p + n)
        segments[row, here] = segment_of_row[row]
        predicting = slice(start + p - 1, start + p - 1 + n)
        targets[row, predicting] = responses[b, :n]
        source[row, predicting] = b * responses.shape[1] + np.arange(n)
        last[row, start + p + n - 1] = b
    parts = [slice(i, i + rows) for i in range(0, total, rows)]
    return [PackedBatch(tokens[s], positions[s], segments[s], targets[s], source[s], last[s]) for s in parts]


def fill(batches: Sequence[PackedBatch]) -> float:
    """Share of the positions that hold a token."""
    return float(np.mean([np.mean(np.asarray(b.segment_ids) > 0) for b in batches]))
