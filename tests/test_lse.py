"""The log-sum-exp: natural logarithm, `[..., H, T]`, float32, and differentiable (R12)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import flash_jax
from tests.support.accuracy import assert_agrees, assert_same_in_float64, check
from tests.support.cases import case
from tests.support.programs import Program, forward


@pytest.mark.parametrize("dtype", ["bf16", "f16", "f32"])
def test_shape_and_dtype(attend, dtype):
    out, lse = attend(*case(f"B2x3-T5-S7-H4-K2-Dv8-{dtype}").arrays(), return_lse=True)
    assert out.shape == (2, 3, 5, 4, 8)
    assert lse.shape == (2, 3, 4, 5) and lse.dtype == jnp.float32


def test_is_the_natural_logarithm():
    """Of n keys with equal scores it is log n: in float64, by the implementation that takes it."""
    with jax.enable_x64(True):
        q, k = np.zeros((3, 1, 16)), np.ones((50, 1, 16))
        lse = flash_jax.flash_attention(q, k, k, causal=True, return_lse=True, implementation="xla")[1]
        assert_same_in_float64(lse[0], np.log([48.0, 49.0, 50.0]))


def test_of_equal_scores_and_of_one_key(attend):
    for name in ("T3-S50-H1-f32", "B2-T7-S1-f32"):
        q, k, v = case(name).arrays()
        check(forward(causal=True), attend, np.zeros_like(q), k, v)
        check(forward(), attend, q, k, v)


def test_returning_it_does_not_change_the_output(attend):
    arrays = case("B2-T35-S41-H4-K2-bf16").arrays()
    np.testing.assert_array_equal(attend(*arrays), attend(*arrays, return_lse=True)[0])


def test_two_parts_combine_to_the_whole(attend):
    """What the log-sum-exp is for: attention over two halves of the keys, weighted by it, is attention over all."""

    def halves(q, k, v):
        parts = [attend(q, k[:, s], v[:, s], return_lse=True) for s in (np.s_[:17], np.s_[17:])]
        lse = jnp.logaddexp(parts[0][1], parts[1][1])
        weights = [jnp.swapaxes(jnp.exp(part - lse), -1, -2)[..., None] for _, part in parts]
        return sum(w * out for w, (out, _) in zip(weights, parts, strict=True)), lse

    q, k, v = case("B2-T9-S40-H4-K2-f32").arrays()
    assert_agrees(halves(q, k, v), forward(), q, k, v)


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_z_loss_has_a_gradient(attend, dtype):
    """Case E03: the gradient of a loss on the log-sum-exp alone is that of JAX's own logsumexp."""

    def z_loss(attend, q, k, v):
        return jax.grad(lambda q, k: (attend(q, k, v, return_lse=True)[1] ** 2).sum(), argnums=(0, 1))(q, k)

    for g in check(Program(z_loss, derivative=True), attend, *case(f"B1-T4-S6-H2-D8-{dtype}").arrays()):
        assert np.abs(np.asarray(g, np.float32)).max() > 0.1
