"""The reference is the definition that judges the rest; here it is itself held against loops over plain numbers.

Everything is float64, so that a difference is a fault and not a rounding.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support.accuracy import assert_same_in_float64, assert_slope
from tests.support.by_hand import attention_by_hand, kept_by_hand
from tests.support.cases import case, poisoned
from tests.support.oracle import reference_attention


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


def reference(*arrays, **options):
    """Output and log-sum-exp of the reference, compiled as one program."""
    return jax.jit(functools.partial(reference_attention, return_lse=True, **options))(*arrays)


def weights(T, S, **options):
    """The attention weights `[T, S]` of a query that likes every key alike: the mask, each row divided by its sum."""
    query, key, value = np.zeros((T, 1, 4)), np.zeros((S, 1, 4)), np.eye(S)[:, None, :]
    return np.asarray(reference(query, key, value, **options)[0])[:, 0, :]


def drawn(*rows):
    """The weights that a drawing stands for: `x` is attended, `.` is not."""
    mask = np.array([[float(c == "x") for c in row] for row in rows])
    return mask / np.maximum(mask.sum(axis=-1, keepdims=True), 1)


def test_one_query_two_keys():
    query, key = np.array([[[1.0, 0.0]]]), np.array([[[2.0, 5.0]], [[-1.0, 5.0]]])
    value = np.array([[[10.0]], [[20.0]]])
    out, lse = reference(query, key, value, scale=0.5)
    first, second = np.exp(0.5 * 2.0), np.exp(0.5 * -1.0)
    assert_same_in_float64(out[0, 0, 0], (10 * first + 20 * second) / (first + second))
    assert_same_in_float64(lse[0, 0], np.log(first + second))


def test_default_scale_is_one_over_the_root_of_the_head_dim():
    q, k, v = case("T3-S4-H3-D4-f64").arrays()
    np.testing.assert_array_equal(reference(q, k, v)[0], reference(q, k, v, scale=0.5)[0])


def test_causal_square():
    assert_same_in_float64(weights(3, 3, causal=True), drawn("x..", "xx.", "xxx"))


def test_causal_fewer_queries_than_keys_is_bottom_right():
    assert_same_in_float64(weights(2, 5, causal=True), drawn("xxxx.", "xxxxx"))


def test_causal_more_queries_than_keys_leaves_the_first_rows_dead():
    assert_same_in_float64(weights(5, 2, causal=True), drawn("..", "..", "..", "x.", "xx"))


def test_causal_top_left_by_offset_zero():
    assert_same_in_float64(weights(2, 5, causal=True, q_offset=0), drawn("x....", "xx..."))
    assert_same_in_float64(weights(4, 2, causal=True, q_offset=0), drawn("x.", "xx", "xx", "xx"))


def test_negative_offset():
    assert_same_in_float64(weights(4, 3, causal=True, q_offset=-2), drawn("...", "...", "x..", "xx."))


def test_window_includes_both_ends():
    """Case B08: a window of two to the left is three keys with the query's own."""
    got = weights(8, 8, window=(2, 0))
    assert_same_in_float64(got[5], [0, 0, 0, 1 / 3, 1 / 3, 1 / 3, 0, 0])
    assert_same_in_float64(weights(4, 4, window=(1, 1)), drawn("xx..", "xxx.", ".xxx", "..xx"))


def test_window_open_sides():
    assert_same_in_float64(weights(3, 3, window=(None, 0)), weights(3, 3, causal=True))
    assert_same_in_float64(weights(3, 3, window=(0, None)), drawn("xxx", ".xx", "..x"))
    assert_same_in_float64(weights(3, 3, window=(None, None)), drawn("xxx", "xxx", "xxx"))


def test_window_does_not_imply_causal_nor_the_reverse():
    assert_same_in_float64(weights(4, 4, window=(1, 2)), drawn("xxx.", "xxxx", ".xxx", "..xx"))
    got = weights(4, 4, window=(1, 2), causal=True)
    assert_same_in_float64(got, drawn("x...", "xx..", ".xx.", "..xx"))


def test_window_beside_the_keys_is_dead():
    """Case B10: with T > S the window of the first rows lies before key 0."""
    assert_same_in_float64(weights(5, 2, window=(0, 1)), drawn("..", "..", "x.", "xx", ".x"))


def test_kv_lengths_move_the_diagonal():
    got = weights(2, 5, causal=True, kv_lengths=np.array(3))
    assert_same_in_float64(got, drawn("xx...", "xxx.."))


