"""From the arguments of the public functions to what the implementations take: arrays, `Operands`, `AttentionSpec`."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from flash_jax import context_parallel, mods, partition, validate
from flash_jax.spec import AttentionSpec, Band, BlockMask, BlockSizes, Operands, interpreting
from flash_jax.tiles import dropout

# Positions further out are cut here: differences of two then fit in 32 bits, and no two of them are further apart than
# the window that counts as unbounded.
_FAR = 2**28


class Call(NamedTuple):
    """A checked call."""

    q: jax.Array
    k: jax.Array
    v: jax.Array
    operands: Operands
    spec: AttentionSpec


def normalise(  # noqa: PLR0913
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
    context_axis: str | None = None,
    context_strategy: str | None = None,
    precision: object = None,
    implementation: str | None = None,
    block_sizes: BlockSizes | None = None,
) -> Call:
    """The call that the arguments of `flash_attention` ask for; raises what is wrong with them."""
    q, k, v = validate.query_key_value(query, key, value)
    batch, (T, H, D), S = q.shape[:-3], q.shape[-3:], k.shape[-3]
    (all_T, all_S), strategy = _context(context_axis, context_strategy, q, k)  # T and S may be those of a device
    stats = np.promote_types(q.dtype, np.float32)
    scale_ = validate.scale(scale, D)
    slopes = validate.per_head("alibi_slopes", alibi_slopes, batch, H, stats)
    rate, typed_key = validate.dropout(dropout_rate, dropout_key)
    q_len = validate.per_example("q_lengths", q_lengths, batch)
    kv_len = validate.per_example("kv_lengths", kv_lengths, batch)
    prefix = _clip(validate.per_example("prefix_lengths", prefix_lengths, batch))
    read = mods.operands(mod_operands, len(batch), q.dtype == jnp.float64)
    block_map = validate.block_mask(block_mask, (*batch, H, all_T, all_S))
    mask_mod = block_mask.mask_mod if mask_mod is None and block_mask is not None else mask_mod
    if read and score_mod is None and mask_mod is None:
        raise ValueError("`mod_operands` are read by `score_mod` and `mask_mod`; neither is given.")
    spec = AttentionSpec(
        scale=_static(scale_),
        softcap=validate.softcap(softcap),
        score_mod=mods.score_mod(score_mod, read, batch, H, stats),
        mask_mod=mods.mask_mod(mask_mod, read, batch, H),
        causal=validate.flag("causal", causal),
        window=validate.window(window),
        prefix_length=_static(prefix),
        chunk_size=validate.chunk_size(chunk_size),
        dropout_rate=rate,
        q_length=_static(q_len, all_T),
        kv_length=_static(kv_len, all_S),
        precision=validate.precision(precision),
        implementation=validate.implementation(implementation),
        block_sizes=validate.block_sizes(block_sizes),
        interpret=interpreting(),
        whole=None if context_axis is None else (all_T, all_S),
        context_axis=context_axis,
        context_strategy=strategy,
    )
    if prefix is not None and not spec.causal:
        raise ValueError("`prefix_lengths` lets queries attend a prefix in spite of `causal`; it needs causal=True.")
    q_at, kv_at = _positions(q_positions, kv_positions, q_offset, spec, slopes, (batch, T, S))
    offset = validate.per_example("q_offset", q_offset, batch)
    local = slopes is None and prefix is None and spec.chunk_size is None and kv_at is None
    offset = _bounded(offset, spec.window, all_T, all_S) if local else _clip(offset)
    q_ids, kv_ids = validate.segments(segment_ids, q_segment_ids, kv_segment_ids, batch, T, S)
    operands = Operands(
        scale=_scale_operand(scale_, q),
        bias=validate.bias(bias, (*batch, H, T, all_S), q.dtype),
        mask=validate.mask(mask, (*batch, H, T, all_S)),
        alibi_slopes=slopes,
        sinks=validate.per_head("sinks", sinks, batch, H, stats),
        q_offset=_dynamic(offset),
        q_lengths=_dynamic(q_len, all_T),
        kv_lengths=_dynamic(kv_len, all_S),
        prefix_lengths=_dynamic(prefix),
        q_positions=q_at,
        kv_positions=kv_at,
        q_segment_ids=q_ids,
        kv_segment_ids=kv_ids,
        dropout_words=None if typed_key is None else dropout.head_words(typed_key, batch, H),
        block_map=block_map,
        mods=read,
        **_mod_indices(batch, H) if mask_mod is not None or score_mod is not None else {},
    )
    return Call(q, k, v, operands, AttentionSpec(**{**vars(spec), "q_offset": _static(offset)}))


def _context(axis: str | None, strategy: str | None, q: jax.Array, k: jax.Array):
    """(T and S of the whole sequences, the strategy by which devices along `axis` attend them)."""
    validate.context(axis, strategy)
    sizes = q.shape[-3], k.shape[-3]
    if axis is None:
        return sizes, None
    count, is_part = context_parallel.devices(axis)
    if not is_part and any(n % count for n in sizes):
        raise ValueError(f"T and S must be multiples of the {count} devices along `context_axis`; got {sizes}.")
    whole = (sizes[0] * count, sizes[1] * count) if is_part else sizes
    heads = (q.shape[-2], k.shape[-2]) if is_part else partition.heads_of_device(q, k, axis)
    return whole, context_parallel.strategy(strategy, count, heads)


def _mod_indices(batch, heads):
    """What mods get as batch and head: arrays, which are cut over devices as the others are."""
    examples = jnp.arange(int(np.prod(batch, dtype=np.int64)), dtype=jnp.int32).reshape(batch)
    return {
        "mod_examples": examples,
        "mod_heads": jnp.arange(heads, dtype=jnp.int32).reshape(*(1,) * len(batch), heads),
    }


def _positions(q_positions, kv_positions, q_offset, spec, slopes, sizes):
    """Arrays of positions, None where absent, or where nothing of the call reads positions."""
    batch, T, S = sizes
    if q_positions is not None and q_offset is not None:
        raise ValueError("`q_positions` takes the place of `q_offset`; give one of the two.")
    q_at = validate.per_slot("q_positions", q_positions, batch, T, cut=_FAR)
    kv_at = validate.per_slot("kv_positions", kv_positions, batch, S, cut=_FAR)
    read = spec.causal or spec.window is not None or spec.chunk_size is not None or slopes is not None
    return (q_at, kv_at) if read else (None, None)


def _static(x, upper=None):
    """The value if it is static, clamped to [0, upper] where upper is given."""
    if x is None or isinstance(x, jax.Array):
        return None
    return x if upper is None else min(max(x, 0), upper)


def _dynamic(x, upper=None):
    if not isinstance(x, jax.Array):
        return None
    return x if upper is None else jnp.clip(x, 0, upper)


def _clip(x, low=-_FAR, high=_FAR):
    """x in [low, high]."""
    if x is None:
        return None
    return jnp.clip(x, low, high) if isinstance(x, jax.Array) else min(max(x, low), high)


def _bounded(offset, window, T, S):
    """The offset, cut where no query sees a key any more, or each sees all: further out nothing changes."""
    left, right = window or (None, None)
    return _clip(offset, -T - (right or 0), S + (left or 0))


def _scale_operand(scale, q):
    """A traced scale as an array with the batch's rank, so that under vmap each example can have its own."""
    if not isinstance(scale, jax.Array):
        return None
    dtype = np.promote_types(q.dtype, np.float32)
    return scale.astype(dtype).reshape((1,) * (q.ndim - 3))
