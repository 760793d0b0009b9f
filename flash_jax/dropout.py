"""What dropout keeps, as an array: for tests, and for looking at it."""

import jax
import jax.numpy as jnp
import numpy as np

from flash_jax import validate
from flash_jax.tiles import dropout


def dropout_mask(dropout_key: jax.Array | None, dropout_rate: float, shape: tuple[int, ...]) -> jax.Array:
    """The entries that `flash_attention` keeps with this key and rate: bool [..., H, T, S], True = kept.

    A pure function of the key, the rate, the example (numbered in row-major order over the leading dims), the head, the
    row and the column: not of tile sizes, implementation, device count or whether the pass is forward or backward. What
    is kept is multiplied by 1 / (1 - dropout_rate). The array is quadratic; the implementations never form it.

    Args:
      dropout_key: a JAX key, `jax.random.key(0)` or the older `jax.random.PRNGKey(0)`. May be None where the rate is 0.
      dropout_rate: a number in [0, 1), the probability that an entry is dropped.
      shape: (..., H, T, S), at least three ints.

    Raises:
      TypeError: a key, rate or shape of the wrong kind.
      ValueError: a rate outside [0, 1) or without a key, a shape of fewer than three dims or with a negative one.

    Example:
      >>> import jax
      >>> from flash_jax import dropout_mask
      >>> kept = dropout_mask(jax.random.key(1), 0.25, (2, 8, 64, 64))
      >>> round(float(kept.mean()), 2)
      0.75
    """
    rate, key = validate.dropout(dropout_rate, dropout_key)
    if not isinstance(shape, (tuple, list)) or not all(isinstance(n, (int, np.integer)) for n in shape):
        raise TypeError(f"`shape` must be a tuple of ints (..., H, T, S); got {shape!r}.")
    if len(shape) < 3 or min(shape) < 0:
        raise ValueError(f"`shape` must be (..., H, T, S), at least three non-negative ints; got {shape!r}.")
    *batch, H, T, S = shape
    if key is None:
        return jnp.ones(shape, bool)
    words = dropout.head_words(key, tuple(batch), H)[..., None, None, :]
    rows, columns = jnp.arange(T)[:, None], jnp.arange(S)[None, :]
    return dropout.kept(words[..., 0], words[..., 1], rows, columns, rate)