def test_q_lengths_move_the_diagonal_and_end_the_rows():
    got = weights(4, 3, causal=True, q_lengths=np.array(2))
    assert_same_in_float64(got, drawn("xx.", "xxx", "...", "..."))


@pytest.mark.parametrize("length", [-3, 0])
def test_length_zero_or_below_kills_every_row(length):
    assert not weights(2, 3, kv_lengths=np.array(length)).any()
    assert not weights(2, 3, q_lengths=np.array(length)).any()


def test_length_beyond_the_array_is_the_array():
    assert_same_in_float64(weights(2, 3, causal=True, kv_lengths=9), drawn("xx.", "xxx"))
    assert_same_in_float64(weights(2, 3, causal=True, q_lengths=9), drawn("xx.", "xxx"))


def test_dead_row_is_zero_with_lse_minus_infinity():
    q, k, v = case("T3-S1-f64").arrays()
    out, lse = reference(q, k, v, causal=True)
    assert not np.asarray(out)[:2].any() and (np.asarray(lse)[:, :2] == -np.inf).all()
    assert_same_in_float64(out[2], v[0])


def test_prefix_is_seen_by_all_and_the_rest_is_causal():
    assert_same_in_float64(weights(3, 4, causal=True, q_offset=0, prefix_lengths=2), drawn("xx..", "xx..", "xxx."))
    got = weights(3, 4, causal=True, window=(1, 2), q_offset=0, prefix_lengths=np.array(4))
    assert_same_in_float64(got, drawn("xxx.", "xxxx", ".xxx"))


def test_chunks_of_positions():
    assert_same_in_float64(weights(5, 5, chunk_size=2), drawn("xx...", "xx...", "..xx.", "..xx.", "....x"))
    assert_same_in_float64(weights(4, 4, chunk_size=3, causal=True), drawn("x...", "xx..", "xxx.", "...x"))
    assert_same_in_float64(weights(3, 4, chunk_size=2, q_offset=-1), drawn("....", "xx..", "xx.."))


def test_positions_take_the_place_of_indices():
    at_q, at_k = np.array([5, -1, 2]), np.array([3, 0, 9, 2])
    got = weights(3, 4, causal=True, q_positions=at_q, kv_positions=at_k)
    assert_same_in_float64(got, drawn("xx.x", "....", ".x.x"))
    assert_same_in_float64(weights(3, 4, window=(1, 1), q_positions=at_q), drawn("....", "x...", ".xxx"))
    got = weights(3, 4, causal=True, q_offset=0, kv_positions=at_k)
    assert_same_in_float64(got, drawn(".x..", ".x..", ".x.x"))


def test_segments_see_themselves_and_padding_sees_nothing():
    got = weights(5, 5, segment_ids=np.array([1, 1, 0, 0, -1]))
    assert_same_in_float64(got, drawn("xx...", "xx...", "..xx.", "..xx.", "....."))
    got = weights(2, 4, q_segment_ids=np.array([7, -2]), kv_segment_ids=np.array([7, -2, 3, 7]))
    assert_same_in_float64(got, drawn("x..x", "...."))


def test_mask_is_true_where_attended():
    mask = np.array([[True, False, True], [False, False, False]])
    assert_same_in_float64(weights(2, 3, mask=mask), drawn("x.x", "..."))
    assert_same_in_float64(weights(2, 3, mask=mask[:1], causal=True), drawn("x..", "x.x"))


def test_bias_is_added_after_the_scale_and_minus_infinity_hides():
    bias = np.log([[1.0, 2.0, 5.0], [1.0, 1.0, 1.0]])
    bias[1, 1] = -np.inf
    assert_same_in_float64(weights(2, 3, bias=bias, scale=7.0), np.array([[0.125, 0.25, 0.625], [0.5, 0.0, 0.5]]))
    assert not weights(2, 3, bias=np.full((1, 1), -np.inf)).any()


def test_softcap_bends_the_scaled_score_and_not_the_bias():
    query, key = np.array([[[3.0]]]), np.array([[[4.0]]])
    lse = reference(query, key, key, scale=0.5, softcap=2.0, bias=np.full((1, 1, 1), 10.0))[1]
    assert_same_in_float64(lse[0, 0], 2 * np.tanh(6.0 / 2) + 10)


def test_alibi_falls_with_the_distance_of_positions():
    query, key = np.ones((2, 2, 4)), np.zeros((1, 2, 4))
    lse = reference(query, key, key, alibi_slopes=np.array([0.5, 2.0]), q_offset=3)[1]
    assert_same_in_float64(lse, np.array([[-1.5, -2.0], [-6.0, -8.0]]))


