"""What goes in and what comes out (R10), how float32 is multiplied (R11), and float64 where it is served."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import flash_jax
from tests.support.accuracy import assert_same_in_float64, check
from tests.support.by_hand import attention_by_hand
from tests.support.cases import case
from tests.support.programs import forward, values_and_gradients


@pytest.mark.parametrize("dtype", ["bf16", "f16", "f32"])
def test_results_and_gradients_have_the_inputs_dtype(attend, dtype):
    """Case F05."""
    c = case(f"B2-T5-S7-H4-K2-{dtype}")
    (out, lse), gradients = values_and_gradients(causal=True)(attend, c.arrays(), c.cotangents())
    assert out.dtype == c.dtype and lse.dtype == jnp.float32
    assert [g.dtype for g in gradients] == [c.dtype] * 3


@pytest.mark.parametrize("dtype", ["bf16", "f16"])
def test_gradient_in_a_branch_and_in_a_loop(attend, dtype):
    """A gradient of another dtype than its input would not fit the other branch, nor the loop's carry."""
    q, k, v = case(f"B2-T5-S7-H4-K2-{dtype}").arrays()
    gradient = jax.grad(lambda k: attend(q, k, v).astype(jnp.float32).sum())

    @jax.jit
    def steps(k, on):
        k = jax.lax.cond(on, gradient, lambda k: k, k)
        return jax.lax.scan(lambda k, _: (k + gradient(k), None), k, length=2)[0]

    assert steps(jnp.asarray(k), True).dtype == k.dtype


@pytest.mark.parametrize("dtypes", [("bf16", "f32", "bf16"), ("f32", "bf16", "bf16"), ("f32", "f32", "f16")])
def test_mixed_dtypes_are_refused(attend, dtypes):
    """Case F04: all three dtypes are named, and the cast that helps."""
    q, k, v = (case(f"B1-T4-S4-{dtype}").arrays()[n] for n, dtype in enumerate(dtypes))
    with pytest.raises(TypeError) as error:
        attend(q, k, v)
    listed = f"query {q.dtype}, key {k.dtype}, value {v.dtype}"
    assert "must have the same dtype" in str(error.value) and listed in str(error.value)
    assert f".astype({q.dtype})" in str(error.value)


@pytest.mark.parametrize("dtype", [np.int32, np.bool_, np.complex64, jnp.float8_e4m3fn])
def test_other_dtypes_are_refused(attend, dtype):
    x = np.zeros((1, 4, 2, 16), dtype)
    with pytest.raises(TypeError, match="must be bfloat16, float16 or float32") as error:
        attend(x, x, x)
    assert np.dtype(dtype).name in str(error.value)


PRECISIONS = [
    None,
    "default",
    "high",
    "highest",
    "float32",
    "tensorfloat32",
    "bfloat16_3x",
    jax.lax.Precision.DEFAULT,
    jax.lax.Precision.HIGH,
    jax.lax.Precision.HIGHEST,
    jax.lax.DotAlgorithmPreset.TF32_TF32_F32_X3,
    jax.lax.DotAlgorithmPreset.F32_F32_F32,
    (jax.lax.Precision.HIGHEST, jax.lax.Precision.HIGHEST),
]


@pytest.mark.thorough
@pytest.mark.parametrize("precision", PRECISIONS, ids=str)
def test_every_precision_of_jax_is_taken(attend, precision):
    """On a CPU all of them are float32 or better."""
    check(forward(), functools.partial(attend, precision=precision), *case("T20-S33-H1-D8-f32").arrays())


@pytest.mark.parametrize("precision", ["fast", 3, jax.lax.DotAlgorithmPreset.F64_F64_F64], ids=str)
def test_another_precision_is_refused(attend, precision):
    with pytest.raises((TypeError, ValueError), match="`precision` must be None, a jax.lax.Precision or one of"):
        attend(*case("T4-f32").arrays(), precision=precision)


def test_the_precision_of_the_context_is_followed():
    """`precision=None` asks `jax.default_matmul_precision`; an argument beats it."""
    q, k, v = case("T4-f32").arrays()

    def traced(**options):
        return str(jax.make_jaxpr(lambda q: flash_jax.flash_attention(q, k, v, **options))(q))

    assert "'x3'" in traced() and "'ieee'" in traced(precision="highest") and "'tf32'" in traced(precision="default")
    with jax.default_matmul_precision("highest"):
        assert "'ieee'" in traced() and "'tf32'" in traced(precision="tensorfloat32")
    with jax.default_matmul_precision("tensorfloat32"):
        assert "'tf32'" in traced()


@pytest.mark.parametrize("implementation", [None, "xla", "reference"])
def test_float64(implementation):
    with jax.enable_x64(True):
        arrays = case("B2-T9-S14-H4-K2-D5-f64").arrays()
        tiles = flash_jax.BlockSizes(block_q=4, block_kv=4)
        out, lse = flash_jax.flash_attention(
            *arrays, causal=True, return_lse=True, implementation=implementation, block_sizes=tiles
        )
        expected = attention_by_hand(*arrays, causal=True)
        assert_same_in_float64(out, expected[0])
        assert_same_in_float64(lse, expected[1])


def test_float64_gradient():
    with jax.enable_x64(True):
        c = case("B2-T9-S14-H4-K2-D5-f64")
        options = {"causal": True, "window": (5, None)}
        tiles = flash_jax.BlockSizes(block_q=4, block_kv=4)
        found, expected = (
            values_and_gradients(**options)(
                functools.partial(flash_jax.flash_attention, implementation=name, block_sizes=tiles),
                c.arrays(),
                c.cotangents(),
            )
            for name in ("xla", "reference")
        )
        jax.tree.map(assert_same_in_float64, found, expected)


def test_float64_is_refused_by_triton():
    with jax.enable_x64(True), flash_jax.interpret_mode():
        arrays = case("T4-f64").arrays()
        with pytest.raises(
            NotImplementedError, match="'triton' cannot serve this call: .*float64.* implementation='xla'"
        ):
            flash_jax.flash_attention(*arrays, implementation="triton")


def test_values_and_dtypes_with_64_bit_types_enabled(attend):
    """Case F03: index arithmetic and constants stay what they are when JAX's default integers are 64 bits wide."""
    c = case("B2-T19-S35-H4-K2-D24-bf16")
    options = {"causal": True, "window": (9, 3), "kv_lengths": np.array([35, 20])}
    narrow = jax.jit(lambda *x: values_and_gradients(**options)(attend, *x))(c.arrays(), c.cotangents())
    with jax.enable_x64(True):
        wide = jax.jit(lambda *x: values_and_gradients(**options)(attend, *x))(c.arrays(), c.cotangents())
    assert jax.tree.map(lambda x: x.dtype, wide) == jax.tree.map(lambda x: x.dtype, narrow)
    jax.tree.map(np.testing.assert_array_equal, wide, narrow)
