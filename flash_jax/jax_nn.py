"""`jax.nn.dot_product_attention` by the kernels of this library: its signature and its meaning, as an adapter."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from flash_jax.attention import flash_attention
from flash_jax.spec import Band

_IMPLEMENTATIONS = {None: None, "xla": "xla", "cudnn": None}
_FLOATS = ("bfloat16", "float16", "float32", "float64")


def dot_product_attention(  # noqa: PLR0913
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    *,
    scale: float | ArrayLike | None = None,
    is_causal: bool = False,
    query_seq_lengths: ArrayLike | None = None,
    key_value_seq_lengths: ArrayLike | None = None,
    local_window_size: int | tuple[int, int] | None = None,
    implementation: str | None = None,
    return_residual: bool = False,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """In place of `jax.nn.dot_product_attention`: the same arguments and results, in memory linear in T and S.

    `query` [B, T, N, H], `key` [B, S, K, H], `value` [B, S, K, V], or all three without B; the output is [B, T, N, V],
    or without B. As in JAX, and other than in `flash_attention`, the first query stands beside the first key (top-left)
    whatever T and S are. What remains different from JAX is listed in docs/semantics.md: rows that attend nothing, the
    residual's dtype and gradient, the accuracy of float32 on GPUs, and the classes of errors.

    Args:
      query: [B, T, N, H] or [T, N, H].
      key: [B, S, K, H] or [S, K, H], of query's dtype; N is a multiple of K.
      value: [B, S, K, V] or [S, K, V], of query's dtype. V may differ from H.
      bias: added to the scores, differentiable; four dims (fewer are filled up with ones on the left) that broadcast to
        [B, N, T, S].
      mask: bool, True = attend; four dims as `bias`.
      scale: multiplies the scores; a number or a scalar array, also traced. Default H**-0.5.
      is_causal: query i attends key j only if j <= i.
      query_seq_lengths: integers [B]: queries from there on give 0.
      key_value_seq_lengths: integers [B]: keys from there on are attended by none.
      local_window_size: (left, right): query i attends key j only if i - left <= j <= i + right; one int stands for
        both.
      implementation: None or "cudnn" (the best for this call and platform), or "xla".
      return_residual: also return the log-sum-exp of each row's scores.

    Returns:
      The output in query's dtype; with `return_residual=True` the pair (output, residual), residual [B, T, N] or [T, N]
      in float32 (float64 for float64 inputs), differentiable.

    Raises:
      TypeError: dtypes that differ or are not served, a mask that is not bool.
      ValueError: shapes that do not fit, an unknown implementation.

    Example:
      >>> import jax, jax.numpy as jnp, flash_jax
      >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 2, 16, 4, 32))
      >>> ours = flash_jax.dot_product_attention(q, k, v, is_causal=True)
      >>> bool(jnp.allclose(ours, jax.nn.dot_product_attention(q, k, v, is_causal=True), atol=1e-5))
      True
    """
    if implementation not in _IMPLEMENTATIONS:
        raise ValueError(
            f"`implementation` must be None, 'xla' or 'cudnn', as in jax.nn; got {implementation!r}. "
            "flash_attention takes the others."
        )
    shape = jnp.asarray(query).shape
    q, k, v = (_in_four_dims(name, x) for name, x in (("query", query), ("key", key), ("value", value)))
    band, offset, nothing = _band(local_window_size, bool(is_causal))
    kv_lengths = _lengths("key_value_seq_lengths", key_value_seq_lengths, q.shape[0])
    result = flash_attention(
        q,
        k,
        v,
        None if bias is None else _bias(bias),
        None if mask is None else _in_four_dims("mask", mask),
        scale=_scale(scale),
        window=band,
        q_offset=offset,
        q_lengths=_lengths("query_seq_lengths", query_seq_lengths, q.shape[0]),
        kv_lengths=0 if nothing else kv_lengths,
        return_lse=bool(return_residual),
        implementation=_IMPLEMENTATIONS[implementation],
    )
    if not isinstance(result, tuple):
        return result.reshape(*shape[:-1], v.shape[-1])
    out, lse = result
    return out.reshape(*shape[:-1], v.shape[-1]), jnp.swapaxes(lse, -1, -2).reshape(shape[:-1])


def _in_four_dims(name: str, x: ArrayLike) -> jax.Array:
    """x with dims of size 1 on the left."""
    x = jnp.asarray(x)
    if x.ndim > 4:
        raise ValueError(
            f"`{name}` must have at most four dims; got shape {x.shape}. "
            "flash_attention takes any number of batch dims."
        )
    return x.reshape((1,) * (4 - x.ndim) + x.shape)


def _bias(bias: ArrayLike) -> jax.Array:
    """The bias in four dims; jax.nn adds numbers of any dtype."""
    bias = _in_four_dims("bias", bias)
    return bias if bias.dtype in _FLOATS else bias.astype(jnp.float32)


def _scale(scale: float | ArrayLike | None) -> float | ArrayLike | None:
    """The scale as flash_attention takes it; jax.nn multiplies by anything that is one number."""
    if isinstance(scale, bool):
        return float(scale)
    if isinstance(scale, (jax.Array, np.ndarray)) and scale.size == 1:
        scale = scale.reshape(())
        if not jnp.issubdtype(scale.dtype, jnp.floating):
            return scale.astype(np.float32)
    return scale


def _lengths(name: str, lengths: ArrayLike | None, batch: int) -> jax.Array | None:
    if lengths is None:
        return None
    lengths = jnp.asarray(lengths)
    if lengths.shape != (batch,) or not jnp.issubdtype(lengths.dtype, jnp.integer):
        raise ValueError(f"`{name}` must be integers of shape ({batch},); got {lengths.dtype} {lengths.shape}.")
    return lengths


def _band(local_window_size: int | tuple[int, int] | None, causal: bool) -> tuple[Band | None, int, bool]:
    """(window, q_offset, whether it shows nothing at all) of keys i - left to i + right, where both may be negative.

    flash_attention has no negative ends, so the queries' positions are moved to the end that would be.
    """
    left, right = _window(local_window_size)
    if causal:
        right = 0 if right is None else min(right, 0)
    if left is not None and right is not None and left + right < 0:
        return None, 0, True
    offset = -left if left is not None and left < 0 else right if right is not None and right < 0 else 0
    window = (None if left is None else left + offset, None if right is None else right - offset)
    return (None if window == (None, None) else window), offset, False


def _window(size: int | tuple[int, int] | None) -> Band:
    if size is None:
        return None, None
    pair = (size, size) if isinstance(size, (int, np.integer)) else size
    if (
        not isinstance(pair, (tuple, list))
        or len(pair) != 2
        or not all(isinstance(side, (int, np.integer)) for side in pair)
    ):
        raise ValueError(f"`local_window_size` must be an int, a pair (left, right) of ints or None; got {size!r}.")
    return int(pair[0]), int(pair[1])
