"""Segments: a query attends the keys of its own id; a negative id is padding that attends nothing (R5)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flash_jax.spec import AttentionSpec, Operands
from flash_jax.tiles import masks, ranges
from tests.support.accuracy import assert_agrees, check
from tests.support.cases import FEWER_QUERIES, MORE_QUERIES, case, poisoned
from tests.support.programs import Program, everything, gradients, values_and_gradients

pytestmark = pytest.mark.thorough

SQUARE = "B2-T40-H4-K2-D8-f32"
DOCUMENTS = np.repeat([[3, 0, 7, -1], [1, 2, 2, 5]], [17, 9, 11, 3], axis=1)  # ids need not grow


def drawn_ids(shape, low, high, seed=0):
    return np.random.default_rng(seed).integers(low, high, shape)


@pytest.mark.parametrize(
    "name, options",
    [
        (SQUARE, {"segment_ids": DOCUMENTS, "causal": True}),
        (
            FEWER_QUERIES,
            {"q_segment_ids": np.sort(drawn_ids((2, 19), 0, 4)), "kv_segment_ids": np.sort(drawn_ids((2, 35), 0, 5))},
        ),
        (
            MORE_QUERIES,
            {"q_segment_ids": drawn_ids((2, 35), -1, 3), "kv_segment_ids": drawn_ids((19,), -2, 3), "window": (25, 9)},
        ),
    ],
    ids=["packed-causal", "sorted", "unsorted-bf16"],
)
def test_values_gradients_and_tangents(attend, name, options):
    """Case D07 among them: ids of queries and of keys, of different lengths."""
    c = case(name)
    check(everything(**options), attend, c.arrays(), c.cotangents(), c.tangents())


@pytest.mark.parametrize("side", [0, 1], ids=["keys-of-queries", "queries-of-keys"])
@pytest.mark.parametrize("at_once", [1, 3 * 4 * 2, 7 * 6 * 3, 2**20])
def test_ranges_of_tiles_do_not_depend_on_how_many_are_judged_at_once(at_once, side, monkeypatch):
    """Against a loop over tiles, for ids and positions of which some belong to all examples."""
    T, S, blocks, step = 43, 71, (4, 8), (lambda n, block: -(-n // block))
    ids, places = (
        np.sort(drawn_ids((3, S), -1, 4)).astype(np.int32),
        np.sort(drawn_ids((1, T), 10, 2 * S, 1)).astype(np.int32),
    )
    operands = Operands(
        q_segment_ids=jnp.asarray(np.sort(drawn_ids((1, T), -1, 4, 2))), kv_segment_ids=jnp.asarray(ids),
        q_positions=jnp.asarray(places), kv_lengths=jnp.asarray([71, 40, 9]),
    )  # fmt: skip
    spec = AttentionSpec(causal=True)
    geometry = masks.Geometry.of(spec, operands, T, S).beside(2)
    visible, full = ranges.judge_all(operands, spec, geometry, (T, S), blocks)
    assert visible.shape == full.shape == (3, step(T, 4), step(S, 8))
    visible, full = (np.asarray(x) if side == 0 else np.asarray(x).swapaxes(1, 2) for x in (visible, full))
    monkeypatch.setattr(ranges, "_PAIRS_AT_ONCE", at_once)
    found = ranges.tile_ranges(operands, spec, geometry, (T, S), blocks, side)
    assert found.shape == (*visible.shape[:2], 4) and found.dtype == jnp.int32
    seen = set()
    for at in np.ndindex(visible.shape[:2]):
        start, full_start, full_stop, stop = np.asarray(found[at])
        tiles, whole = np.flatnonzero(visible[at]), np.flatnonzero(full[at])
        assert start <= full_start <= full_stop <= stop
        assert (start, stop) == ((tiles[0], tiles[-1] + 1) if tiles.size else (start, start))
        together = whole.size and whole[-1] - whole[0] + 1 == whole.size
        assert full_stop - full_start == (whole.size if together else 0)
        assert not together or full_start == whole[0]
        seen.add((bool(tiles.size), bool(whole.size)))
    assert seen >= {(True, True), (True, False), (False, False)}


def test_padding_attends_nothing_and_may_be_nan(attend):
    """Cases A16 and D08: padding is no segment, so its rows are dead and nobody attends it."""
    c = case(FEWER_QUERIES)
    q_ids, kv_ids = drawn_ids((2, 19), 0, 2), drawn_ids((2, 35), 0, 2)
    q_ids[0, 4:9] = q_ids[1, 16:] = kv_ids[0, 20:] = kv_ids[1, 3] = -1
    rows, keys = q_ids < 0, kv_ids < 0
    (q, k, v), (dout, dlse), (tq, tk, tv) = c.arrays(), c.cotangents(), c.tangents()
    by_head = np.broadcast_to(rows[:, None], dlse.shape)
    given = (
        (poisoned(q, rows), poisoned(k, keys), poisoned(v, keys)),
        (poisoned(dout, rows), poisoned(dlse, by_head)),
        (poisoned(tq, rows), poisoned(tk, keys), poisoned(tv, keys)),
    )
    program = everything(q_segment_ids=q_ids, kv_segment_ids=kv_ids)
    (out, lse), (dq, dk, _), _ = check(program, attend, (q, k, v), (dout, dlse), (tq, tk, tv), given=given)
    assert not np.any(np.asarray(out)[rows]) and not np.any(np.asarray(dq)[rows]) and not np.any(np.asarray(dk)[keys])
    assert (np.asarray(lse)[by_head] == -np.inf).all()


def test_nothing_leaks_from_one_document_to_another(attend):
    """Case D06, 2 x 128 tokens scaled to 2 x 21: bit for bit, the second document's outputs and gradients."""
    c = case("T42-H4-K2-D8-bf16")
    ids = np.repeat([0, 1], 21)
    run = jax.jit(lambda *x: values_and_gradients(causal=True, segment_ids=ids)(attend, *x))
    changed = tuple(np.concatenate([-3 * x[:21], x[21:]]) for x in c.arrays())
    dout, dlse = c.cotangents()
    (out, lse), found = run(c.arrays(), (dout, dlse))
    cotangents = np.concatenate([2 * dout[:21], dout[21:]]), dlse
    (out2, lse2), found2 = run(changed, cotangents)
    np.testing.assert_array_equal(lse[:, 21:], lse2[:, 21:])
    for x, y in zip((out, *found), (out2, *found2), strict=True):
        np.testing.assert_array_equal(x[21:], y[21:])
        assert np.any(x[:21] != y[:21])


