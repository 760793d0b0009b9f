"""Which entries dropout keeps: a pure function of the key, example, head, row and column, whatever the tiling (R13).

A counter-based generator: the user's key is folded with the number of (example, head) once, outside the tiles, into two
words. Inside, each row hashes the first word with its index and each column the second, and an entry is the product of
the two hashes, both odd, modulo 2^32: one instruction. Its leading bits, which decide, depend on all bits of both, and
of two rows they are as good as independent, but for the few in 2^32 pairs of rows whose hashes are small multiples of
one another. Nothing is stored, so a backward pass evaluates the same function again.
"""

import jax
import jax.numpy as jnp
import numpy as np


def head_words(key: jax.Array, batch: tuple[int, ...], heads: int) -> jax.Array:
    """uint32 [*batch, heads, 2]: the two words of each example and head, numbered in row-major order."""
    numbers = jnp.arange(int(np.prod(batch, dtype=np.int64)) * heads, dtype=jnp.uint32)
    words = jax.vmap(lambda n: jax.random.key_data(jax.random.fold_in(key, n)))(numbers)
    halves = words.astype(jnp.uint32).reshape(numbers.size, -1, 2)  # a key has two words, or four
    mixed = halves[:, 0] if halves.shape[1] == 1 else halves[:, 0] ^ _mix(halves[:, 1])
    return mixed.reshape(*batch, heads, 2)


def kept(row_word: jax.Array, col_word: jax.Array, rows: jax.Array, cols: jax.Array, rate: float) -> jax.Array:
    """bool, broadcast over all four: whether the entry at (row, col) stays, which it does with probability 1 - rate."""
    row, col = _odd(row_word ^ rows.astype(jnp.uint32)), _odd(col_word ^ cols.astype(jnp.uint32))
    return row * col >= np.uint32(min(round(rate * 2**32), 2**32 - 1))


def _odd(x: jax.Array) -> jax.Array:
    """An odd number that depends on all bits of x; the product of two is mixed well enough from two rounds."""
    x *= np.uint32(0x7FEB352D)
    x ^= x >> np.uint32(16)
    x *= np.uint32(0x846CA68B)
    return x | np.uint32(1)


def _mix(x: jax.Array) -> jax.Array:
    """A bijection of 32 bits in which each bit of the argument changes half of the result's ("lowbias32", C. Wellons).

    The constants are from https://nullprogram.com/blog/2018/07/31/ (public domain).
    """
    x ^= x >> np.uint32(16)
    x *= np.uint32(0x7FEB352D)
    x ^= x >> np.uint32(15)
    x *= np.uint32(0x846CA68B)
    return x ^ (x >> np.uint32(16))
