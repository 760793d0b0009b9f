"""Sequences of different lengths, packed end to end: no slot of padding is stored or computed."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.typing import ArrayLike

from flash_jax import validate
from flash_jax.attention import flash_attention
from flash_jax.spec import Band, BlockSizes


def flash_attention_varlen(  # noqa: PLR0913
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    cu_seqlens_q: ArrayLike,
    cu_seqlens_kv: ArrayLike,
    *,
    scale: float | ArrayLike | None = None,
    causal: bool = False,
    window: Band | None = None,
    chunk_size: int | None = None,
    softcap: float | None = None,
    alibi_slopes: ArrayLike | None = None,
    sinks: ArrayLike | None = None,
    dropout_rate: float = 0.0,
    dropout_key: ArrayLike | None = None,
    return_lse: bool = False,
    precision: object = None,
    implementation: str | None = None,
    block_sizes: BlockSizes | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Attention within each of n packed sequences: `query` [total_q, H, D] to `key` [total_kv, K, D]: [total_q, H, Dv].

    Sequence s owns the queries cu_seqlens_q[s] to cu_seqlens_q[s + 1] and the keys and values cu_seqlens_kv[s] to
    cu_seqlens_kv[s + 1], and gets what `flash_attention` would give it alone: with `causal` or a `window` the diagonal
    of each ends at its own last query and its own last key (bottom-right). A batch of packed calls goes through
    `jax.vmap`.

    Args:
      query: [total_q, H, D], bfloat16, float16 or float32 (float64 for "xla" and "reference").
      key: [total_kv, K, D], of query's dtype.
      value: [total_kv, K, Dv], of query's dtype.
      cu_seqlens_q: where the queries of each sequence begin: integers [n + 1] from 0 upwards, never decreasing, the
        last at most total_q. Equal neighbours are a sequence of length 0. Traced values are allowed: they cannot be
        checked, and one program serves all lengths of the same n and totals. Slots from the last entry on are dead:
        output 0, lse -inf, no gradient, and they may hold anything, NaN included.
      cu_seqlens_kv: the same for keys and values, for the same n sequences.
      alibi_slopes: [H] floating-point.
      sinks: [H] floating-point.
      dropout_rate, dropout_key: as for `flash_attention`; row and column are the slots of the packed arrays, so that
        what is kept is `dropout_mask(dropout_key, dropout_rate, (H, total_q, total_kv))`.
      scale, causal, window, chunk_size, softcap, precision, implementation, block_sizes: see `flash_attention`.
      return_lse: also return the log-sum-exp of each row.

    Returns:
      out [total_q, H, Dv] in query's dtype; with `return_lse=True` the pair (out, lse), lse [H, total_q] float32
      (float64 for float64 inputs).

    Raises:
      TypeError: `cu_seqlens_q` or `cu_seqlens_kv` that is no integer array; otherwise as `flash_attention`.
      ValueError: inputs not packed to three dims, bounds of another shape than [n + 1], and where their values are
        known, bounds that do not begin at 0, decrease or exceed the total; otherwise as `flash_attention`.
      NotImplementedError: as `flash_attention`.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from flash_jax import flash_attention, flash_attention_varlen
      >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 8, 2, 16))  # 8 slots, of which two sequences fill 3 and 4
      >>> bounds = jnp.array([0, 3, 7])
      >>> out = flash_attention_varlen(q, k, v, bounds, bounds, causal=True)
      >>> alone = flash_attention(q[3:7], k[3:7], v[3:7], causal=True)
      >>> bool(jnp.allclose(out[3:7], alone, atol=1e-6)), bool((out[7:] == 0).all())
      (True, True)
    """
    q, k, v = validate.query_key_value(query, key, value)
    if q.ndim != 3:
        raise ValueError(
            f"`query` must be packed to [total, heads, head_dim]; got shape {q.shape}. Use flash_attention with "
            "`q_lengths` and `kv_lengths` for padded batches, or jax.vmap for a batch of packed arrays."
        )
    of_query = _bounds("cu_seqlens_q", cu_seqlens_q, "query", q.shape[0])
    of_key = _bounds("cu_seqlens_kv", cu_seqlens_kv, "key", k.shape[0])
    if of_query.shape != of_key.shape:
        raise ValueError(
            "`cu_seqlens_q` and `cu_seqlens_kv` must have one entry more than there are sequences, both; got shapes "
            f"{of_query.shape} and {of_key.shape}."
        )
    q_ids, q_index = _slots(of_query, q.shape[0])
    kv_ids, kv_index = _slots(of_key, k.shape[0])
    # The position of each sequence's first query. The 0 behind them is for id -1, of slots in no sequence.
    offsets = jnp.append(jnp.diff(of_key) - jnp.diff(of_query), jnp.zeros((), jnp.int32))
    return flash_attention(
        q,
        k,
        v,
        scale=scale,
        causal=causal,
        window=window,
        chunk_size=chunk_size,
        q_positions=q_index + offsets[q_ids],
        kv_positions=kv_index,
        q_segment_ids=q_ids,
        kv_segment_ids=kv_ids,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        sinks=sinks,
        dropout_rate=dropout_rate,
        dropout_key=dropout_key,
        return_lse=return_lse,
        precision=precision,
        implementation=implementation,
        block_sizes=block_sizes,
    )


