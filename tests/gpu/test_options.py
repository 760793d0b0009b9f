"""Every option with values and gradients, poisoned padding, the scale, other derivatives (R1-R4, R6, R11, R12)."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from tests.support.accuracy import assert_accurate, check, judges
from tests.support.cases import case, poisoned
from tests.support.plain import plain_attention
from tests.support.programs import Program, forward, second_order, tangents, values_and_gradients

pytestmark = pytest.mark.gpu

SHAPES = ["B3-T300-S333-H4-K2-D64-bf16", "B3-T333-S300-H3-K1-D80-f32"]
OPTIONS = {
    "window-pair": {"window": (1, 0)},
    "window-left": {"window": (37, 0)},
    "window-no-causal": {"window": (37, None)},
    "window-right": {"window": (None, 5)},
    "window-both": {"window": (64, 64)},
    "window-causal": {"causal": True, "window": (100, 20)},
    "window-wide": {"causal": True, "window": (5000, None)},
    "offset-0": {"causal": True, "q_offset": 0},
    "offset-negative": {"causal": True, "q_offset": -50},
    "offset-33": {"causal": True, "q_offset": 33},
    "offset-beyond": {"causal": True, "q_offset": 1000},
    "offset-dead": {"causal": True, "q_offset": -1000},
    "offset-array": {"causal": True, "q_offset": np.array([0, -70, 41])},
    "offset-array-window": {"window": (30, 10), "q_offset": np.array([-290, 0, 150])},
    "offset-0d": {"causal": True, "q_offset": np.array(7)},
    "keys": {"kv_lengths": np.array([33, 250, 9])},
    "queries": {"q_lengths": np.array([290, 64, 1])},
    "both-causal": {"causal": True, "q_lengths": np.array([17, 300, 130]), "kv_lengths": np.array([300, 5, 129])},
    "both-window": {"window": (40, 3), "q_lengths": np.array([300, 9, 128]), "kv_lengths": np.array([12, 300, 128])},
    "lengths-zero": {"causal": True, "q_lengths": np.array([0, 300, 5]), "kv_lengths": np.array([10, 0, 200])},
    "lengths-clamped": {"causal": True, "q_lengths": np.array([-3, 999, 7]), "kv_lengths": np.array([999, 41, -1])},
    "lengths-int": {"causal": True, "q_lengths": 270, "kv_lengths": 117},
    "lengths-offset": {"causal": True, "q_offset": 3, "kv_lengths": np.array([9, 200, 300])},
    "scale": {"causal": True, "scale": 0.3},
    "scale-negative": {"scale": -0.2},
    "scale-zero": {"causal": True, "scale": 0.0},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("name", SHAPES)
def test_values_and_gradients(attend, name, options):
    c = case(name)
    check(values_and_gradients(**options), attend, c.arrays(), c.cotangents())


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("name", ["B2-T190-S210-H4-K2-D72-bf16", "B2-T190-S210-H2-D64-f32", "B2-T128-S256-H2-D128-f16"])
def test_poisoned_padding_reaches_nothing(attend, name, causal):
    c = case(name)
    q_lengths, kv_lengths = np.array([c.T, 101]), np.array([77, c.S])
    q, k, v = c.arrays()
    dout, dlse = c.cotangents()
    inputs = poisoned(q, np.s_[1, 101:]), poisoned(k, np.s_[0, 77:]), poisoned(v, np.s_[0, 77:])
    cotangents = poisoned(dout, np.s_[1, 101:]), poisoned(dlse, np.s_[1, :, 101:])
    program = values_and_gradients(causal=causal, q_lengths=q_lengths, kv_lengths=kv_lengths)
    check(program, attend, c.arrays(), c.cotangents(), given=(inputs, cotangents))
    dq, dk, dv = c.tangents()
    directions = poisoned(dq, np.s_[1, 101:]), poisoned(dk, np.s_[0, 77:]), poisoned(dv, np.s_[0, 77:])
    program = tangents(causal=causal, q_lengths=q_lengths, kv_lengths=kv_lengths)
    check(program, attend, c.arrays(), c.tangents(), given=(inputs, directions))


@pytest.mark.parametrize("dtype", ["bf16", "f32"])
def test_traced_offset_lengths_and_scale(attend, dtype):
    c = case(f"B3-T150-S130-H4-K2-D40-{dtype}")

    def traced(attend, inputs, cotangents, q_offset, q_lengths, kv_lengths, scale):
        program = values_and_gradients(q_offset=q_offset, q_lengths=q_lengths, kv_lengths=kv_lengths, scale=scale)
        return program(attend, inputs, cotangents)

    program = Program(traced, {"causal": True}, derivative=(False, True))
    numbers = np.array(-11), np.array([150, 33, 200]), np.array([0, 130, 65]), np.float32(0.2)
    check(program, attend, c.arrays(), c.cotangents(), *numbers)


@pytest.mark.parametrize("dtype", ["bf16", "f16", "f32"])
def test_gradient_of_the_scale(attend, dtype):
    """Sixteen examples with a scale each."""
    c = case(f"B16-T130-S150-H4-K2-D32-{dtype}")
    scales = np.linspace(-0.3, 0.5, 16, dtype=np.float32)

    def of_scale(attend, inputs, cotangents, scales):
        one = jax.vmap(lambda q, k, v, s: attend(q, k, v, scale=s, return_lse=True))
        return jax.vjp(lambda s: one(*inputs, s), scales)[1](cotangents)[0]

    check(Program(of_scale, {"causal": True}, derivative=True), attend, c.arrays(), c.cotangents(), scales)


@pytest.mark.parametrize("which", ["out", "lse"])
def test_gradients_through_one_result(attend, which):
    """Through the output alone, and through the log-sum-exp alone (z-loss, case E03)."""
    c = case("B2-T129-S150-H4-K2-D64-bf16")

    def one(attend, inputs, cotangents):
        if which == "out":
            return jax.vjp(attend, *inputs)[1](cotangents[0])
        return jax.vjp(lambda *x: attend(*x, return_lse=True)[1], *inputs)[1](cotangents[1])

    check(Program(one, {"causal": True}, derivative=True), attend, c.arrays(), c.cotangents())


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("name", SHAPES)
def test_tangents(attend, name, options):
    c = case(name)
    check(tangents(**options), attend, c.arrays(), c.tangents())


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("dtype", ["bf16", "f16", "f32"])
@pytest.mark.parametrize("dims", ["D1", "D40", "D64", "D80-Dv96", "D128", "D192-Dv128", "D256"])
def test_tangents_at_every_row_of_the_table(attend, dims, dtype, causal):
    c = case(f"B2-T129-S257-H4-K2-{dims}-{dtype}")
    check(tangents(causal=causal), attend, c.arrays(), c.tangents())


@pytest.mark.parametrize("moving", range(3), ids=["query", "key", "value"])
def test_tangent_of_one_input(attend, moving):
    c = case("B2-T129-S150-H4-K2-D64-bf16")

    def along(attend, inputs, direction):
        f = lambda x: attend(*inputs[:moving], x, *inputs[moving + 1 :], return_lse=True)  # noqa: E731
        return jax.jvp(f, (inputs[moving],), (direction,))[1]

    check(Program(along, {"causal": True}, derivative=True), attend, c.arrays(), c.tangents()[moving])


def test_tangents_under_vmap(attend):
    """Of examples that share keys and values, along directions of which some are shared, too."""
    c = case("B3x2-T129-S150-H4-K2-D64-bf16")
    (q, k, v), (dq, dk, dv) = c.arrays(), c.tangents()

    def mapped(attend, *arrays):
        def one(*x):
            return jax.jvp(lambda *y: attend(*y, return_lse=True), x[:3], x[3:])[1]

        return jax.vmap(one, in_axes=(0, None, None, None, 0, None))(*arrays)

    check(Program(mapped, {"causal": True}, derivative=True), attend, q, k[0], v[0], dq[0], dk, dv[0])


def test_gradient_of_a_tangent(attend):
    """A loss of a tangent, as in MeanFlow: its gradient runs the code of xla/."""
    c = case("B2-T100-S70-H4-K2-D32-f32")

    def pulled(attend, inputs, directions, cotangents):
        pushed = lambda *x: jax.jvp(lambda *y: attend(*y, return_lse=True), x, directions)[1]  # noqa: E731
        return jax.vjp(pushed, *inputs)[1](cotangents)

    program = Program(pulled, {"causal": True}, derivative=True)
    check(program, attend, c.arrays(), c.tangents(), c.cotangents())


def test_second_order(attend):
    c = case("B1-T100-S70-H2-K1-D32-f32")
    check(second_order(causal=True), attend, c.arrays(), c.cotangents(), c.tangents())


@pytest.mark.parametrize("precision", [None, "highest", "high", "float32", "TF32_TF32_F32_X3"], ids=str)
def test_float32_accuracy(attend, precision):
    c = case("B2-T100-S130-H2-D32-f32")
    asked = functools.partial(attend, precision=precision)
    check(values_and_gradients(causal=True), asked, c.arrays(), c.cotangents())


@pytest.mark.parametrize("precision", ["default", "tensorfloat32"])
def test_one_tf32_product_where_asked_for(attend, precision):
    """Judged by plain attention of inputs rounded to TF32's ten bits; and it is not the default's float32 accuracy."""
    c = case("B2-T100-S130-H2-D64-f32")
    arrays, program = c.arrays(), forward(causal=True)
    rounded = [lax.reduce_precision(x, exponent_bits=8, mantissa_bits=10) for x in arrays]
    yardstick = plain_attention(*rounded, causal=True, return_lse=True)
    oracle, _ = judges(program, *arrays)
    asked = jax.jit(functools.partial(program, functools.partial(attend, precision=precision)))(*arrays)
    exact = jax.jit(functools.partial(program, attend))(*arrays)
    for x, best, r, p in zip(asked, exact, oracle, yardstick, strict=True):
        assert_accurate(x, r, np.asarray(p))
        assert np.abs(np.asarray(x) - r).max() > 10 * np.abs(np.asarray(best) - r).max()


@pytest.mark.parametrize("options", [{"window": (0, 0)}, {"kv_lengths": np.array([1, 1, 1])}], ids=["window", "length"])
@pytest.mark.parametrize("dtype", ["bf16", "f32"])
def test_one_key(attend, dtype, options):
    """Rows that attend one key, whose weight cannot change: out and dv by the rule, dq and dk without lse are 0.

    Plain attention, differentiated by JAX, gives an exact 0 there, so the rule would ask for 0. A kernel takes delta
    from the output, and what is left is a difference of two sums of D products: rounding, held to case A13's 1e-3.
    """
    c = case(f"B3-T63-S63-H4-K2-D64-{dtype}")
    check(forward(**options), attend, *c.arrays())
    dout = c.cotangents()[0]

    def value_gradient(attend, inputs, dout):
        q, k, v = inputs
        return jax.vjp(lambda v: attend(q, k, v), v)[1](dout)[0]

    check(Program(value_gradient, options, derivative=True), attend, c.arrays(), dout)
    _, pull = jax.vjp(functools.partial(attend, **options), *c.arrays())
    for gradient in pull(jnp.asarray(dout))[:2]:
        assert np.abs(np.asarray(gradient, np.float32)).max() <= 1e-3


@pytest.mark.parametrize("dtype", ["bf16", "f16", "f32"])
def test_large_and_equal_scores(attend, dtype):
    """Scores beyond float16's range (cases A09, A10), and one key for one query (case A13)."""
    c = case(f"B2-T70-S70-H2-D64-{dtype}")
    x = np.full_like(c.arrays()[0], 300)
    out = jax.jit(functools.partial(attend, causal=True))(x, x, x)
    np.testing.assert_allclose(np.asarray(out, np.float64), 300.0, rtol=float(jnp.finfo(out.dtype).eps))
    one = [3 * y[:, :1] for y in c.arrays()]
    out, pull = jax.vjp(functools.partial(attend, causal=True), *one)
    dq, dk, dv = pull(jnp.ones_like(out))
    np.testing.assert_allclose(out, one[2], rtol=float(jnp.finfo(out.dtype).eps))
    np.testing.assert_array_equal(np.asarray(dv, np.float32), 1.0)
    for g in (dq, dk):
        assert np.abs(np.asarray(g, np.float32)).max() <= 1e-3


@pytest.mark.parametrize("dtype", ["bf16", "f16"])
@pytest.mark.parametrize("times", [0.3, 8, 1e3], ids=["a-little", "much", "into-the-millions"])
def test_maxima_that_grow(attend, dtype, times):
    """Later keys have larger scores, in some rows more than in others: an accumulator shrinks many times, or never.

    At head dim 64 the forward kernel multiplies its accumulator only then; scores in the millions go another way.
    """
    c = case(f"B2-T300-S1500-H4-K2-D64-{dtype}")
    q, k, v = c.arrays()
    q = (q * np.linspace(0, times, c.T)[:, None, None]).astype(q.dtype)
    k = (k * np.linspace(0, times, c.S)[:, None, None]).astype(k.dtype)
    check(forward(q_offset=c.S // 2, causal=True), attend, q, k, v)
    if times < 1e3:  # there the gradients of q and k are differences of products in the millions
        check(values_and_gradients(), attend, (q, k, v), c.cotangents())
