"""The attention weights, for Flax's `sow_weights`: the one thing that no kernel ever holds."""

import warnings
from typing import Any

import jax
import jax.numpy as jnp

from flash_jax.flax.attend import attend


def attention_weights(query: jax.Array, key: jax.Array, **options: Any) -> jax.Array:
    """The probabilities [..., H, T, S] of attention with these options, before dropout, in query's dtype; quadratic.

    They are the output where the values are the unit vectors. A row that attends nothing has weights 0.
    """
    warnings.warn(
        "sow_weights=True computes the attention weights by the reference implementation, in memory quadratic in the "
        "length; the output is computed as without it.",
        stacklevel=4,
    )
    *batch, S, K, _ = key.shape
    units = jnp.broadcast_to(jnp.eye(S, dtype=query.dtype)[:, None, :], (*batch, S, K, S))
    return jnp.moveaxis(attend(query, key, units, implementation="reference", **options), -3, -2)
