"""Flax's `broadcast_dropout`: one dropout mask [T, S] that every example and head shares.

What `flash_attention` drops depends on example and head, and under `jax.vmap` each mapped example sees what it would
see alone. So attention of a single head, mapped over batch dims and heads, drops the same everywhere.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from flash_jax.flax.attend import attend


def attend_alike(
    query: jax.Array, key: jax.Array, value: jax.Array, bias: jax.Array | None, mask: jax.Array | None, **options: Any
) -> jax.Array:
    """As `attend`, but dropping in every example and head what is dropped in the first."""
    # Whatever is wrong with the arguments is said here, of the arguments as they are.
    jax.eval_shape(functools.partial(attend, **options), query, key, value, bias=bias, mask=mask)
    H, K = query.shape[-2], key.shape[-2]

    def one_head(query, key, value, bias, mask):  # [T, D], [S, D], [S, Dv]
        heads = (x[:, None, :] for x in (query, key, value))
        return attend(*heads, bias=bias, mask=mask, **options)[:, 0, :]

    rank = query.ndim - 3
    run = one_head
    for _ in range(rank + 2):  # the batch dims, key/value heads, and the query heads of each
        run = _over_first_dim(run)
    out = run(
        _heads_first(query, K, H // K),
        _heads_first(key, K, 1),
        _heads_first(value, K, 1),
        _heads_apart(bias, rank, K, H // K),
        _heads_apart(mask, rank, K, H // K),
    )  # [..., K, H // K, T, Dv]
    return jnp.moveaxis(out.reshape(*out.shape[:-4], H, *out.shape[-2:]), -3, -2)


def _over_first_dim(function: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """`function` over the first dim of its arguments; one of size 1 serves all, and is not mapped."""

    def mapped(*arrays):
        axes = [None if x is None or x.shape[0] == 1 else 0 for x in arrays]
        arrays = [x if x is None or axis == 0 else x[0] for x, axis in zip(arrays, axes, strict=True)]
        if axes.count(None) == len(axes):
            return function(*arrays)[None]
        return jax.vmap(function, in_axes=axes)(*arrays)

    return mapped


def _heads_first(x: jax.Array, K: int, groups: int) -> jax.Array:
    """[..., length, K * groups, D] as [..., K, groups, length, D]."""
    x = jnp.moveaxis(x, -2, -3)
    return x.reshape(*x.shape[:-3], K, groups, *x.shape[-2:])


def _heads_apart(x: jax.Array | None, rank: int, K: int, groups: int) -> jax.Array | None:
    """A bias or mask that broadcasts to [..., H, T, S], as [..., K or 1, groups or 1, T or 1, S or 1] of full rank."""
    if x is None:
        return None
    x = jnp.reshape(x, (1,) * (rank + 3 - x.ndim) + x.shape)
    heads = (K, groups) if x.shape[-3] == K * groups else (1, 1)
    return x.reshape(*x.shape[:-3], *heads, *x.shape[-2:])
