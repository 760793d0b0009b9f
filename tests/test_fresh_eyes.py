"""Faults that a review by fresh eyes found, each with the promise that it broke."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

import flash_jax
from flash_jax import flash_attention
from tests.support.cases import case

C = case("B2-T6-S7-H4-K2-D8-Dv5-f32")


@pytest.mark.parametrize(("number", "head_dim", "dtype"), [(133120, 64, "bfloat16"), (133120, 5, "float32")])
def test_derivatives_at_huge_scores(implementation, number, head_dim, dtype):
    """One key has the weight 1 however large its score (case A09), backward and forward mode too (R1: no NaN)."""
    x = jnp.full((1, 1, 1, head_dim), number, dtype)

    def attend(*arrays):
        return flash_attention(*arrays, implementation=implementation)

    dq, dk, dv = jax.grad(lambda *a: attend(*a).astype(jnp.float32).sum(), (0, 1, 2))(x, x, x)
    assert (not dq.any(), not dk.any(), bool((dv == 1).all())) == (True, True, True)
    assert (jax.jvp(lambda v: attend(x, x, v), (x,), (jnp.ones_like(x),))[1] == 1).all()


def test_a_dead_row_s_cotangent_of_lse_reaches_nothing_at_second_order():
    """R1, for the gradient to the scale, differentiated once more."""
    q, k, v = C.arrays()
    ct = jnp.where(jnp.arange(6) < 3, 1.0, jnp.nan) * jnp.ones((2, 4, 6))

    def slope(k, s):
        pull = jax.vjp(lambda s: flash_attention(q, k, v, scale=s, q_lengths=3, return_lse=True)[1], s)[1]
        return pull(ct)[0]

    assert np.isfinite(jax.grad(slope)(jnp.asarray(k), jnp.float32(0.4))).all()


def test_jacobian_of_lse_by_the_scale(implementation):
    """vmap of a pullback of which only lse's cotangent is mapped (R12, R16)."""
    q, k, v = C.arrays()

    def lse(s, implementation):
        return flash_attention(q, k, v, scale=s, return_lse=True, implementation=implementation)[1]

    got, expected = (jax.jacrev(lse)(jnp.float32(0.3), name) for name in (implementation, "reference"))
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5)


def test_without_jit_and_under_debug_nans():
    q, k, v = C.arrays()
    expected = flash_attention(q, k, v, implementation="reference")
    with jax.disable_jit():
        np.testing.assert_allclose(flash_attention(q, k, v), expected, rtol=1e-5, atol=1e-5)
    big = jnp.full((1, 2, 1, 8), 3e38)
    padded = jnp.asarray(k).at[:, 5:].set(jnp.nan)
    with jax.debug_nans(True):
        with pytest.raises(FloatingPointError):
            flash_attention(big, big, big)
        # Padding computes no NaN.
        assert jnp.isfinite(jax.grad(lambda k: flash_attention(q, k, v, kv_lengths=5).sum())(padded)).all()


@pytest.mark.parametrize(
    "options",
    [
        {"kv_lengths": np.array([2**33, 2**32 + 1])},
        {"kv_lengths": np.array([2**32 - 1, 7], np.uint32)},
        {"kv_lengths": 2**40},
        {"causal": True, "q_offset": np.array([2**31 + 5, 7], np.uint32)},
    ],
    ids=["int64", "uint32", "int", "offset"],
)
def test_integers_beyond_32_bits_do_not_wrap(options):
    """R6: lengths are clamped; here all of them mean the whole."""
    q, k, v = C.arrays()
    np.testing.assert_array_equal(flash_attention(q, k, v, **options), flash_attention(q, k, v))


def test_an_explicit_mesh_that_shards_nothing_changes_nothing():
    """From 0.12 on, `jax.make_mesh` gives explicit axes unless told otherwise (R16)."""
    q, k, v = C.arrays()
    expected = flash_attention(q, k, v)
    mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=(jax.sharding.AxisType.Explicit,) * 2)
    with jax.set_mesh(mesh):
        np.testing.assert_array_equal(flash_attention(q, k, v), expected)
        gradient = jax.jit(jax.grad(lambda q: flash_attention(q, k, v).sum()))(jnp.asarray(q))
        assert gradient.shape == q.shape
        placed = jax.device_put(jnp.asarray(q), PartitionSpec("x"))
        mapped = jax.jit(jax.vmap(flash_attention))(placed[:, None], placed[:, None], placed[:, None])
        np.testing.assert_allclose(mapped[:, 0], flash_attention(q, q, q), rtol=1e-5, atol=1e-6)
        spec = PartitionSpec("x")
        partly = jax.shard_map(flash_attention, in_specs=(spec,) * 3, out_specs=spec, axis_names={"x"})
        assert jax.jit(partly)(placed, placed, placed).shape == q.shape


@pytest.mark.parametrize(
    ("scale", "kind", "text"),
    [
        (np.complex64(1), TypeError, "`scale` must be a real number or a floating-point scalar; got dtype complex64."),
        (np.array(True), TypeError, "`scale` must be a real number or a floating-point scalar; got dtype bool."),
        (10**400, ValueError, "`scale` must be finite; got inf."),
    ],
    ids=["complex", "bool", "huge"],
)
def test_kinds_of_scale(scale, kind, text):
    with pytest.raises(kind) as error:
        flash_attention(*C.arrays(), scale=scale)
    assert str(error.value) == text


def test_values_without_columns_are_refused():
    q, k, v = C.arrays()
    with pytest.raises(ValueError, match="Each head dim must be at least 1"):
        flash_jax.flash_attention(q, k, v[..., :0])


@pytest.mark.parametrize("name", ["dq", "dkv", "tangent"])
def test_sizes_of_one_pass_have_no_passes_of_their_own(name):
    """R17: nothing accepted is ignored."""
    one = flash_jax.BlockSizes(dq=flash_jax.BlockSizes(block_q=16))
    with pytest.raises(ValueError, match=f"`BlockSizes.{name}` is for one pass"):
        flash_jax.BlockSizes(**{name: one})
