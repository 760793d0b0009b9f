"""`flash_attention` as the modules call it: for the output alone, with masks and dropout as Flax means them."""

from typing import Any, cast

import jax
import jax.numpy as jnp

from flash_jax import flash_attention


def attend(query: jax.Array, key: jax.Array, value: jax.Array, **options: Any) -> jax.Array:
    """The output [..., T, H, Dv] of `flash_jax.flash_attention` with these options, `return_lse` not among them."""
    return cast(jax.Array, flash_attention(query, key, value, **options))


def as_bool(mask: jax.Array | None) -> jax.Array | None:
    """A mask as `flash_attention` takes it. In Flax numbers are masks too, and 0 is what does not attend.

    `make_causal_mask`, `make_attention_mask` and `combine_masks` give float32.
    """
    dtype = getattr(mask, "dtype", None)
    if mask is not None and dtype is not None and jnp.issubdtype(dtype, jnp.number):
        return jnp.not_equal(mask, 0)
    return mask


def says_deterministic(of_module: bool | None, of_call: bool | None) -> bool:
    """What a module with dropout is told: by the call, else by itself; ValueError where neither says anything."""
    deterministic = of_module if of_call is None else of_call
    if deterministic is None:
        raise ValueError("a positive `dropout_rate` needs `deterministic`, of the module or of the call.")
    return deterministic


def dropout_options(dropout_rate: float, deterministic: bool, dropout_rng: jax.Array | None) -> dict[str, Any]:
    """The options for `attend`: none where no dropout is applied."""
    if deterministic or dropout_rate == 0:
        return {}
    if dropout_rng is None:
        raise ValueError(
            f"`dropout_rate` {dropout_rate} with deterministic=False needs a `dropout_rng`, such as jax.random.key(0)."
        )
    return {"dropout_rate": dropout_rate, "dropout_key": dropout_rng}