def test_a_sink_takes_its_share_and_gives_nothing():
    query, key = np.zeros((2, 1, 4)), np.zeros((3, 1, 4))
    value, mask = np.ones((3, 1, 2)), np.array([[True] * 3, [False] * 3])
    out, lse = reference(query, key, value, mask=mask, sinks=np.log([5.0]))
    assert_same_in_float64(out[:, 0], np.array([[3 / 8, 3 / 8], [0, 0]]))
    assert_same_in_float64(lse[0], np.log([8.0, 5.0]))


def test_dropout_keeps_what_the_hash_says_and_sums_rows_before_it():
    key, rate = jax.random.key(3), 0.5
    got = weights(6, 4, dropout_rate=rate, dropout_key=key)
    kept = np.array([[kept_by_hand(key, rate, 0, i, j) for j in range(4)] for i in range(6)])
    assert_same_in_float64(got, kept / 4 / (1 - rate))
    assert 0 < kept.sum() < 24


@pytest.mark.parametrize("T, S", [(0, 3), (3, 0), (0, 0)])
def test_no_queries_or_no_keys(T, S):
    q, k, v = np.ones((2, T, 4, 8)), np.ones((2, S, 2, 8)), np.ones((2, S, 2, 5))
    out, lse = reference(q, k, v)
    assert out.shape == (2, T, 4, 5) and not np.asarray(out).any()
    assert lse.shape == (2, 4, T) and (np.asarray(lse) == -np.inf).all()
    gradient = jax.jit(jax.grad(lambda *x: reference_attention(*x).sum(), argnums=(0, 1, 2)))(q, k, v)
    for g, x in zip(gradient, (q, k, v), strict=True):
        assert g.shape == x.shape and not np.asarray(g).any()


OPTIONS = {
    "full": {},
    "scale": {"scale": 0.3},
    "causal": {"causal": True},
    "window": {"window": (3, 1)},
    "window left": {"window": (2, None)},
    "window right": {"window": (None, 1)},
    "causal window": {"causal": True, "window": (2, 3)},
    "offset": {"causal": True, "q_offset": 2},
    "offset by example": {"causal": True, "q_offset": np.array([-3, 4])},
    "kv lengths": {"causal": True, "kv_lengths": np.array([2, 5])},
    "q lengths": {"window": (1, 2), "q_lengths": np.array([0, 4])},
    "both lengths": {"causal": True, "q_lengths": np.array([3, 9]), "kv_lengths": np.array([0, 4])},
    "lengths and offset": {"causal": True, "q_offset": 1, "q_lengths": np.array([5, 2]), "kv_lengths": 4},
    "one length for all": {"causal": True, "kv_lengths": 3, "q_lengths": np.array([4])},
    "prefix": {"causal": True, "prefix_lengths": np.array([3, 0]), "window": (4, None)},
    "prefix int and chunk": {"causal": True, "prefix_lengths": 4, "chunk_size": 3},
    "chunk": {"chunk_size": 2, "q_offset": np.array([-3, 1])},
}
# Where a value is a tuple of letters (or 1), it is the shape of an array to draw.
WITH_ARRAYS = {
    "sinks": {"sinks": ("H",)},
    "sinks by example": {"causal": True, "sinks": ("B", "H"), "kv_lengths": np.array([0, 4])},
    "alibi": {"alibi_slopes": ("H",), "causal": True},
    "alibi by example": {"alibi_slopes": ("B", "H"), "q_offset": -2},
    "softcap": {"softcap": 0.8, "scale": 2.0, "alibi_slopes": ("H",)},
    "dropout": {"dropout_rate": 0.3, "dropout_key": 5, "sinks": ("H",)},
    "dropout causal": {"dropout_rate": 0.7, "dropout_key": 6, "causal": True},
    "bias": {"bias": ("B", "H", "T", "S")},
    "bias by head and key": {"bias": ("H", 1, "S"), "causal": True},
    "bias by row": {"bias": ("B", 1, "T", 1), "window": (2, 1)},
    "mask": {"mask": ("B", "H", "T", "S")},
    "mask by key, bias": {"mask": ("B", 1, 1, "S"), "bias": ("T", "S")},
    "positions": {"q_positions": ("B", "T"), "kv_positions": ("S",), "causal": True},
    "positions of keys": {"kv_positions": ("B", "S"), "window": (3, 1), "alibi_slopes": ("H",)},
    "segments": {"q_segment_ids": ("B", "T"), "kv_segment_ids": ("S",), "softcap": 1.5},
    "ids, positions": {"q_segment_ids": ("T",), "kv_segment_ids": ("B", "S"), "q_positions": ("T",), "causal": True},
    "all": {
        "bias": ("H", "T", "S"), "mask": ("T", "S"), "scale": 0.7, "softcap": 2.0, "alibi_slopes": ("H",),
        "sinks": ("H",), "causal": True, "prefix_lengths": 2, "window": (5, 3), "q_segment_ids": ("T",),
        "kv_segment_ids": ("S",), "kv_lengths": np.array([4, 3]), "dropout_rate": 0.4, "dropout_key": 7,
    },
}  # fmt: skip
SHAPES = ["B2-T5-S7-H4-K2-D3-Dv2-f64", "B2-T7-S4-H3-K1-D2-f64", "B2-T6-H2-D1-f64"]


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_against_loops(name, options):
    arrays = case(name).arrays()
    out, lse = reference(*arrays, **options)
    expected_out, expected_lse = attention_by_hand(*arrays, **options)
    assert_same_in_float64(out, expected_out)
    assert_same_in_float64(lse, expected_lse)


