"""The key/value cache of a decoder: a buffer of fixed length and how much of it is filled."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import Tracer

from flash_jax.flax.attend import attend


class Cache(NamedTuple):
    """Keys and values of the tokens so far.

    key [..., max_length, K, D] and value [..., max_length, K, D] hold `filled` tokens; what lies beyond is never read.
    filled is an int32 scalar, the same for the whole batch.
    """

    key: jax.Array
    value: jax.Array
    filled: jax.Array


def require_room(index: jax.Array, chunk: int, max_length: int) -> None:
    """ValueError where it is known now that `chunk` more tokens do not fit; a traced index is not known."""
    filled = 0 if isinstance(index, Tracer) else int(index)
    if filled + chunk > max_length:
        raise ValueError(
            f"the key/value cache holds {max_length} tokens; got {chunk} more on top of {filled}. "
            "Make the cache longer, or empty it (set `cache_index` to 0)."
        )


def extend(cache: Cache, key: jax.Array, value: jax.Array) -> Cache:
    """The cache with key and value [..., n, K, D] written behind what it holds.

    Where they do not fit nothing is written. The count advances all the same, so that the overflow can be seen.
    """
    if key.shape[:-3] != cache.key.shape[:-3]:
        raise ValueError(
            f"the input's batch shape must be the key/value cache's, {cache.key.shape[:-3]}; got {key.shape[:-3]}."
        )
    chunk, max_length = key.shape[-3], cache.key.shape[-3]
    require_room(cache.filled, chunk, max_length)
    fits = cache.filled + chunk <= max_length

    def write(buffer, new):
        old = lax.dynamic_slice_in_dim(buffer, cache.filled, chunk, axis=buffer.ndim - 3)
        new = jnp.where(fits, new.astype(buffer.dtype), old)
        return lax.dynamic_update_slice_in_dim(buffer, new, cache.filled, axis=buffer.ndim - 3)

    return Cache(write(cache.key, key), write(cache.value, value), cache.filled + chunk)


def attend_cache(query: jax.Array, cache: Cache, **options) -> jax.Array:
    """Causal attention of the newest tokens, query [..., n, H, D], to everything the cache holds.

    Beyond the filled length nothing is attended, whatever it contains. Where the cache has overflowed the result is
    NaN: under `jit` no error can be raised, and a plausible wrong answer would be worse.
    """
    chunk, max_length = query.shape[-3], cache.key.shape[-3]
    key, value = cache.key.astype(query.dtype), cache.value.astype(query.dtype)
    offset = cache.filled - chunk  # the position of the chunk's first token
    out = attend(query, key, value, causal=True, q_offset=offset, kv_lengths=cache.filled, **options)
    return jnp.where(cache.filled <= max_length, out, jnp.nan)
