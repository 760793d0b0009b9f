"""Gradients of query, key, value and scale, through the output, the log-sum-exp and both (R9, R10, R12, R20)."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import flash_jax
from tests.support.accuracy import assert_slope, check
from tests.support.cases import case
from tests.support.programs import Program, gradients, tangents
from tests.support.tiers import every
from tests.test_forward import EMPTY

SHAPES = [
    "B2-T1-S65-H4-K2-D16-bf16",
    "B2-T65-S7-D16-f32",
    "B2-T63-S65-H4-K2-D40-f32",
    "T100-S39-H2-D72-bf16",
    "T39-S100-H2-D80-f16",
    "T20-S33-H6-K2-D111-f32",
    "T20-S33-H3-K1-D24-Dv40-bf16",
    "T20-S33-D192-Dv128-f32",
    "B2x2-T20-S33-H4-K2-D1-f32",
]
ONE = "B2-T35-S41-H4-K2-D24-Dv16-f32"


@pytest.mark.parametrize("name", every(2, SHAPES))
def test_through_output_and_lse(attend, name):
    c = case(name)
    check(gradients(causal=True), attend, c.arrays(), c.cotangents())


def test_not_causal(attend):
    c = case(ONE.replace("f32", "f16"))
    check(gradients(), attend, c.arrays(), c.cotangents())


def test_through_the_output_alone(attend):
    c = case(ONE.replace("f32", "bf16"))
    check(gradients(causal=True), attend, c.arrays(), (c.cotangents()[0], None))


def test_through_the_lse_alone(attend):
    c = case(ONE.replace("f32", "bf16"))
    dq, dk, dv = check(gradients(causal=True), attend, c.arrays(), (None, c.cotangents()[1]))
    assert np.any(dq) and np.any(dk) and not np.any(dv)


@pytest.mark.parametrize("name", EMPTY)
def test_of_nothing(attend, name):
    c = case(name)
    check(gradients(), attend, c.arrays(), c.cotangents())


def test_zero_cotangents_give_zeros(attend):
    c = case(ONE)
    zeros = jax.tree.map(np.zeros_like, c.cotangents())
    for g in gradients(causal=True)(attend, c.arrays(), zeros):
        assert not np.any(g)


@pytest.mark.thorough
@pytest.mark.parametrize("wanted", [(2,), (0, 1)], ids=["value", "query-key"])
def test_of_some_inputs_only(attend, wanted):
    """What is not asked for is neither computed nor missed."""
    c = case(ONE)

    def some(attend, inputs, cotangents):
        def of_wanted(*x):
            given = dict(zip(wanted, x, strict=True))
            return attend(*(given.get(n, inputs[n]) for n in range(3)), return_lse=True)

        return jax.vjp(of_wanted, *(inputs[n] for n in wanted))[1](cotangents)

    check(Program(some, {"causal": True}, derivative=True), attend, c.arrays(), c.cotangents())


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_of_the_scale(attend, dtype):
    """Sixteen examples, each with a scale of its own by vmap: one number alone could be right by luck."""
    c = case(f"B16-T19-S35-H4-K2-D8-{dtype}")
    scales = np.linspace(-0.3, 0.9, 16, dtype=np.float32)

    def of_scale(attend, inputs, cotangents, scales):
        one = jax.vmap(lambda q, k, v, s: attend(q, k, v, scale=s, return_lse=True))
        return jax.vjp(lambda s: one(*inputs, s), scales)[1](cotangents)[0]

    dscale = check(Program(of_scale, {"causal": True}, derivative=True), attend, c.arrays(), c.cotangents(), scales)
    assert dscale.dtype == jnp.float32


@pytest.mark.thorough
@pytest.mark.parametrize("scale", [0.0, -0.5])
def test_with_a_static_scale(attend, scale):
    c = case(ONE)
    check(gradients(scale=scale), attend, c.arrays(), c.cotangents())


@pytest.mark.parametrize("scale", [-0.5, 1.5])
def test_with_a_traced_scale(attend, scale):
    """The larger one makes scores of 25, whose rounding must not reach the probabilities."""
    c = case(ONE)
    traced = Program(lambda attend, x, ct, s: gradients(scale=s)(attend, x, ct), derivative=True)
    check(traced, attend, c.arrays(), c.cotangents(), np.float32(scale))


@pytest.mark.parametrize("name", [ONE, "B2-T7-S0-f32", "T40-S17-H2-K1-D40-bf16"])
def test_tangents(attend, name):
    c = case(name)
    check(tangents(causal=True), attend, c.arrays(), c.tangents())


def test_tangent_of_the_scale(attend):
    c = case(ONE.replace("f32", "bf16"))

    def of_scale(attend, inputs, scale):
        return jax.jvp(lambda s: attend(*inputs, scale=s, return_lse=True), (scale,), (jnp.ones_like(scale),))[1]

    check(Program(of_scale, {"causal": True}, derivative=True), attend, c.arrays(), np.float32(0.4))


@pytest.mark.parametrize("argument", range(3), ids=["query", "key", "value"])
def test_finite_differences_in_float64(argument):
    """Three entries of each gradient against differences of the function itself, which knows nothing of derivatives."""
    with jax.enable_x64(True):
        c = case("B2-T9-S13-H4-K2-D5-Dv3-f64")
        arrays, (dout, dlse) = c.arrays(), c.cotangents()
        tiles = flash_jax.BlockSizes(block_q=4, block_kv=4)
        attend = functools.partial(
            flash_jax.flash_attention, causal=True, return_lse=True, implementation="xla", block_sizes=tiles
        )

        @jax.jit
        def loss(*x):
            out, lse = attend(*x)
            return (out * dout).sum() + (lse * dlse).sum()

        gradient = jax.jit(jax.grad(loss, argnums=argument))(*arrays)
        for index in [(0, 3, 1, 2), (1, 7, 0, 0), (1, 0, 1, 1)]:
            assert_slope(gradient, loss, arrays, argument, index)
