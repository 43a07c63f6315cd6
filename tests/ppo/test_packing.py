"""Packing against the properties it promises, and the layout of packed rows against a loop over sequences and tokens."""

import jax.numpy as jnp
import numpy as np
import pytest

from jax_ppo.ppo.packing import Placement, fill, layout, pack
from jax_ppo.ppo.update import gather, scatter
from jax_ppo.types import PackedBatch


def occupied(place: Placement, lengths: np.ndarray, row_length: int) -> np.ndarray:
    """How often each cell of the rows is taken, [rows, row_length]; fails where a sequence stands outside."""
    cells = np.zeros((place.rows, row_length), int)
    for row, start, length in zip(place.row, place.start, lengths, strict=True):
        assert 0 <= row < place.rows
        assert 0 <= start <= start + length <= row_length
        cells[row, start : start + length] += 1
    return cells


@pytest.mark.parametrize("seed", range(20))
def test_every_token_has_a_cell_of_its_own(seed: int) -> None:
    rng = np.random.default_rng(seed)
    row_length = int(rng.integers(1, 50))
    lengths = rng.integers(0, row_length + 1, rng.integers(1, 80))
    place = pack(lengths, row_length)
    cells = occupied(place, lengths, row_length)
    assert cells.max(initial=0) <= 1
    assert cells.sum() == lengths.sum()
    # First fit leaves no gap inside a row, no row empty, and at most one row that is no more than half full.
    used = cells.sum(axis=1)
    np.testing.assert_array_equal(cells, np.arange(row_length) < used[:, None])
    if lengths.any():
        assert used.min() > 0
        assert np.sum(used * 2 <= row_length) <= 1


@pytest.mark.parametrize("seed", range(5))
def test_order_changes_neither_validity_nor_the_number_of_rows(seed: int) -> None:
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 40, 60)
    rows = pack(lengths, 40).rows
    for _ in range(5):
        shuffled = rng.permutation(lengths)
        place = pack(shuffled, 40)
        assert occupied(place, shuffled, 40).max() == 1
        assert place.rows == rows


def test_first_fit_decreasing_by_hand() -> None:
    """5 and 4 share row 0; 3, 3, 2, 2 fill row 1; 1 fits into row 0 again."""
    place = pack([1, 2, 3, 4, 5, 3, 2], 10)
    assert place.row.tolist() == [0, 1, 1, 0, 0, 1, 1]
    assert place.start.tolist() == [9, 6, 0, 5, 0, 3, 8]
    assert place.rows == 2


def test_nothing_and_empty_sequences() -> None:
    assert pack([], 8).rows == 0
    place = pack([0, 8, 0], 8)
    assert place.rows == 1
    assert occupied(place, np.array([0, 8, 0]), 8).sum() == 8


