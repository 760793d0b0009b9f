"""Sums over the dims that an input shares."""

import jax


def sum_to(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """x summed over the dims that have size 1 in `shape`."""
    dims = tuple(d for d, (have, want) in enumerate(zip(x.shape, shape, strict=True)) if have != want)
    return x.sum(dims, keepdims=True) if dims else x