@pytest.mark.parametrize("name", WITH_ARRAYS)
def test_with_arrays_against_loops(name):
    """Each of the shapes serves every third of the options."""
    c = case(SHAPES[list(WITH_ARRAYS).index(name) % 3])
    options = {key: drawn_option(c, key, x) for key, x in WITH_ARRAYS[name].items()}
    out, lse = reference(*c.arrays(), **options)
    expected_out, expected_lse = attention_by_hand(*c.arrays(), **options)
    assert_same_in_float64(out, expected_out)
    assert_same_in_float64(lse, expected_lse)


def drawn_option(c, name, x):
    """The option `name` of a call: of numbers where `x` is a shape, some of them -inf in a bias; a mask; small ints."""
    if name == "dropout_key":
        return jax.random.key(x)
    if not isinstance(x, tuple) or not any(isinstance(dim, str) for dim in x):
        return x
    sizes = {"B": c.batch[0], "H": c.H, "T": c.T, "S": c.S}
    numbers = c.normal([sizes.get(dim, dim) for dim in x], 0, name)
    if name == "bias":
        return np.where(numbers > 1, -np.inf, numbers)
    if name in ("alibi_slopes", "sinks"):
        return numbers
    return numbers > -0.5 if name == "mask" else np.floor(2 * numbers + 1).astype(np.int32)


def bent(s, b, h, i, j, t, u):
    """Indices of all kinds, some outside on either side; a function of the score and of what is read."""
    return s * s * t[h, i - j + 1] + u[j - 1] - t[b, 0]


def thinned(b, h, i, j, t, u):
    return (t[b, j] < 0.8) & (u[i] < 1)


@pytest.mark.parametrize(
    "options",
    [
        {"score_mod": bent, "softcap": 2.0, "alibi_slopes": np.array([0.3, -0.2])},
        {"mask_mod": thinned, "causal": True},
        {"score_mod": bent, "mask_mod": thinned, "sinks": np.array([0.3, -0.2])},
    ],
    ids=["score-mod", "mask-mod", "both"],
)
@pytest.mark.parametrize("name", ["T4-S5-H2-D3-f64", "B2x3-T4-S5-H2-D3-f64"])
def test_mods_against_loops(name, options):
    c = case(name)
    tables = c.normal((4, 5), 0, "table"), c.normal((4,), 0, "numbers")
    out, lse = reference(*c.arrays(), mod_operands=tables, **options)
    expected_out, expected_lse = attention_by_hand(*c.arrays(), mod_operands=tables, **options)
    assert_same_in_float64(out, expected_out)
    assert_same_in_float64(lse, expected_lse)


@pytest.mark.parametrize("name", ["T4-S5-H2-D3-f64", "B2x3-T4-S5-H4-K2-D3-f64"])
def test_any_number_of_leading_dims(name):
    arrays = case(name).arrays()
    out, lse = reference(*arrays, causal=True)
    expected_out, expected_lse = attention_by_hand(*arrays, causal=True)
    assert_same_in_float64(out, expected_out)
    assert_same_in_float64(lse, expected_lse)


