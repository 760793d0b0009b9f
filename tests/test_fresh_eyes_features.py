"""What a review by fresh eyes found in the options: a test for each fault."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import flash_jax
from flash_jax import flash_attention
from tests.support import gpu_compile
from tests.support.accuracy import check
from tests.support.cases import case
from tests.support.programs import everything, values_and_gradients

pytestmark = pytest.mark.thorough

EYE = jnp.broadcast_to(jnp.eye(6)[None, :, None], (1, 6, 2, 6))
ZERO = jnp.zeros((1, 6, 2, 8))


def attended(**options):
    """bool [6, 6]: which keys the queries of the first head attend."""
    return np.asarray(flash_attention(ZERO, ZERO, EYE, **options))[0, :, 0] > 0


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("head_dim", [1, 20, 40, 80, 96, 160])
def test_gradient_of_a_dense_bias_lowers_at_every_head_dim(head_dim, dtype):
    """Its kernel reads whole arrays, whose head dim must be padded as that of a block is."""
    x = jax.ShapeDtypeStruct((1, 32, 2, head_dim), jnp.dtype(dtype))

    def gradient(q, bias):
        return jax.grad(lambda b: flash_attention(q, q, q, b, implementation="triton").astype(jnp.float32).sum())(bias)

    lowered = gpu_compile.lower(gradient, x, jax.ShapeDtypeStruct((32, 32), jnp.float32))
    assert "flash_attention_dbias_kernel" in gpu_compile.triton_ir(lowered)


def test_gradient_of_a_dense_bias_at_a_head_dim_between_powers_of_two(attend):
    c = case("B2-T19-S33-D20-Dv40-f32")
    check(values_and_gradients(), attend, c.inputs(bias=(19, 33)), c.cotangents())


@pytest.mark.parametrize("sink", [8.0, 14.0, 20.0])
def test_sinks_that_outweigh_the_keys(attend, sink):
    """What the keys of a row have together is then far less than the rounding of the sink's share."""
    c = case("B2-T19-S35-H4-K2-f32")
    sinks = np.full(4, sink, np.float32)
    check(everything(sinks=sinks), attend, c.arrays(), c.cotangents(), c.tangents())


def test_ids_and_positions_do_not_wrap():
    with jax.enable_x64(True):
        with pytest.raises(ValueError, match="`segment_ids` must fit int32; got values from 1 to 4294967297"):
            attended(segment_ids=jnp.array([1, 1, 1, 2**32 + 1, 2**32 + 1, 2**32 + 1]))
        with pytest.raises(TypeError, match="`segment_ids` must be int32 or narrower"):
            jax.eval_shape(lambda ids: attended(segment_ids=ids), jax.ShapeDtypeStruct((6,), jnp.int64))
        seen = attended(causal=True, kv_positions=jnp.array([0, 1, 2, 3, 4, 2**32]))
        assert not seen[5, 5] and seen[5, 4]
    assert not attended(causal=True, kv_positions=jnp.array([0, 1, 2, 3, 4, 2**31 + 5], jnp.uint32))[5, 5]
    assert attended(segment_ids=np.arange(6) * 2**20).sum() == 6
    assert attended(causal=True, q_positions=np.arange(6) + 2**40).all()


def test_far_positions_and_wide_windows():
    far = jnp.array([0, 1, 2, 2**29 + 1, 2**29 + 7, 2**30])
    assert attended(chunk_size=2**30, q_positions=jnp.arange(6), kv_positions=far).all()
    assert attended(window=(2**29, None), q_positions=jnp.full((6,), 2**30), kv_positions=far).all()


@pytest.mark.parametrize("implementation", ["reference", "xla"])
def test_the_lowest_bias_throughout_a_row_leaves_the_mean(implementation):
    r = np.random.default_rng(0)
    q, k, v = (jnp.asarray(r.normal(size=(1, 32, 1, 8)), jnp.float32) for _ in range(3))
    bias = jnp.full((32, 32), jnp.finfo(jnp.float32).min)

    def total(v):
        return flash_attention(q, k, v, bias, implementation=implementation).sum()

    out = flash_attention(q, k, v, bias, implementation=implementation)
    np.testing.assert_allclose(out, np.broadcast_to(v.mean(1, keepdims=True), v.shape), atol=1e-6)
    np.testing.assert_allclose(jax.grad(total)(v), np.ones(v.shape), rtol=1e-5)


@pytest.mark.parametrize("softcap", [64.0, 65.0, 1e5, 1e30])
def test_softcaps_far_above_the_scores(attend, softcap):
    """The quick tanh of 16-bit inputs errs by so much of the cap."""
    c = case("B2-T19-S35-H4-K2-bf16")
    check(values_and_gradients(softcap=softcap), attend, c.arrays(), c.cotangents())


def test_numpy_float64_is_taken_everywhere_alike():
    q = np.random.default_rng(0).normal(size=(1, 6, 2, 8))
    assert flash_attention(q, q, q, np.zeros((6, 6)), alibi_slopes=np.ones(2)).dtype == jnp.float32


def test_every_word_of_a_key_counts():
    key = jax.random.key_data(jax.random.key(0, impl="rbg"))
    masks = [
        flash_jax.dropout_mask(jax.random.wrap_key_data(key.at[3].add(n), impl="rbg"), 0.5, (1, 1, 16, 16))
        for n in range(2)
    ]
    assert (masks[0] != masks[1]).any()
