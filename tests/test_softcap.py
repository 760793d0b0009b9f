"""`softcap`: the scaled score s becomes softcap * tanh(s / softcap), in the values and in every derivative."""

import functools

import jax
import numpy as np
import pytest

from tests.support.accuracy import check
from tests.support.cases import case
from tests.support.programs import Program, everything, second_order

NAME = "B2-T19-S35-H4-K2-D8-f32"


@pytest.mark.parametrize(
    "dtype, options",
    [
        ("f32", {"softcap": 1.5, "causal": True}),
        ("bf16", {"softcap": 0.7, "kv_lengths": np.array([35, 0])}),
    ],
    ids=str,
)
def test_values_gradients_and_tangents(attend, dtype, options):
    c = case(NAME.replace("f32", dtype))
    check(everything(**options), attend, c.arrays(), c.cotangents(), c.tangents())


def test_bias_and_traced_scale(attend):
    """The cap bends the scaled score and not the bias; eight scales by their gradient, of which each has an example."""
    c = case("B8-T9-S19-H2-D8-f32")
    scales = np.linspace(-1, 3, 8, dtype=np.float32)

    def mapped(attend, inputs, cotangents, directions, scales):
        def one(x, ct, d, scale):
            add = lambda x: (*x[:3], x[3] | {"scale": scale})  # noqa: E731
            return everything()(attend, add(x), ct, add(d))

        return jax.vmap(one)(inputs, cotangents, directions, scales)

    shape = (8, 2, 9, 19)
    given = c.inputs(bias=shape), c.cotangents(), c.inputs(1, bias=shape), scales
    check(Program(mapped, {"softcap": 2.0}, derivative=(False, True, True)), attend, *given)


def test_derivative_of_the_gradients(attend):
    c = case("B2-T9-S19-H4-K2-D8-f32")
    check(second_order(softcap=1.5, causal=True), attend, c.arrays(), c.cotangents(), c.tangents())


def test_scores_far_beyond_the_cap(attend):
    """Scores of 1e10 are the cap: neither infinity nor NaN, and a gradient of 0."""
    c = case("B2-T19-S35-H2-D8-f32")
    q, k, v = c.arrays()
    q, k = (
        np.sign(x) * np.float32(2**17) for x in (q, k)
    )  # powers of 2: a sum of products is 0 exactly, or far from it
    out, pull = jax.vjp(jax.jit(functools.partial(attend, softcap=5.0)), q, k, v)
    dq, dk, dv = pull(np.ones_like(out))
    assert np.isfinite(out).all() and np.isfinite(dv).all() and np.any(dv)
    signs = np.sign(np.einsum("bthd,bshd->bhts", q, k))
    weights = np.exp(5 * signs)
    expected = np.einsum("bhts,bshd->bthd", weights / weights.sum(-1, keepdims=True), v)
    np.testing.assert_allclose(out, expected, rtol=1e-4, atol=1e-5)
    settled = np.all(signs != 0, axis=-1).transpose(0, 2, 1)
    assert not np.any(np.asarray(dq)[settled]) and np.isfinite(dk).all()