@pytest.mark.parametrize("argument", range(3), ids=["query", "key", "value"])
@pytest.mark.parametrize("result", ["out", "lse"])
def test_gradient_by_finite_differences(argument, result):
    c = case("B2-T5-S4-H4-K2-D3-f64")
    arrays, (dout, dlse) = c.arrays(), c.cotangents()
    options = {"causal": True, "kv_lengths": np.array([4, 2])}

    def by_hand(*x):
        out, lse = attention_by_hand(*x, **options)
        return (out * dout).sum() if result == "out" else (np.where(lse > -np.inf, lse, 0.0) * dlse).sum()

    def loss(*x):
        out, lse = reference_attention(*x, return_lse=True, **options)
        return (out * dout).sum() if result == "out" else (jnp.where(lse > -jnp.inf, lse, 0.0) * dlse).sum()

    gradient = jax.jit(jax.grad(loss, argnums=argument))(*arrays)
    for index in [(0, 3, 1, 2), (1, 1, 0, 0), (1, 0, 1, 1)]:
        assert_slope(gradient, by_hand, arrays, argument, index)


def test_scale_gradient_by_finite_differences():
    c = case("B2-T3-S4-H2-D3-f64")
    arrays, (dout, _) = c.arrays(), c.cotangents()
    gradient = jax.jit(jax.grad(lambda s: (reference_attention(*arrays, scale=s) * dout).sum()))(np.float64(0.4))
    by_hand = lambda s: (attention_by_hand(*arrays, scale=s[0], return_lse=False) * dout).sum()  # noqa: E731
    assert_slope(gradient[None], by_hand, [np.array([0.4])], 0, (0,))


@pytest.mark.parametrize("name", ["bias", "alibi_slopes", "sinks"])
def test_gradient_of_what_rides_along_by_finite_differences(name):
    """Through both results, with softcap, causal and dropout in the way; one row is dead."""
    c = case("B2-T3-S4-H2-D3-f64")
    (q, k, v), (dout, dlse) = c.arrays(), c.cotangents()
    shape, index = {"bias": ((2, 3, 1), (1, 2, 0)), "alibi_slopes": ((2,), (1,)), "sinks": ((2, 2), (1, 0))}[name]
    options = {"softcap": 1.5, "causal": True, "q_offset": -1, "dropout_rate": 0.4, "dropout_key": jax.random.key(1)}

    def loss(attend, x, where):
        out, lse = attend(q, k, v, **{name: x}, **options)
        return (out * dout).sum() + (where(lse > -np.inf, lse, 0.0) * dlse).sum()

    x = c.normal(shape, 0, name)
    gradient = jax.jit(jax.grad(lambda x: loss(reference, x, jnp.where)))(x)
    assert_slope(gradient, lambda x: loss(attention_by_hand, x, np.where), [x], 0, index)


def test_nobody_reads_poisoned_padding():
    """NaN in keys past the length, in dead queries and in their cotangents reaches neither results nor gradients."""
    c = case("B2-T4-S5-H2-D3-f64")
    (q, k, v), (dout, dlse) = c.arrays(), c.cotangents()
    options = {"q_lengths": np.array([4, 2]), "kv_lengths": np.array([3, 5])}
    dirty = (poisoned(q, np.s_[1, 2:]), poisoned(k, np.s_[0, 3:]), poisoned(v, np.s_[0, 3:]))
    dirty_cotangents = (poisoned(dout, np.s_[1, 2:]), poisoned(dlse, np.s_[1, :, 2:]))

    @jax.jit
    def both(arrays, cotangents):
        results, pull = jax.vjp(lambda *x: reference_attention(*x, return_lse=True, **options), *arrays)
        return results, pull(cotangents)

    clean = both((q, k, v), (dout, dlse))
    jax.tree.map(np.testing.assert_array_equal, both(dirty, dirty_cotangents), clean)


def test_nobody_reads_what_a_mask_or_a_negative_id_hides():
    """NaN in a masked key, in a padding query and its cotangents, in a key of no segment."""
    c = case("T4-S5-H2-D3-f64")
    (q, k, v), (dout, dlse) = c.arrays(), c.cotangents()
    options = {
        "mask": np.array([True, False, True, True, True]),
        "q_segment_ids": np.array([0, 0, -1, 1]),
        "kv_segment_ids": np.array([0, 0, 1, 7, -1]),
        "bias": c.normal((4, 5), 0, "bias"),
    }
    keys = np.s_[[1, 3, 4]]
    dirty = poisoned(q, 2), poisoned(k, keys), poisoned(v, keys)

    @jax.jit
    def both(arrays, cotangents):
        results, pull = jax.vjp(lambda *x: reference_attention(*x, return_lse=True, **options), *arrays)
        return results, pull(cotangents)

    clean = both((q, k, v), (dout, dlse))
    jax.tree.map(np.testing.assert_array_equal, both(dirty, (poisoned(dout, 2), poisoned(dlse, np.s_[:, 2]))), clean)