@pytest.mark.parametrize(
    ("lengths", "message"),
    [([3, 9, 4], "sequence 1 has 9 tokens, a row holds 0 to 8"), ([9, 2, -1], "sequence 2 has -1 tokens, a row holds 0 to 8")],
)
def test_sequences_that_do_not_fit_are_refused(lengths: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pack(lengths, 8)


def random_sequences(seed: int, count: int = 16, limit: int = 12) -> tuple[list[np.ndarray], np.ndarray, np.ndarray]:
    """Prompts, responses [B, R] and their lengths. Tokens are all different, and what stands behind a response is 99999."""
    rng = np.random.default_rng(seed)
    number = iter(range(1, 10_000))
    prompts = [np.array([next(number) for _ in range(n)], np.int32) for n in rng.integers(1, limit + 1, count)]
    lengths = rng.integers(1, limit + 1, count).astype(np.int32)
    lengths[0], lengths[1] = limit, 1
    responses = np.full((count, limit), 99_999, np.int32)
    for b, n in enumerate(lengths):
        responses[b, :n] = [next(number) for _ in range(n)]
    return prompts, responses, lengths


@pytest.mark.parametrize(("rows", "row_length"), [(1, 24), (3, 24), (4, 40), (64, 200)])
def test_layout_against_a_loop(rows: int, row_length: int) -> None:
    """Every token of the packed rows is looked up in the sequences, and every token of the sequences is found once."""
    prompts, responses, lengths = random_sequences(0)
    chosen = np.array([3, 0, 7, 1, 15, 8])
    batches = layout(prompts, responses, lengths, chosen, rows=rows, row_length=row_length)
    sequences = {b: [*prompts[b], *responses[b, : lengths[b]]] for b in chosen}
    where = {token: (b, i) for b, sequence in sequences.items() for i, token in enumerate(sequence)}
    seen, segments, predicted, ends = [], {}, [], []
    for n, batch in enumerate(batches):
        arrays = [
            np.asarray(x) for x in (batch.tokens, batch.positions, batch.segment_ids, batch.targets, batch.source, batch.last)
        ]
        assert all(x.shape == (rows, row_length) and x.dtype == np.int32 for x in arrays)
        for cell in np.ndindex(rows, row_length):
            token, position, segment, target, source, last = (int(x[cell]) for x in arrays)
            if segment == 0:
                assert (token, target, source, last) == (0, 0, -1, -1)
                continue
            b, i = where[token]
            seen.append(token)
            assert position == i
            segments.setdefault((n, cell[0], segment), set()).add(b)
            following = i + 1 - len(prompts[b])
            if 0 <= following < lengths[b]:
                assert target == responses[b, following]
                assert source == b * responses.shape[1] + following
                predicted.append(source)
            else:
                assert (target, source) == (0, -1)
            if i == len(sequences[b]) - 1:
                assert last == b
                ends.append(b)
            else:
                assert last == -1
    assert sorted(seen) == sorted(where)
    assert len(set(predicted)) == len(predicted) == lengths[chosen].sum()
    assert sorted(ends) == sorted(chosen)
    # A segment is one sequence, and a sequence is one segment.
    assert sorted(b for owners in segments.values() for b in owners) == sorted(chosen)


def test_tokens_of_a_sequence_stand_side_by_side_in_a_segment_of_their_own() -> None:
    prompts, responses, lengths = random_sequences(1)
    for batch in layout(prompts, responses, lengths, np.arange(16), rows=4, row_length=48):
        for segments, positions in zip(np.asarray(batch.segment_ids), np.asarray(batch.positions), strict=True):
            for segment in range(1, segments.max() + 1):
                columns = np.flatnonzero(segments == segment)
                np.testing.assert_array_equal(columns, np.arange(columns[0], columns[-1] + 1))
                np.testing.assert_array_equal(positions[columns], np.arange(len(columns)))


def on_device(batch: PackedBatch) -> PackedBatch:
    return PackedBatch(**{name: jnp.asarray(x) for name, x in vars(batch).items()})


@pytest.mark.parametrize(("rows", "row_length"), [(1, 24), (5, 31)])
def test_gather_then_scatter_is_the_identity_on_real_tokens(rows: int, row_length: int) -> None:
    prompts, responses, lengths = random_sequences(2)
    mask = np.arange(12)[None] < lengths[:, None]
    array = np.random.default_rng(0).normal(size=(16, 12)).astype(np.float32)
    result, ends = jnp.full((16, 12), -7.0), jnp.zeros(16)
    for batch in layout(prompts, responses, lengths, np.arange(16), rows=rows, row_length=row_length):
        batch = on_device(batch)
        result = scatter(result, gather(jnp.asarray(array), batch.source), batch.source)
        ends = scatter(ends, batch.tokens.astype(jnp.float32), batch.last)
    np.testing.assert_array_equal(result, np.where(mask, array, -7))
    np.testing.assert_array_equal(ends, responses[np.arange(16), lengths - 1])


def test_gather_aligns_a_response_array_with_the_targets() -> None:
    """Carrying the response tokens themselves to packed positions must give `targets`."""
    prompts, responses, lengths = random_sequences(3)
    for batch in layout(prompts, responses, lengths, np.arange(16), rows=2, row_length=36):
        batch = on_device(batch)
        np.testing.assert_array_equal(gather(jnp.float32(responses), batch.source), batch.targets)


def test_a_micro_batch_more_or_less_only_adds_empty_rows() -> None:
    prompts, responses, lengths = random_sequences(4)
    one_by_one = layout(prompts, responses, lengths, np.arange(16), rows=1, row_length=24)
    together = layout(prompts, responses, lengths, np.arange(16), rows=len(one_by_one) + 2, row_length=24)
    assert len(together) == 1
    stacked = np.concatenate([b.tokens for b in one_by_one])
    np.testing.assert_array_equal(together[0].tokens[: len(one_by_one)], stacked)
    assert not together[0].segment_ids[len(one_by_one) :].any()
    assert fill(together) == pytest.approx(fill(one_by_one) * len(one_by_one) / (len(one_by_one) + 2))


def test_no_sequences_make_one_empty_micro_batch() -> None:
    prompts, responses, lengths = random_sequences(5)
    batches = layout(prompts, responses, lengths, np.array([], int), rows=2, row_length=24)
    assert len(batches) == 1
    assert fill(batches) == 0


def test_a_sequence_longer_than_a_row_is_refused() -> None:
    prompts, responses, lengths = random_sequences(6)
    with pytest.raises(ValueError, match="a row holds 0 to 12"):
        layout(prompts, responses, lengths, np.arange(16), rows=2, row_length=12)


@pytest.mark.parametrize("count", [64, 256, 1024])
def test_lengths_like_those_of_gsm8k_fill_the_rows(count: int) -> None:
    """Prompts of about 100 tokens, responses of about 200 with a long tail, rows as long as the limits of configs/gsm8k.py ask.

    A minibatch of 64 needs 20 rows, of which the last is a part; nothing that packs whole sequences can do better than 19.
    """
    rng = np.random.default_rng(0)
    prompts = [np.ones(n, np.int32) for n in np.clip(rng.normal(100, 30, count), 50, 256).astype(int)]
    lengths = np.clip(rng.lognormal(5.2, 0.4, count), 40, 512).astype(np.int32)
    batches = layout(prompts, np.ones((count, 512), np.int32), lengths, np.arange(count), rows=1, row_length=1024)
    assert fill(batches) >= (0.95 if count >= 256 else 0.9)
    assert len(batches) <= 1.05 * -(-sum(len(p) + n for p, n in zip(prompts, lengths, strict=True)) // 1024) + 1
    # One sequence a row, which is what the rows are long enough for, would fill less than half.
    assert sum(len(p) + n for p, n in zip(prompts, lengths, strict=True)) / (count * 1024) < 0.5
