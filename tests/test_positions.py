"""Positions as arrays, prefixes and chunks: who stands where, and what follows for whom it attends (R2, R3)."""

import jax
import numpy as np
import pytest

from tests.support.accuracy import assert_agrees, check
from tests.support.cases import FEWER_QUERIES, MORE_QUERIES, case, poisoned
from tests.support.programs import Program, everything, forward, gradients, values_and_gradients

pytestmark = pytest.mark.thorough


def drawn(shape, low, high, seed=0):
    return np.random.default_rng(seed).integers(low, high, shape)


WITH_EVERYTHING = {
    "prefix-window": (
        FEWER_QUERIES,
        {"causal": True, "prefix_lengths": np.array([28, 5]), "q_offset": 10, "window": (30, 7)},
    ),
    "chunk-bf16": (MORE_QUERIES, {"causal": True, "chunk_size": 11, "q_offset": np.array([-9, 0])}),
    "q-positions": (FEWER_QUERIES, {"causal": True, "q_positions": drawn((2, 19), -3, 38)}),
    "both-positions-bf16": (
        MORE_QUERIES,
        {"window": (20, 3), "q_positions": drawn((35,), 0, 40), "kv_positions": drawn((2, 19), 0, 40)},
    ),
}
FORWARD_ONLY = {
    "prefix": {"causal": True, "prefix_lengths": 17},
    "prefix-out-of-the-keys": {"causal": True, "prefix_lengths": np.array([-4, 99])},
    "prefix-lengths-chunk": {"causal": True, "prefix_lengths": 20, "kv_lengths": np.array([33, 14]), "chunk_size": 27},
    "chunk-of-1": {"chunk_size": 1},
    "kv-positions-alone": {"causal": True, "kv_positions": drawn((2, 35), 0, 40)},
    "positions-lengths-chunk": {
        "chunk_size": 7, "q_positions": drawn((19,), -9, 40), "kv_positions": drawn((35,), -9, 40),
        "q_lengths": np.array([19, 11]), "kv_lengths": np.array([23, 35]),
    },
    "positions-nobody-reads": {"q_positions": drawn((19,), 0, 9), "kv_positions": drawn((35,), 0, 9)},
}  # fmt: skip
OPTIONS = {name: options for name, (_, options) in WITH_EVERYTHING.items() if "bf16" not in name} | FORWARD_ONLY


@pytest.mark.parametrize("name, options", WITH_EVERYTHING.values(), ids=WITH_EVERYTHING)
def test_values_gradients_and_tangents(attend, name, options):
    c = case(name)
    check(everything(**options), attend, c.arrays(), c.cotangents(), c.tangents())


@pytest.mark.parametrize("options", FORWARD_ONLY.values(), ids=FORWARD_ONLY)
def test_values(attend, options):
    check(forward(**options), attend, *case(FEWER_QUERIES).arrays())


@pytest.mark.parametrize("options", [{"causal": True, "chunk_size": 9}], ids=str)
def test_shuffled_tokens_with_their_positions(attend, options):
    """Queries and keys in any order, each with its position, give what they give in order."""
    c = case("B2-T35-H4-K2-D8-f32")
    rng = np.random.default_rng(3)
    rows, keys = rng.permutation(35), rng.permutation(35)
    (q, k, v), (dout, dlse) = c.arrays(), c.cotangents()
    shuffled = (q[:, rows], k[:, keys], v[:, keys]), (dout[:, rows], dlse[:, :, rows])
    program = values_and_gradients(q_positions=rows, kv_positions=keys, **options)
    (out, lse), (dq, dk, dv) = jax.jit(lambda *x: program(attend, *x))(*shuffled)
    back, keys_back = np.argsort(rows), np.argsort(keys)
    found = (out[:, back], lse[:, :, back]), (dq[:, back], dk[:, keys_back], dv[:, keys_back])
    assert_agrees(found, values_and_gradients(**options), (q, k, v), (dout, dlse))


