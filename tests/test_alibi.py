"""`alibi_slopes`: each score falls by slope times the distance of the two positions; slopes are differentiable."""

import jax
import numpy as np
import pytest

from tests.support.accuracy import check
from tests.support.cases import FEWER_QUERIES, MORE_QUERIES, case
from tests.support.programs import Program, everything, gradients

pytestmark = pytest.mark.thorough


@pytest.mark.parametrize(
    "name, shape, options",
    [
        (FEWER_QUERIES, (4,), {"q_offset": np.array([3, -11])}),
        (MORE_QUERIES, (2, 4), {"kv_positions": np.arange(38)[::-2].copy(), "window": (30, 5)}),
    ],
    ids=["H", "B-H-positions-bf16"],
)
def test_values_gradients_and_tangents(attend, name, shape, options):
    c = case(name)
    given = c.inputs(alibi_slopes=shape), c.cotangents(), c.inputs(1, alibi_slopes=shape)
    _, (*_, operands), _ = check(everything(**options), attend, *given)
    assert operands["alibi_slopes"].shape == shape


def test_no_causal_mask_is_implied(attend):
    """A key after the query is as far as one before it."""
    q, k, v = np.zeros((5, 1, 4), np.float32), np.zeros((5, 1, 4), np.float32), np.eye(5, dtype=np.float32)[:, None]
    out = np.asarray(attend(q, k, v, alibi_slopes=np.array([0.5], np.float32)))[:, 0]
    distance = np.abs(np.arange(5)[:, None] - np.arange(5))
    expected = np.exp(-0.5 * distance)
    np.testing.assert_allclose(out, expected / expected.sum(-1, keepdims=True), rtol=1e-5)


def test_equals_the_bias_that_it_stands_for(attend):
    c = case("B2-T19-S35-H2-D8-f32")
    slopes = np.array([0.25, 0.0625], np.float32)
    distance = np.abs(np.arange(19)[:, None] + 16 - np.arange(35)).astype(np.float32)
    bias = -slopes[:, None, None] * distance
    with_slopes = attend(*c.arrays(), alibi_slopes=slopes, causal=True)
    np.testing.assert_allclose(with_slopes, attend(*c.arrays(), bias, causal=True), rtol=1e-5, atol=1e-6)


def test_vmap_over_slopes(attend):
    c = case("B3-T9-S19-H2-K1-D8-f32")

    def mapped(attend, inputs, cotangents, slopes):
        one = lambda x, ct, s: gradients()(attend, (*x, {"alibi_slopes": s}), ct)  # noqa: E731
        return jax.vmap(one)(inputs, cotangents, slopes)

    *inputs, riding = c.inputs(alibi_slopes=(3, 2))
    check(Program(mapped, {"causal": True}, True), attend, tuple(inputs), c.cotangents(), riding["alibi_slopes"])


def test_slopes_keep_their_dtype(attend):
    """Computed in float32, differentiated in the dtype that was given."""
    c = case("B2-T9-S19-H4-K2-D8-bf16")
    slopes = c.normal((4,), 0, "slopes")
    gradient = jax.grad(lambda s: attend(*c.arrays(), alibi_slopes=s).astype(np.float32).sum())(slopes)
    assert gradient.dtype == slopes.dtype and np.any(gradient)
