"""Single instructions of NVIDIA GPUs for which the compiler would emit several."""

import jax
import jax.numpy as jnp
from jax.experimental.pallas import triton as plgpu

from flash_jax.spec import AttentionSpec
from flash_jax.tiles.scores import PLAIN_ARITHMETIC, Arithmetic, Number


def arithmetic(spec: AttentionSpec) -> Arithmetic:
    """What a kernel of `spec` computes with; in interpret mode JAX's own functions, which mean the same.

    The compiler's exp2 scales arguments that would give a denormal number, before and after: three more instructions
    for each entry of a tile. Here such results are 0, as probabilities under 1e-38 may well be. Its division is exact
    to the last bit; this one to the last but one. And it fuses no multiplication with an addition of its own accord.
    """
    return PLAIN_ARITHMETIC if spec.interpret else Arithmetic(_exp2, _reciprocal, _fma)


def _exp2(x: jax.Array) -> jax.Array:
    return _elementwise("ex2.approx.ftz.f32 $0, $1;", x)


def _reciprocal(x: jax.Array) -> jax.Array:
    return _elementwise("rcp.approx.ftz.f32 $0, $1;", x)


def _fma(a: Number, b: Number, c: Number) -> jax.Array:
    return _elementwise("fma.rn.f32 $0, $1, $2, $3;", a, b, c)


def _elementwise(instruction: str, *args: Number) -> jax.Array:
    """`instruction`, in PTX, for each number of float32 arrays, broadcast to one shape."""
    shape = jnp.broadcast_shapes(*(jnp.shape(x) for x in args))
    return plgpu.elementwise_inline_asm(
        instruction,
        args=[jnp.broadcast_to(jnp.asarray(x, jnp.float32), shape) for x in args],
        constraints=",".join(["=f"] + ["f"] * len(args)),
        pack=1,
        result_shape_dtypes=[jax.ShapeDtypeStruct(shape, jnp.float32)],
    )[0]