def test_slots_out_of_everyones_sight_may_hold_nan(attend):
    """Keys that stand after every query, queries that stand before every key."""
    c = case("B2-T19-S35-H2-D8-f32")
    q_at, kv_at = drawn((2, 19), 3, 20), drawn((2, 35), 2, 25)
    q_at[:, 4:7] = -2
    rows, keys = q_at < kv_at.min(axis=1, keepdims=True), kv_at > q_at.max(axis=1, keepdims=True)
    assert rows.sum() >= 6 and keys.any(axis=1).all()
    (q, k, v), (dout, dlse) = c.arrays(), c.cotangents()
    given = (
        (poisoned(q, rows), poisoned(k, keys), poisoned(v, keys)),
        (poisoned(dout, rows), poisoned(dlse, np.broadcast_to(rows[:, None], dlse.shape))),
    )
    program = values_and_gradients(causal=True, q_positions=q_at, kv_positions=kv_at)
    check(program, attend, (q, k, v), (dout, dlse), given=given)


@pytest.mark.parametrize("options", [{"chunk_size": 8}, {"prefix_lengths": 10, "causal": True}], ids=str)
def test_nothing_leaks(attend, options):
    """Bit for bit: what a chunk or a prefix hides does not matter."""
    q, k, v = case("T40-H2-D8-f32").arrays()
    hidden, rows = (np.s_[16:], np.s_[:16]) if "chunk_size" in options else (np.s_[30:], np.s_[:30])
    changed = k.copy()
    changed[hidden] *= -3
    before, after = attend(q, k, v, **options), attend(q, changed, v, **options)
    np.testing.assert_array_equal(before[rows], after[rows])
    assert np.any(before[hidden] != after[hidden])


def test_a_prefix_is_attended_by_all(attend):
    """Rows before the end of the prefix see all of it, and no more."""
    q, k, v = case("T40-H2-D8-f32").arrays()
    out = attend(q, k, v, causal=True, prefix_lengths=10)
    np.testing.assert_allclose(out[:10], attend(q[:10], k[:10], v[:10]), rtol=1e-5, atol=1e-6)


def test_vmap_over_positions_and_prefixes(attend):
    c = case("B3-T19-S23-H2-D8-f32")

    def mapped(attend, inputs, cotangents, prefix, q_at, kv_at):
        def one(x, ct, prefix, q_at):
            return gradients(prefix_lengths=prefix, q_positions=q_at, kv_positions=kv_at)(attend, x, ct)

        return jax.vmap(one)(inputs, cotangents, prefix, q_at)

    program = Program(mapped, {"causal": True}, derivative=True)
    given = np.array([0, 5, 30], np.int32), drawn((3, 19), 0, 23), drawn((23,), 0, 23, 1)
    check(program, attend, c.arrays(), c.cotangents(), *given)


@pytest.mark.parametrize("at", [2**31 - 1, -(2**31)])
def test_the_farthest_positions_do_not_overflow(attend, at):
    """A query there sees every key or none, and no key within any window."""
    q, k, v = case("B2-T5-S19-H2-f32").arrays()
    far = np.full(5, at, np.int32)
    out, lse = attend(q, k, v, causal=True, q_positions=far, return_lse=True)
    if at > 0:
        assert_agrees((out, lse), forward(), q, k, v)
    else:
        assert not np.any(out) and (np.asarray(lse) == -np.inf).all()
    out = attend(q, k, v, window=(3, 4), q_positions=far)
    assert not np.any(out)


def test_a_chunk_as_large_as_an_integer_is_everything(attend):
    arrays = case("B2-T5-S19-H2-f32").arrays()
    np.testing.assert_array_equal(attend(*arrays, chunk_size=2**40), attend(*arrays, chunk_size=100))


def test_positions_that_mask_nothing(attend):
    """They are those of alibi alone, and under vmap belong to all examples."""
    c = case("B3-T17-S35-H2-K1-D8-f32")
    r = np.random.default_rng(0)
    places, slopes = {"q_positions": r.integers(0, 40, 17)}, {"alibi_slopes": np.float32([0.5, 0.25])}

    def each(attend, query, key, value, **riding):
        return jax.vmap(lambda q, k, v: attend(q, k, v, return_lse=True, **places, **riding))(query, key, value)

    def derivatives(attend, inputs, cotangents):
        values, pull = jax.vjp(lambda q, k, v, slopes: each(attend, q, k, v, alibi_slopes=slopes), *inputs)
        return values, pull(cotangents)

    check(Program(derivatives, derivative=(False, True)), attend, (*c.arrays(), *slopes.values()), c.cotangents())
