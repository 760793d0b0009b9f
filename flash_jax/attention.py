"""The public function: what it promises, and the way from its arguments to the primitive."""

from collections.abc import Callable, Sequence

import jax
from jax.typing import ArrayLike

from flash_jax import arguments, eager, op, reference, select, validate
from flash_jax.spec import Band, BlockMask, BlockSizes


def flash_attention(  # noqa: PLR0913
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    *,
    scale: float | ArrayLike | None = None,
    causal: bool = False,
    window: Band | None = None,
    prefix_lengths: int | ArrayLike | None = None,
    chunk_size: int | None = None,
    q_offset: int | ArrayLike | None = None,
    q_positions: ArrayLike | None = None,
    kv_positions: ArrayLike | None = None,
    segment_ids: ArrayLike | None = None,
    q_segment_ids: ArrayLike | None = None,
    kv_segment_ids: ArrayLike | None = None,
    q_lengths: int | ArrayLike | None = None,
    kv_lengths: int | ArrayLike | None = None,
    softcap: float | None = None,
    alibi_slopes: ArrayLike | None = None,
    sinks: ArrayLike | None = None,
    score_mod: Callable | None = None,
    mask_mod: Callable | None = None,
    mod_operands: Sequence[ArrayLike] = (),
    block_mask: BlockMask | None = None,
    dropout_rate: float = 0.0,
    dropout_key: ArrayLike | None = None,
    return_lse: bool = False,
    context_axis: str | None = None,
    context_strategy: str | None = None,
    precision: object = None,
    implementation: str | None = None,
    block_sizes: BlockSizes | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Exact attention of `query` [..., T, H, D] to `key` [..., S, K, D] and `value` [..., S, K, Dv]: [..., T, H, Dv].

    Computes softmax(scores) v for each head (Dao, "FlashAttention-2", 2023, algorithms 1 and 2) with memory linear in T
    and S, forward, backward and in forward mode. Any leading batch dims, also none; any T and S, also T != S; H must be
    a multiple of K, and query head h reads key/value head h // (H // K). With pos() explained at `causal`,

        score[h, i, j] = mod(cap(scale * (q[i, h] . k[j, h // (H // K)])))
                         + bias[h, i, j] - slope[h] * |pos(i) - pos(j)|

    where cap(s) = softcap * tanh(s / softcap) and mod is score_mod. A query attends the keys that causal, window,
    chunk, segments, lengths, mask and mask_mod all allow; all of them may be combined. "Broadcastable to [..., X]"
    means dims of that size, 1, or absent on the left.

    Args:
      query: [..., T, H, D], bfloat16, float16 or float32 (float64 for "xla" and "reference").
      key: [..., S, K, D], of query's dtype.
      value: [..., S, K, Dv], of query's dtype.
      bias: floating-point array broadcastable to [..., H, T, S], added to the scores (and not scaled). Differentiable:
        its gradient has its shape and dtype, summed in float32 over what is broadcast. Where it is -inf the key gets no
        weight.
      mask: bool array broadcastable to [..., H, T, S], True where the query attends the key.
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
      prefix_lengths: with `causal`, keys at positions below it are attended by all queries in spite of `causal` (prefix
        LM). An int or an integer array broadcastable to the batch shape.
      chunk_size: a query attends keys of its own chunk only: pos(i) // chunk_size == pos(j) // chunk_size.
      q_offset: position of query 0 relative to key 0. An int, or an integer array broadcastable to the batch shape
        (traced allowed). Default S - T, or kv_lengths - q_lengths where these are given. q_offset=0 is top-left
        alignment, as in jax.nn.
      q_positions: integer array broadcastable to [..., T], pos(i) in any order, in the place of i + q_offset. Positions
        further out than 2**28 are cut there.
      kv_positions: integer array broadcastable to [..., S], pos(j).
      segment_ids: integer array broadcastable to [..., T], where T == S: a query attends keys of its own id only, as in
        packed documents. A negative id is padding, which attends nothing and is attended by none.
      q_segment_ids: the same for queries alone, broadcastable to [..., T], together with `kv_segment_ids`.
      kv_segment_ids: the same for keys, broadcastable to [..., S].
      q_lengths: int or integer array broadcastable to the batch shape, clamped to [0, T]: query rows at or past it are
        dead (output 0, lse -inf, no gradient).
      kv_lengths: int or integer array broadcastable to the batch shape, clamped to [0, S]: keys at or past it are
        attended by none and may hold anything, NaN included.
      softcap: positive number: scores are bent to lie between -softcap and softcap. Default None, no cap.
      alibi_slopes: floating-point array [H], or broadcastable to [..., H] (differentiable).
      sinks: floating-point array [H], or broadcastable to [..., H] (differentiable): one more score of each row whose
        value is 0, so that lse = log(sum_j exp(score) + exp(sink)). A row that attends no key has lse = sink.
      score_mod: `score_mod(score, batch, head, q_index, k_index, *operands)`, a function that returns the new score of
        one entry, given scalars: the score after scale and softcap, and int32 indices (the example in row-major order
        over the leading dims, head, row, column). It is traced into the kernels, so it is made of elementwise
        operations (`jnp.where` for a choice); it may return -inf. Its derivative is taken automatically. A function
        that is the same object at every call is compiled once.
      mask_mod: `mask_mod(batch, head, q_index, k_index, *operands)`, True where attention is allowed, besides what
        other masks say.
      mod_operands: arrays that the two functions read: in the place of each they get an object that is indexed by
        scalar integers, one for each dim, as in `table[head, q_index - k_index + 63]`; an index outside is moved to the
        nearest end. Floating-point ones are differentiable through score_mod where each index is batch, head, q index,
        k index or the difference of the last two, plus or minus a constant, clipped or not, each used once.
      block_mask: what `flash_jax.block_mask` found of `mask_mod`, so that blocks in which nothing is allowed are not
        visited; without `mask_mod` its own is taken.
      dropout_rate: number in [0, 1): each probability is dropped with it, and the others are divided by 1 minus it. The
        sum of a row, and lse, are those before dropout.
      dropout_key: a JAX key, needed where the rate is above 0. What is kept depends on it, and on the example, head,
        row and column alone: see `dropout_mask`.
      return_lse: also return the log-sum-exp of the scores of each row, through which gradients flow.
      context_axis: name of a mesh axis over which devices share the sequences: each holds as many of the T queries and
        of the S keys, in the order of the axis, and all of them are attended. Inside a `jax.shard_map`, `query`, `key`,
        `value`, positions and segment ids are this device's, `bias` and `mask` have its rows and all keys, and all
        else (lengths, offsets, `block_mask`, what mods read) is about whole sequences. On a mesh with explicit axes,
        every argument is the whole array.
      context_strategy: how: "heads" (the sequences are exchanged for heads), "ring" (keys and values go round),
        "all_gather" (they are gathered), or None, which takes "heads" where the devices divide both H and K, else
        "ring".
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
      ValueError: shapes that do not fit each other, values out of range, arguments that exclude each other, block sizes
        that do not fit the GPU.
      NotImplementedError: a named implementation that cannot serve the call, raised while tracing where the arguments
        decide, while lowering where the platform does; or arrays with symbolic shapes, or of which
        more than batch and heads is sharded over explicit mesh axes.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from flash_jax import flash_attention
      >>> q = jax.random.normal(jax.random.key(0), (2, 128, 8, 64), jnp.bfloat16)
      >>> k = v = jax.random.normal(jax.random.key(1), (2, 256, 2, 64), jnp.bfloat16)
      >>> out, lse = flash_attention(q, k, v, causal=True, return_lse=True)
      >>> out.shape, lse.shape
      ((2, 128, 8, 64), (2, 8, 128))
    """
    given = locals()
    run = eager.compiled(_attention, given)
    return _attention(**given) if run is None else run()


def _attention(*, return_lse, **given):
    """`flash_attention`, outside `jit` step by step."""
    with_lse = validate.flag("return_lse", return_lse)
    q, k, v, operands, spec = arguments.normalise(**given)
    select.check_arguments(spec, q, v)
    run = reference.attention if spec.implementation == "reference" else op.attention
    out, lse = run(q, k, v, operands, spec)
    return (out, lse) if with_lse else out
