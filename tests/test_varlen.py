"""Packed sequences: each gets what it would get alone, nothing else costs anything, and what is wrong is said."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import flash_jax
from flash_jax import flash_attention_varlen, segment_ids_from_lengths
from tests.support import programs
from tests.support.accuracy import assert_agrees
from tests.support.cases import case, poisoned
from tests.support.programs import Program
from tests.support.structure import lowered_sizes

pytestmark = pytest.mark.thorough

# Five sequences: ordinary, without queries, without keys, longer in queries, longer in keys; and slots in none.
OF_QUERIES = np.array([0, 7, 7, 10, 31, 35])
OF_KEYS = np.array([0, 7, 12, 12, 23, 43])
CASE = case("T38-S47-H4-K2-D8-Dv6-f32")
SINKS = np.array([0.5, -1, 0, 2], np.float32)
SLOPES = np.array([0.5, 0.25, 0.1, 0], np.float32)


def alone(attend, query, key, value, **options):
    """The same by one call a sequence: (out, lse) of the packed arrays."""
    options.pop("return_lse")
    T, H, _ = query.shape
    lse = jnp.full((H, T), -jnp.inf, np.promote_types(query.dtype, np.float32))
    if options.get("sinks") is not None:
        lse = jnp.broadcast_to(jnp.asarray(options["sinks"]).astype(lse.dtype)[:, None], (H, T))
    out = jnp.zeros((T, H, value.shape[-1]), query.dtype)
    bounds = zip(OF_QUERIES[:-1], OF_QUERIES[1:], OF_KEYS[:-1], OF_KEYS[1:], strict=True)
    for q, q_end, k, k_end in bounds:
        if q < q_end and k < k_end:  # without keys a row is dead, as the slots of no sequence are
            parts = query[q:q_end], key[k:k_end], value[k:k_end]
            part, part_lse = attend(*parts, **options, return_lse=True)
            out, lse = out.at[q:q_end].set(part), lse.at[:, q:q_end].set(part_lse)
    return out, lse


def values_and_gradients_alone(attend, inputs, cotangents):
    return programs.values_and_gradients()(functools.partial(alone, attend), inputs, cotangents)


@pytest.fixture
def varlen(implementation):
    """`flash_attention_varlen` with the bounds above, by each implementation, in small tiles."""
    tiles = flash_jax.BlockSizes(block_q=16, block_kv=16)

    def attend(query, key, value, **options):
        return flash_attention_varlen(
            query, key, value, OF_QUERIES, OF_KEYS, implementation=implementation, block_sizes=tiles, **options
        )

    return attend


@pytest.mark.parametrize(
    ("options", "operands"),
    [
        ({"causal": True, "chunk_size": 4, "softcap": 2.0}, {}),
        ({"window": (3, 2)}, {"sinks": SINKS, "alibi_slopes": SLOPES, "scale": np.float32(0.7)}),
    ],
    ids=["chunks-softcap", "window-sinks-alibi-scale"],
)
def test_each_sequence_gets_what_it_would_get_alone(varlen, options, operands):
    inputs = (*CASE.arrays(), {name: jnp.asarray(x) for name, x in operands.items()})
    given = [
        poisoned(x, slice(bounds[-1], None)) for x, bounds in zip(inputs, (OF_QUERIES, OF_KEYS, OF_KEYS), strict=False)
    ]
    dout, dlse = CASE.cotangents()
    dead = poisoned(dout, slice(OF_QUERIES[-1], None)), dlse
    actual = jax.jit(functools.partial(programs.values_and_gradients(**options), varlen))((*given, inputs[-1]), dead)
    expected = Program(values_and_gradients_alone, options, derivative=(False, True))
    assert_agrees(actual, expected, inputs, (dout, dlse))


def test_the_shapes_are_the_documented_ones():
    call = functools.partial(flash_attention_varlen, cu_seqlens_q=OF_QUERIES, cu_seqlens_kv=OF_KEYS)
    out, lse = call(*CASE.arrays(), return_lse=True)
    assert (out.shape, out.dtype, lse.shape, lse.dtype) == ((38, 4, 6), np.float32, (4, 38), np.float32)
    assert call(*CASE.arrays()).shape == (38, 4, 6)


def test_one_program_serves_all_lengths():
    q, k, v = CASE.arrays()
    traced = jax.jit(functools.partial(flash_attention_varlen, causal=True, implementation="xla"))
    for of_queries, of_keys in [(OF_QUERIES, OF_KEYS), (OF_QUERIES[::-1] * 0, OF_KEYS), (OF_KEYS // 2, OF_KEYS)]:
        of_queries, of_keys = of_queries.astype(np.int32), of_keys.astype(np.int32)
        known = flash_attention_varlen(q, k, v, of_queries, of_keys, causal=True, implementation="xla")
        np.testing.assert_allclose(traced(q, k, v, of_queries, of_keys), known, atol=1e-6)
    assert traced._cache_size() == 1


def test_vmap_serves_a_batch_of_packed_arrays():
    q, k, v = case("B2-T12-f32").arrays()
    bounds = np.array([[0, 5, 12], [0, 9, 10]], np.int32)
    call = functools.partial(flash_attention_varlen, causal=True, implementation="xla")
    batched = jax.jit(jax.vmap(lambda q, k, v, b: call(q, k, v, b, b)))(q, k, v, bounds)
    one_by_one = [call(*x, b, b) for *x, b in zip(q, k, v, bounds, strict=True)]
    np.testing.assert_allclose(batched, np.stack(one_by_one), atol=1e-6)


def test_no_sequence_at_all():
    out, lse = flash_attention_varlen(*CASE.arrays(), np.array([0]), np.array([0]), return_lse=True)
    assert not np.any(out)
    assert (np.asarray(lse) == -np.inf).all()


def test_dropout_goes_by_the_packed_slots():
    q, key = np.zeros((12, 2, 4), np.float32), jax.random.key(3)
    units = np.broadcast_to(np.eye(12, dtype=np.float32)[:, None], (12, 2, 12))
    bounds = np.array([0, 4, 12])
    out = flash_attention_varlen(q, q, units, bounds, bounds, dropout_rate=0.5, dropout_key=key)
    kept = flash_jax.dropout_mask(key, 0.5, (2, 12, 12))
    same = np.equal.outer(np.arange(12) < 4, np.arange(12) < 4)
    np.testing.assert_array_equal(np.moveaxis(out, 1, 0) > 0, kept & same)


def test_nothing_is_quadratic():
    q, k, v = case("T300-S290-H1-D4-f32").arrays()
    bounds = np.array([0, 100, 130, 290], np.int32)

    def both(q, k, v, bounds):
        def loss(*x):
            return flash_attention_varlen(*x, bounds, bounds, causal=True, implementation="xla").sum()

        return jax.value_and_grad(loss, argnums=(0, 1, 2))(q, k, v)

    assert max(lowered_sizes(both, q, k, v, bounds)) < 300 * 290


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"cu_seqlens_q": [0, 3]}, TypeError, "`cu_seqlens_q` must be an integer array; got list"),
        ({"cu_seqlens_kv": np.array([0.0, 3])}, TypeError, "`cu_seqlens_kv` must be an integer array; got float64"),
        ({"cu_seqlens_q": np.zeros((1, 2), int)}, ValueError, r"`cu_seqlens_q` must have shape \[n \+ 1\].*\(1, 2\)"),
        ({"cu_seqlens_q": np.zeros(0, int)}, ValueError, r"`cu_seqlens_q` must have shape \[n \+ 1\].*\(0,\)"),
        ({"cu_seqlens_q": np.array([0, 3, 8])}, ValueError, r"one entry more .* got shapes \(3,\) and \(2,\)"),
        ({"cu_seqlens_q": np.array([1, 3])}, ValueError, r"begin at 0, .* the 8 slots of `query`; got \[1 3\]"),
        ({"cu_seqlens_kv": jnp.array([0, 9])}, ValueError, r"at most at the 8 slots of `key`; got \[0 9\]"),
        ({"cu_seqlens_q": np.array([0, 5, 3])}, ValueError, "never decrease"),
        ({"query": np.zeros((1, 8, 2, 4), np.float32)}, ValueError, "must agree in batch dims"),
        ({"key": np.zeros((8, 2, 4), np.float16)}, TypeError, "must have the same dtype"),
        ({"window": (-1, 0)}, ValueError, "`window` must be a pair of non-negative ints"),
        ({"q_offset": 0}, TypeError, "q_offset"),
    ],
)
def test_what_is_wrong_is_said(changes, error, text):
    x = np.zeros((8, 2, 4), np.float32)
    bounds = np.array([0, 8])
    arguments = {"query": x, "key": x, "value": x, "cu_seqlens_q": bounds, "cu_seqlens_kv": bounds}
    with pytest.raises(error, match=text):
        jax.eval_shape(lambda: flash_attention_varlen(**arguments | changes))


def test_padded_batches_are_told_where_to_go():
    x, bounds = np.zeros((2, 8, 2, 4), np.float32), np.array([0, 8])
    with pytest.raises(ValueError, match=r"`query` must be packed .* got shape \(2, 8, 2, 4\).*`kv_lengths`.*jax.vmap"):
        flash_attention_varlen(x, x, x, bounds, bounds)


# segment_ids_from_lengths


@pytest.mark.parametrize(
    ("lengths", "total", "expected"),
    [
        (np.array([2, 0, 3]), 7, [0, 0, 2, 2, 2, -1, -1]),
        (np.array([], int), 2, [-1, -1]),
        (np.array([[1, 1], [0, 2]], np.uint8), 2, [[0, 1], [1, 1]]),
        (np.array([[[3]], [[0]]]), 3, [[[0, 0, 0]], [[-1, -1, -1]]]),
        (np.array([0]), 0, []),
    ],
)
def test_segment_ids_from_lengths(lengths, total, expected):
    for ids in (
        segment_ids_from_lengths(lengths, total),
        jax.jit(segment_ids_from_lengths, static_argnums=1)(lengths, total),
    ):
        assert ids.dtype == np.int32
        np.testing.assert_array_equal(ids, np.array(expected, np.int32).reshape(*lengths.shape[:-1], total))


def test_traced_lengths_are_cut_to_the_slots():
    ids = jax.jit(segment_ids_from_lengths, static_argnums=1)(np.array([2, -5, 2**30, 2**30, 1], np.int32), 5)
    np.testing.assert_array_equal(ids, [0, 0, 2, 2, 2])


def test_segment_ids_make_a_batch_of_packed_rows():
    q, k, v = case("B2-T9-f32").arrays()
    lengths = np.array([[4, 5], [2, 3]])
    ids = segment_ids_from_lengths(lengths, 9)
    by_ids = flash_jax.flash_attention(q, k, v, causal=True, segment_ids=ids, implementation="xla")
    for row, (first, second) in enumerate(lengths):
        bounds = np.array([0, first, first + second])
        by_bounds = flash_attention_varlen(q[row], k[row], v[row], bounds, bounds, causal=True, implementation="xla")
        np.testing.assert_allclose(by_ids[row], by_bounds, atol=1e-6)


@pytest.mark.parametrize(
    ("lengths", "total", "error", "text"),
    [
        ([2, 3], 5, TypeError, "`lengths` must be an integer array; got list"),
        (np.array([2.0]), 5, TypeError, "`lengths` must be an integer array; got float64"),
        (np.array(2), 5, ValueError, r"`lengths` must have shape \[..., n\]"),
        (np.array([2, -1]), 5, ValueError, "`lengths` must not be negative; got -1"),
        (np.array([[2, 3], [4, 2]]), 5, ValueError, "`lengths` must fit into the 5 slots; their sum is 6"),
        (np.array([2]), 5.0, TypeError, "`total` must be an int; got float"),
        (np.array([0]), -1, ValueError, "`total` must not be negative; got -1"),
    ],
)
def test_wrong_lengths_are_said(lengths, total, error, text):
    with pytest.raises(error, match=text):
        segment_ids_from_lengths(lengths, total)
