"""The order of tokens in which devices that share a causal sequence have equal work."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike


def zigzag(x: ArrayLike, devices: int, axis: int = 0) -> jax.Array:
    """The tokens of `x`, so ordered that each of `devices` equal parts has as much to attend causally as any other.

    A causal query attends all tokens before it, so in the order of a text the last device has the most to do and the
    others wait for it. Here the text is cut into 2 * devices pieces, and device d gets number d and number d from the
    end (Brandon et al., "Striped attention", 2023; Zhu, "ring-flash-attention", 2024). A model is trained on inputs,
    targets and positions that all have been put in this order; attention gets the positions, and nothing else changes.

    Args:
      x: an array with tokens along `axis`, whose number 2 * devices divides.
      devices: along the mesh axis over which the sequence is sharded.
      axis: along which the tokens are.

    Returns:
      x with its tokens in that order, to be sharded in `devices` equal parts.

    Raises:
      ValueError: `devices` is not positive, or the number of tokens is not a multiple of 2 * devices.

    Example:
      >>> import jax.numpy as jnp
      >>> from flash_jax import unzigzag, zigzag
      >>> tokens = jnp.arange(8)
      >>> zigzag(tokens, devices=2)
      Array([0, 1, 6, 7, 2, 3, 4, 5], dtype=int32)
      >>> unzigzag(zigzag(tokens, devices=2), devices=2)
      Array([0, 1, 2, 3, 4, 5, 6, 7], dtype=int32)
    """
    return _in_order(x, axis, _pieces(devices))


def unzigzag(x: ArrayLike, devices: int, axis: int = 0) -> jax.Array:
    """The inverse of `zigzag`, with the same arguments, errors and shapes: tokens in the order of the text.

    Example:
      >>> import jax.numpy as jnp
      >>> unzigzag(jnp.array([0, 3, 1, 2]), devices=2)
      Array([0, 1, 2, 3], dtype=int32)
    """
    return _in_order(x, axis, np.argsort(_pieces(devices)))


def _pieces(devices: int) -> np.ndarray:
    """The pieces of the text in the order of the devices."""
    if isinstance(devices, bool) or not isinstance(devices, (int, np.integer)) or devices < 1:
        raise ValueError(f"`devices` must be a positive int; got {devices!r}.")
    return np.stack([np.arange(devices), 2 * devices - 1 - np.arange(devices)], axis=1).ravel()


def _in_order(x: ArrayLike, axis: int, pieces: np.ndarray) -> jax.Array:
    x = jnp.asarray(x)
    length = x.shape[axis]
    if length % len(pieces):
        raise ValueError(f"The number of tokens must be a multiple of 2 * devices = {len(pieces)}; got {length}.")
    cut = jnp.split(x, len(pieces), axis)
    return jnp.concatenate([cut[n] for n in pieces], axis)
