"""`flash_attention` as the modules call it: for the output alone, which the type says."""

from typing import Any, cast

import jax

from flash_jax import flash_attention


def attend(query: jax.Array, key: jax.Array, value: jax.Array, **options: Any) -> jax.Array:
    """The output [..., T, H, Dv] of `flash_jax.flash_attention` with these options, `return_lse` not among them."""
    return cast(jax.Array, flash_attention(query, key, value, **options))
