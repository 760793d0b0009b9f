"""The reference, called directly: no public function, no primitive, no validation in between."""

import jax.numpy as jnp
import numpy as np

from flash_jax import reference
from flash_jax.spec import AttentionSpec, Operands


def reference_attention(query, key, value, *, scale=None, causal=False, window=None, return_lse=False, **numbers):
    """`flash_jax.reference.attention` under the keywords of `flash_attention`.

    `numbers` are `q_offset`, `q_lengths` and `kv_lengths`.
    """
    rank = query.ndim - 3
    q_offset, offsets = _static_or_array(numbers.pop("q_offset", None), rank, jnp.int32)
    q_length, q_lengths = _clamped(numbers.pop("q_lengths", None), rank, query.shape[-3])
    kv_length, kv_lengths = _clamped(numbers.pop("kv_lengths", None), rank, key.shape[-3])
    if numbers:
        raise TypeError(f"the reference knows no {sorted(numbers)}")
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    scale, scales = _static_or_array(scale, rank, np.promote_types(query.dtype, np.float32))
    spec = AttentionSpec(
        scale=scale,
        causal=causal,
        window=window,
        q_offset=q_offset,
        q_length=q_length,
        kv_length=kv_length,
        implementation="reference",
    )
    operands = Operands(scale=scales, q_offset=offsets, q_lengths=q_lengths, kv_lengths=kv_lengths)
    out, lse = reference.attention(query, key, value, operands, spec)
    return (out, lse) if return_lse else out


def _clamped(x, rank, largest):
    """Lengths as the reference takes them, in [0, largest]."""
    static, array = _static_or_array(x, rank, jnp.int32)
    if array is not None:
        return None, jnp.clip(array, 0, largest)
    return static if static is None else min(max(static, 0), largest), None


def _static_or_array(x, rank, dtype):
    """(x, None) for a Python number or None, (None, x with the rank of the batch shape) for an array."""
    if x is None or isinstance(x, int | float):
        return x, None
    x = jnp.asarray(x).astype(dtype)
    return None, jnp.reshape(x, (1,) * (rank - x.ndim) + x.shape)
