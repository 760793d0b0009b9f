"""What both self-attention modules compute around attention: head counts, projections, normalisation. Arrays only.

A projection's kernel is stored with its heads apart, as in Flax's own attention modules: query [features, H, D], key
and value [features, K, D], out [H, D, features].
"""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

# The logical axis names of each parameter, the same in linen and nnx.
QUERY_NAMES = ("embed", "heads", "head_dim")
KEY_VALUE_NAMES = ("embed", "kv_heads", "head_dim")
OUT_NAMES = ("heads", "head_dim", "embed")
NORM_NAMES = ("head_dim",)
SINK_NAMES = ("heads",)

NORM_EPSILON = 1e-6


def head_counts(
    features: int, num_heads: int, num_kv_heads: int | None, head_dim: int | None, rope_theta: float | None
) -> tuple[int, int]:
    """(num_kv_heads, head_dim) with their defaults filled in; ValueError where the numbers do not fit together."""
    if num_heads < 1:
        raise ValueError(f"`num_heads` must be at least 1; got {num_heads}.")
    kv_heads = num_heads if num_kv_heads is None else num_kv_heads
    if kv_heads < 1 or num_heads % kv_heads:
        raise ValueError(
            f"`num_kv_heads` must divide `num_heads`; got {kv_heads} and {num_heads}. "
            "Each key/value head serves num_heads / num_kv_heads query heads."
        )
    if head_dim is None:
        if features % num_heads:
            raise ValueError(
                f"the input's features must be divisible by `num_heads`; got {features} and {num_heads}. "
                "Give `head_dim` to choose the width of a head freely."
            )
        head_dim = features // num_heads
    if head_dim < 1:
        raise ValueError(f"`head_dim` must be at least 1; got {head_dim}.")
    if rope_theta is not None and head_dim % 2:
        raise ValueError(
            f"rotary positions turn pairs of dimensions, so `head_dim` must be even; got {head_dim}. "
            "Use an even `head_dim`, or rope_theta=None for no rotary positions."
        )
    return kv_heads, head_dim


def require_causal(decode: bool, causal: bool) -> None:
    """ValueError where a decoder is asked to look at tokens that are not there yet."""
    if decode and not causal:
        raise ValueError("`decode` needs causal=True, since a cache holds no later tokens; got causal=False.")


def require_no_segments(decode: bool, segment_ids: jax.Array | None) -> None:
    """NotImplementedError for segments in a cache, which does not keep them."""
    if decode and segment_ids is not None:
        raise NotImplementedError(
            "`segment_ids` while decoding is not supported: the key/value cache does not keep them. Decode one "
            "document in each example, or give a `mask` over the whole cache."
        )


def require_no_context(decode: bool, context_axis: str | None) -> None:
    """NotImplementedError for a cache that devices would share by its tokens."""
    if decode and context_axis is not None:
        raise NotImplementedError(
            "`context_axis` while decoding is not supported: each device's cache holds all tokens. Decode with "
            "context_axis=None; the parameters are the same."
        )


def slopes(numbers: tuple[float, ...] | None) -> jax.Array | None:
    """ALiBi's slopes as an array."""
    return None if numbers is None else jnp.asarray(numbers, jnp.float32)


def flattened(kernel_init: Callable[..., jax.Array], inputs: int) -> Callable[..., jax.Array]:
    """`kernel_init` as it sees the kernel's matrix: the first `inputs` dims as rows, the others as columns.

    An initialiser reads fan-in and fan-out off a two-dimensional shape; off [features, H, D] it would read them
    wrongly.
    """

    def init(key: jax.Array, shape: tuple[int, ...], dtype: DTypeLike) -> jax.Array:
        matrix = (math.prod(shape[:inputs]), math.prod(shape[inputs:]))
        return kernel_init(key, matrix, dtype).reshape(shape)

    return init


def project(x, kernel, bias, *, inputs: int, dtype: DTypeLike | None, precision):
    """The last `inputs` dims of x against the first `inputs` dims of kernel, plus bias, in `dtype` (None: promoted)."""
    arrays = [a for a in (x, kernel, bias) if a is not None]
    dtype = jnp.result_type(*arrays) if dtype is None else dtype
    product = jnp.tensordot(jnp.asarray(x, dtype), jnp.asarray(kernel, dtype), axes=inputs, precision=precision)
    return product if bias is None else product + jnp.asarray(bias, dtype)


def rms_norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    """x [..., D] over its root mean square along D, times scale [D]; in float32 or wider, returned in x's dtype."""
    wide = x.astype(np.promote_types(x.dtype, np.float32))
    mean_square = jnp.mean(jnp.square(wide), axis=-1, keepdims=True)
    return (wide * jax.lax.rsqrt(mean_square + NORM_EPSILON) * scale.astype(wide.dtype)).astype(x.dtype)
