"""FlashAttention for Flax: `flash_jax.flax.linen` and `flash_jax.flax.nnx`, one for each of Flax's module systems.

Each has `attention_fn`, which plugs into Flax's own multi-head attention, and `SelfAttention`, a self-attention
module with grouped-query heads, rotary positions, a window and a key/value cache. They need the `flax` extra.
"""

try:
    import flax as _flax  # noqa: F401  (only to say what is missing)
except ModuleNotFoundError as error:
    if error.name != "flax":
        raise
    raise ModuleNotFoundError("`flash_jax.flax` needs Flax: pip install 'flash-jax[flax]'.", name="flax") from error

from flash_jax.flax import linen, nnx

__all__ = ["linen", "nnx"]