def segment_ids_from_lengths(lengths: ArrayLike, total: int) -> jax.Array:
    """Segment ids int32 [..., total] of sequences packed end to end, of `lengths` [..., n] each.

    Slots of the first sequence get id 0, those of the next 1 and so on; slots past the last get -1, which attends
    nothing and is attended by nothing. For the segment ids of `flash_attention`.

    Args:
      lengths: integer array [..., n], traced or not. Where its values are known they must not be negative and their sum
        must not exceed `total`; a traced length below 0 counts as 0, and what lies beyond `total` is cut off.
      total: slots of the packed array.

    Raises:
      TypeError: `lengths` is no integer array, or `total` no int.
      ValueError: `lengths` without a dim, negative, or longer than `total` together; a negative `total`.

    Example:
      >>> import jax.numpy as jnp
      >>> from flash_jax import segment_ids_from_lengths
      >>> print(segment_ids_from_lengths(jnp.array([[2, 3], [4, 0]]), 6))
      [[ 0  0  1  1  1 -1]
       [ 0  0  0  0 -1 -1]]
    """
    if isinstance(total, (bool, np.bool_)) or not isinstance(total, (int, np.integer)):
        raise TypeError(f"`total` must be an int; got {type(total).__name__}.")
    if total < 0:
        raise ValueError(f"`total` must not be negative; got {total}.")
    _check_integers("lengths", lengths)
    shape = jnp.shape(lengths)
    if not shape:
        raise ValueError("`lengths` must have shape [..., n], one number a sequence; got a scalar.")
    known = _known(lengths)
    if known is not None and (known < 0).any():
        raise ValueError(f"`lengths` must not be negative; got {known.min()}.")
    if known is not None and (known.sum(axis=-1) > total).any():
        raise ValueError(f"`lengths` must fit into the {total} slots; their sum is {known.sum(axis=-1).max()}.")
    ends = jnp.cumsum(jnp.clip(jnp.asarray(lengths).astype(jnp.int32), 0, int(total)), axis=-1, dtype=jnp.int32)
    starts = jnp.concatenate([jnp.zeros((*shape[:-1], 1), jnp.int32), ends], axis=-1).reshape(-1, shape[-1] + 1)
    ids = jax.vmap(lambda bounds: _slots(bounds, int(total))[0])(starts)
    return ids.reshape(*shape[:-1], int(total))


def _slots(bounds: jax.Array, total: int) -> tuple[jax.Array, jax.Array]:
    """int32 [total] each: the number of the sequence that owns a slot, -1 for none, and the slot's index in it."""
    slot = jnp.arange(total, dtype=jnp.int32)
    owner = jnp.searchsorted(bounds, slot, side="right").astype(jnp.int32) - 1
    owned = (owner >= 0) & (owner < bounds.shape[0] - 1)
    return jnp.where(owned, owner, -1), slot - bounds[jnp.maximum(owner, 0)]


def _bounds(name: str, value: ArrayLike, of: str, total: int) -> jax.Array:
    """int32 [n + 1], checked as far as the values are known."""
    _check_integers(name, value)
    if jnp.ndim(value) != 1 or not jnp.shape(value)[0]:
        raise ValueError(f"`{name}` must have shape [n + 1] for n sequences; got {jnp.shape(value)}.")
    known = _known(value)
    if known is not None and (known[0] != 0 or (np.diff(known) < 0).any() or known[-1] > total):
        raise ValueError(
            f"`{name}` must begin at 0, never decrease and end at most at the {total} slots of `{of}`; got {known}."
        )
    return jnp.asarray(value).astype(jnp.int32)


def _check_integers(name: str, value: ArrayLike) -> None:
    if not isinstance(value, (jax.Array, np.ndarray)) or not jnp.issubdtype(value.dtype, jnp.integer):
        got = getattr(value, "dtype", type(value).__name__)
        raise TypeError(f"`{name}` must be an integer array; got {got}.")


def _known(value: ArrayLike) -> np.ndarray | None:
    """The values as int64 where they can be read now: not inside a trace, nor where other processes hold a part."""
    if isinstance(value, Tracer) or isinstance(value, jax.Array) and not value.is_fully_addressable:
        return None
    return np.asarray(value).astype(np.int64)
