"""The public function: what it promises, and the way from its arguments to the primitive."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from flash_jax import op, reference, select, validate
from flash_jax.spec import AttentionSpec, Band, BlockSizes, Operands, interpreting


def flash_attention(  # noqa: PLR0913
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    *,
    scale: float | ArrayLike | None = None,
    causal: bool = False,
    window: Band | None = None,
    q_offset: int | ArrayLike | None = None,
    q_lengths: int | ArrayLike | None = None,
    kv_lengths: int | ArrayLike | None = None,
    return_lse: bool = False,
    precision: object = None,
    implementation: str | None = None,
    block_sizes: BlockSizes | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Exact attention of `query` [..., T, H, D] to `key` [..., S, K, D] and `value` [..., S, K, Dv]: [..., T, H, Dv].

    Computes softmax(scale * q k^T) v for each head (Dao, "FlashAttention-2", 2023, algorithms 1 and 2) with memory
    linear in T and S, forward, backward and in forward mode. Any leading batch dims, also none; any T and S, also T !=
    S; H must be a multiple of K, and query head h reads key/value head h // (H // K).

    Args:
      query: [..., T, H, D], bfloat16, float16 or float32 (float64 for "xla" and "reference").
      key: [..., S, K, D], of query's dtype.
      value: [..., S, K, Dv], of query's dtype.
      scale: multiplies q k^T. A number or a scalar floating-point array (differentiable). Default D**-0.5.
      causal: query i attends key j only if pos(j) <= pos(i), where pos(i) = i + q_offset and pos(j) = j. The default
        offset S - T puts the diagonal in the bottom-right corner, so that the last query attends every key. In the
        drawings 1 is attended and 0 not; a row of zeros gives output 0 and lse -inf::

            T = 2, S = 4      T = 4, S = 2      T = 2, S = 4, q_offset=0 (top-left)
            1 1 1 0           0 0               1 0 0 0
            1 1 1 1           0 0               1 1 0 0
                              1 0
                              1 1
      window: (left, right): query i attends key j only if pos(i) - left <= pos(j) <= pos(i) + right, both ends
        inclusive; None is an unbounded side. Independent of `causal`. A model's "sliding window W" (a query and its W -
        1 predecessors) is window=(W - 1, 0). With T != S the window of row i covers keys [i + S - T - left, i + S - T +
        right]; rows whose window lies outside [0, S) give output 0.
      q_offset: position of query 0 relative to key 0. An int, or an integer array broadcastable to the batch shape
        (traced allowed). Default S - T, or kv_lengths - q_lengths where these are given. q_offset=0 is top-left
        alignment, as in jax.nn.
      q_lengths: int or integer array broadcastable to the batch shape, clamped to [0, T]: query rows at or past it are
        dead (output 0, lse -inf, no gradient).
      kv_lengths: int or integer array broadcastable to the batch shape, clamped to [0, S]: keys at or past it are
        attended by none and may hold anything, NaN included.
      return_lse: also return the log-sum-exp of the scores of each row, through which gradients flow.
      precision: how float32 inputs are multiplied. None follows `jax.default_matmul_precision`, and where that is not
        set gives float32 accuracy (on GPUs, three TF32 products). "highest" is IEEE float32, "default" or
        "tensorfloat32" one TF32 product. Products of bfloat16 and float16 inputs are exact and summed in float32
        whatever it is.
      implementation: None (the best for this call and platform), "triton" (NVIDIA GPUs from compute capability 8.0),
        "xla" (anywhere) or "reference" (anywhere; quadratic memory). "mosaic_gpu" is not there yet.
      block_sizes: overrides the tile sizes; see `BlockSizes`.

    Returns:
      out [..., T, H, Dv] in query's dtype; with `return_lse=True` the pair (out, lse), lse [..., H, T] float32 (float64
      for float64 inputs), the natural logarithm of the sum of exp(scores), -inf for a row that attends nothing.

    Raises:
      TypeError: an argument of the wrong kind, or dtypes that differ or are not supported.
      ValueError: shapes that do not fit each other, values out of range, block sizes that do not fit the GPU.
      NotImplementedError: a named implementation that cannot serve the call, raised while tracing where the arguments
        decide, while lowering where the platform does; or arrays with symbolic shapes or
        sharded over explicit mesh axes.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from flash_jax import flash_attention
      >>> q = jax.random.normal(jax.random.key(0), (2, 128, 8, 64), jnp.bfloat16)
      >>> k = v = jax.random.normal(jax.random.key(1), (2, 256, 2, 64), jnp.bfloat16)
      >>> out, lse = flash_attention(q, k, v, causal=True, return_lse=True)
      >>> out.shape, lse.shape
      ((2, 128, 8, 64), (2, 8, 128))
    """
    q, k, v = validate.query_key_value(query, key, value)
    batch = q.shape[:-3]
    scale_ = validate.scale(scale, q.shape[-1])
    causal_ = validate.flag("causal", causal)
    window_ = validate.window(window)
    offset = _bounded_offset(validate.per_example("q_offset", q_offset, batch), window_, q.shape[-3], k.shape[-3])
    q_len = validate.per_example("q_lengths", q_lengths, batch)
    kv_len = validate.per_example("kv_lengths", kv_lengths, batch)
    with_lse = validate.flag("return_lse", return_lse)
    spec = AttentionSpec(
        scale=_static(scale_),
        causal=causal_,
        window=window_,
        q_offset=_static(offset),
        q_length=_static(q_len, q.shape[-3]),
        kv_length=_static(kv_len, k.shape[-3]),
        precision=validate.precision(precision),
        implementation=validate.implementation(implementation),
        block_sizes=validate.block_sizes(block_sizes),
        interpret=interpreting(),
    )
    operands = Operands(
        scale=_scale_operand(scale_, q),
        q_offset=_dynamic(offset),
        q_lengths=_dynamic(q_len, q.shape[-3]),
        kv_lengths=_dynamic(kv_len, k.shape[-3]),
    )
    select.check_arguments(spec, q, v)
    run = reference.attention if spec.implementation == "reference" else op.attention
    out, lse = run(q, k, v, operands, spec)
    return (out, lse) if with_lse else out


def _static(x, upper=None):
    """The value if it is static, clamped to [0, upper] where upper is given."""
    if x is None or isinstance(x, jax.Array):
        return None
    return x if upper is None else min(max(x, 0), upper)


def _dynamic(x, upper=None):
    if not isinstance(x, jax.Array):
        return None
    return x if upper is None else jnp.clip(x, 0, upper)


def _bounded_offset(offset, window, T, S):
    """The offset, cut where no query sees a key any more, or each sees all: further out nothing changes."""
    if offset is None:
        return None
    left, right = window or (None, None)
    low, high = -T - (right or 0), S + (left or 0)
    return jnp.clip(offset, low, high) if isinstance(offset, jax.Array) else min(max(offset, low), high)


def _scale_operand(scale, q):
    """A traced scale as an array with the batch's rank, so that under vmap each example can have its own."""
    if not isinstance(scale, jax.Array):
        return None
    dtype = np.promote_types(q.dtype, np.float32)
    return scale.astype(dtype).reshape((1,) * (q.ndim - 3))
