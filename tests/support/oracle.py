"""The reference, called directly: no public function, no primitive, no validation in between."""

import jax
import jax.numpy as jnp
import numpy as np

from flash_jax import reference
from flash_jax.spec import AttentionSpec, Mod, Operands
from flash_jax.tiles import dropout


def reference_attention(query, key, value, bias=None, mask=None, *, return_lse=False, **options):
    """`flash_jax.reference.attention` under the keywords of `flash_attention`, every one that has a meaning there."""
    batch, (T, H, D), S = query.shape[:-3], query.shape[-3:], key.shape[-3]
    rank, exact = len(batch), np.promote_types(query.dtype, np.float32)
    take = options.pop
    scale, scales = _static_or_array(take("scale", None), rank, exact)
    q_offset, offsets = _static_or_array(take("q_offset", None), rank, jnp.int32)
    q_length, q_lengths = _clamped(take("q_lengths", None), rank, T)
    kv_length, kv_lengths = _clamped(take("kv_lengths", None), rank, S)
    prefix, prefixes = _static_or_array(take("prefix_lengths", None), rank, jnp.int32)
    ids = take("segment_ids", None)
    dropout_rate, dropout_key = take("dropout_rate", 0.0), take("dropout_key", None)
    score_mod, mask_mod = (take(name, None) for name in ("score_mod", "mask_mod"))
    take("block_mask", None)  # only skips; a test that gives one gives the mask_mod, too
    operands = Operands(
        scale=scales,
        bias=_of_rank(bias, rank + 3),
        mask=_of_rank(mask, rank + 3),
        alibi_slopes=_of_rank(take("alibi_slopes", None), rank + 1, exact),
        sinks=_of_rank(take("sinks", None), rank + 1, exact),
        q_offset=offsets,
        q_lengths=q_lengths,
        kv_lengths=kv_lengths,
        prefix_lengths=prefixes,
        q_positions=_of_rank(take("q_positions", None), rank + 1, jnp.int32),
        kv_positions=_of_rank(take("kv_positions", None), rank + 1, jnp.int32),
        q_segment_ids=_of_rank(take("q_segment_ids", ids), rank + 1, jnp.int32),
        kv_segment_ids=_of_rank(take("kv_segment_ids", ids), rank + 1, jnp.int32),
        dropout_words=dropout.head_words(typed(dropout_key), batch, H) if dropout_rate else None,
        mods=tuple(_of_rank(_at_least(x, query.dtype), rank + np.ndim(x)) for x in take("mod_operands", ())),
    )
    spec = AttentionSpec(
        scale=D**-0.5 if scale is None and scales is None else scale,
        softcap=take("softcap", None),
        score_mod=None if score_mod is None else Mod(score_mod, None, batch, query.shape[-2]),
        mask_mod=None if mask_mod is None else Mod(mask_mod, None, batch, query.shape[-2]),
        causal=take("causal", False),
        window=take("window", None),
        prefix_length=prefix,
        chunk_size=take("chunk_size", None),
        dropout_rate=dropout_rate,
        q_offset=q_offset,
        q_length=q_length,
        kv_length=kv_length,
        implementation="reference",
    )
    if options:
        raise TypeError(f"the reference knows no {sorted(options)}")
    out, lse = reference.attention(query, key, value, operands, spec)
    return (out, lse) if return_lse else out


def typed(key):
    """A JAX key, of one or of its raw words."""
    return key if jnp.issubdtype(key.dtype, jax.dtypes.prng_key) else jax.random.wrap_key_data(jnp.asarray(key))


def _of_rank(x, rank, dtype=None):
    """`x` with size-1 dims on the left, in `dtype` where one is given; None as it is."""
    if x is None:
        return None
    x = jnp.asarray(x) if dtype is None else jnp.asarray(x).astype(dtype)
    return jnp.reshape(x, (1,) * (rank - x.ndim) + x.shape)


def _at_least(x, dtype):
    """Floating-point numbers in float64 beside float64; anything else unchanged."""
    wide = dtype == jnp.float64 and jnp.issubdtype(jnp.result_type(x), jnp.floating)
    return jnp.asarray(x).astype(dtype) if wide else x


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
    return None, _of_rank(x, rank, dtype)
