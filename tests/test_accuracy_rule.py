"""The helper that judges every other test must itself refuse what is wrong (R20)."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support import accuracy
from tests.support.accuracy import assert_accurate, assert_agrees, assert_same_in_float64, check, error_bound
from tests.support.cases import case, poisoned
from tests.support.oracle import reference_attention
from tests.support.plain import plain_attention
from tests.support.programs import everything, forward, values_and_gradients
from tests.test_causal_window import OPTIONS
from tests.test_lengths import OPTIONS as LENGTHS
from tests.test_positions import OPTIONS as POSITIONS


def triple(seed=0):
    """An accurate result, the oracle and the plain result, as float32 numbers of unit size."""
    rng = np.random.default_rng(seed)
    oracle = rng.standard_normal((2, 9, 3, 4))
    return oracle.astype(np.float32), oracle, (oracle * (1 + 1e-6)).astype(np.float32)


def test_accepts_the_oracle_rounded():
    assert_accurate(*triple())


def test_bound_is_the_rule_as_written():
    oracle, plain = np.array([1.0, -4.0]), np.array([1.5, -4.0])
    eps = float(jnp.finfo(jnp.bfloat16).eps)
    assert error_bound(oracle, plain, jnp.bfloat16, derivative=False) == 2 * 0.5 + eps * 4
    assert error_bound(oracle, plain, jnp.bfloat16, derivative=True) == 3 * 0.5 + eps * 4


def test_refuses_one_wrong_row():
    x, r, p = triple()
    x[1, 4, 2] *= 1.001
    with pytest.raises(AssertionError, match=r"error .* at \(1, 4, 2, \d\) exceeds"):
        assert_accurate(x, r, p)


def test_refuses_a_shifted_row():
    x, r, p = triple()
    with pytest.raises(AssertionError, match="exceeds"):
        assert_accurate(np.roll(x, 1, axis=1), r, p)


def test_refuses_swapped_heads():
    x, r, p = triple()
    with pytest.raises(AssertionError, match="exceeds"):
        assert_accurate(x[:, :, [1, 0, 2]], r, p)


@pytest.mark.parametrize("sides", ["result", "oracle", "both"])
def test_refuses_nan_on_any_side(sides):
    x, r, p = triple()
    if sides != "oracle":
        x[0, 0, 0, 0] = np.nan
    if sides != "result":
        r[0, 0, 0, 0] = np.nan
    with pytest.raises(AssertionError, match="NaN"):
        assert_accurate(x, r, p)


@pytest.mark.parametrize("value", [np.inf, -np.inf, 0.0])
def test_refuses_another_infinity(value):
    x, r, p = triple()
    r[0, 3, 1, 2] = p[0, 3, 1, 2] = -np.inf if value != -np.inf else np.inf
    x[0, 3, 1, 2] = value
    with pytest.raises(AssertionError, match=r"the result and the oracle differ in infinities at \(0, 3, 1, 2\)"):
        assert_accurate(x, r, p)


def test_accepts_equal_infinities():
    x, r, p = triple()
    for a in (x, r, p):
        a[0, 3] = -np.inf
    assert_accurate(x, r, p)


def test_a_broken_yardstick_does_not_widen_the_bound():
    x, r, p = triple()
    p[0, 0, 0, 0] = np.inf
    with pytest.raises(AssertionError, match="plain attention and the oracle differ in infinities"):
        assert_accurate(x, r, p)


def test_refuses_another_shape_or_dtype():
    x, r, p = triple()
    with pytest.raises(AssertionError, match="shape"):
        assert_accurate(x[..., :1], r, p)
    with pytest.raises(AssertionError, match="dtype"):
        assert_accurate(x.astype(jnp.bfloat16), r, p)


@pytest.mark.thorough
@pytest.mark.parametrize("options", (OPTIONS | LENGTHS).values(), ids=OPTIONS | LENGTHS)
def test_the_yardstick_is_the_function_that_it_measures(options):
    """Plain attention and the reference are one function in float64; were they not, the "error" of the one would widen
    the bound for all."""
    with jax.enable_x64(True):
        c = case("B2-T9-S14-H4-K2-D3-f64")
        options = options | {"scale": 0.7}
        program = values_and_gradients(**options)
        results = (
            jax.jit(functools.partial(program, attend))(c.arrays(), c.cotangents())
            for attend in (plain_attention, reference_attention)
        )
        jax.tree.map(assert_same_in_float64, *results)


@pytest.mark.parametrize("options", POSITIONS.values(), ids=POSITIONS)
def test_the_yardstick_knows_positions(options):
    with jax.enable_x64(True):
        arrays = case("B2-T19-S35-H2-K1-D3-f64").arrays()
        results = (attend(*arrays, return_lse=True, **options) for attend in (plain_attention, reference_attention))
        jax.tree.map(assert_same_in_float64, *results)


RIDING = {
    "bias": ({"bias": (2, 1, 9, 14)}, {"softcap": 1.5, "mask": np.arange(14) % 5 > 0}),
    "slopes": ({"alibi_slopes": (2, 4), "scale": ()}, {"q_segment_ids": np.arange(9) // 5 - 1, "causal": True}),
    "sinks": ({"sinks": (4,)}, {"dropout_rate": 0.4, "causal": True, "q_lengths": np.array([9, 4])}),
}


@pytest.mark.parametrize("shapes, options", RIDING.values(), ids=RIDING)
def test_the_yardstick_knows_what_rides_along(shapes, options):
    """Values, gradients and tangents; key -inf in the bias, a dead row, dropout."""
    with jax.enable_x64(True):
        c = case("B2-T9-S14-H4-K2-D3-f64")
        if "q_segment_ids" in options:
            options = options | {"kv_segment_ids": np.arange(14) // 8}
        if "dropout_rate" in options:
            options = options | {"dropout_key": jax.random.key(3)}
        inputs = c.inputs(**shapes)
        if "bias" in shapes:
            inputs[3]["bias"][0, 0, 2, :] = inputs[3]["bias"][1, 0, :, 3] = -np.inf
        given = inputs, c.cotangents(), c.inputs(1, **shapes)
        program = everything(**options)
        results = (jax.jit(functools.partial(program, f))(*given) for f in (plain_attention, reference_attention))
        jax.tree.map(assert_same_in_float64, *results)


@pytest.mark.parametrize("name", ["bias", "alibi_slopes", "sinks"])
def test_gradients_of_what_rides_along_are_judged_by_the_dtype_of_the_query(name):
    """A float32 bias, slopes or sinks beside bfloat16: the rule's dtype is the call's. No other bound moves."""
    c = case("B2-T9-S14-H4-K2-D8-bf16")
    riding = {name: np.ones({"bias": (4, 9, 14)}.get(name, (4,)), np.float32)}
    given = (*c.arrays(), riding), c.cotangents()
    program = values_and_gradients(causal=True)
    (out, lse), (dq, dk, dv, drest) = jax.tree.map(np.asarray, accuracy.judges(program, *given)[0])
    exact = (out.astype(c.dtype), lse.astype(np.float32)), tuple(g.astype(c.dtype) for g in (dq, dk, dv))
    off = lambda x: (x * (1 + 2**-8)).astype(np.float32)  # noqa: E731  (half an eps of bfloat16)
    assert_agrees((exact[0], (*exact[1], {name: off(drest[name])})), program, *given)
    with pytest.raises(AssertionError, match=r"\[0\]\[1\]: error"):
        lse = np.where(np.isfinite(lse), off(lse), lse).astype(np.float32)
        assert_agrees(((exact[0][0], lse), (*exact[1], {name: off(drest[name])})), program, *given)


def test_check_accepts_plain_attention_itself():
    check(forward(causal=True), plain_attention, *case("B2-T9-S14-H4-K2-D8-bf16").arrays())


@pytest.mark.parametrize(
    "wrong",
    [
        lambda q, k, v, **options: plain_attention(q, k, v, **(options | {"causal": False})),
        lambda q, k, v, **options: plain_attention(q, k, v, **(options | {"q_offset": 0})),
        lambda q, k, v, **options: plain_attention(q, k[..., ::-1, :], v, **options),
        lambda q, k, v, **options: plain_attention(q, k, v, **(options | {"scale": 0.3})),
    ],
    ids=["not causal", "top-left", "heads swapped", "scale"],
)
def test_check_refuses_another_function(wrong):
    with pytest.raises(AssertionError, match="exceeds"):
        check(forward(causal=True), wrong, *case("B2-T9-S14-H4-K2-D8-bf16").arrays())


def test_check_refuses_poison_that_is_read():
    q, k, v = case("B2-T9-S14-f32").arrays()
    given = (q, k, poisoned(v, np.s_[1, 13]))
    with pytest.raises(AssertionError, match="NaN"):
        check(forward(kv_lengths=np.array([14, 13])), plain_attention, q, k, v, given=given)


def test_case_reads_its_id():
    c = case("B2x3-T63-S100-H8-K2-D80-Dv40-bf16")
    q, k, v = c.arrays()
    assert (q.shape, k.shape, v.shape) == ((2, 3, 63, 8, 80), (2, 3, 100, 2, 80), (2, 3, 100, 2, 40))
    assert q.dtype == k.dtype == v.dtype == jnp.bfloat16
    assert case("T5").batch == () and case("T5").S == 5
    with pytest.raises(ValueError, match="`X3` is no part of a case"):
        case("B2-X3")