def test_each_document_equals_its_own_call(attend):
    """Packed or alone, values and gradients are the same, lengths that are no multiple of a tile included."""
    c = case("T40-H4-K2-D8-f32")
    ids = DOCUMENTS[0]
    program = values_and_gradients(causal=True, segment_ids=ids)
    (out, lse), found = jax.jit(lambda *x: program(attend, *x))(c.arrays(), c.cotangents())
    dout, dlse = c.cotangents()
    for document in (3, 7):
        at = np.flatnonzero(ids == document)
        alone = tuple(x[at] for x in c.arrays())
        results = (out[at], lse[:, at]), tuple(g[at] for g in found)
        assert_agrees(results, values_and_gradients(causal=True), alone, (dout[at], dlse[:, at]))


def test_vmap(attend):
    """Ids of the queries by example, ids of the keys for all."""
    c = case("B3-T19-S23-H2-D8-f32")
    ids = drawn_ids((3, 19), -1, 3), drawn_ids((23,), -1, 3, 1)

    def mapped(attend, inputs, cotangents, *ids):
        def one(x, ct, q_ids, kv_ids):
            return gradients(q_segment_ids=q_ids, kv_segment_ids=kv_ids)(attend, x, ct)

        return jax.vmap(one, in_axes=(0, 0, 0, None))(inputs, cotangents, *ids)

    check(Program(mapped, derivative=True), attend, c.arrays(), c.cotangents(), *ids)


@pytest.mark.parametrize("dtype", [np.int8, np.uint32, np.int64], ids=lambda d: d.__name__)
def test_ids_of_any_integer_dtype(attend, dtype):
    q, k, v = case("B2-T19-H2-D8-f32").arrays()
    ids = drawn_ids((19,), 0, 3)
    expected = attend(q, k, v, segment_ids=ids.astype(np.int32))
    np.testing.assert_array_equal(attend(q, k, v, segment_ids=ids.astype(dtype)), expected)


def test_integers_ride_through_a_gradient(attend):
    """Case D09: positions and ids as traced integers under jit and grad; their own cotangents are JAX's float0."""
    c = case("B2-T19-H2-D8-f32")
    ids, at = drawn_ids((2, 19), -1, 2), np.arange(19)[::-1].copy()

    @jax.jit
    def pulled(q, k, v, ids, at):
        call = lambda *x: attend(*x[:3], segment_ids=x[3], q_positions=x[4], causal=True)  # noqa: E731
        return jax.vjp(call, q, k, v, ids, at)[1](jnp.ones_like(q))

    *found, of_ids, of_positions = pulled(*c.arrays(), ids, at)
    assert all(np.any(g) and np.isfinite(g).all() for g in found)
    assert of_ids.dtype == of_positions.dtype == jax.dtypes.float0
