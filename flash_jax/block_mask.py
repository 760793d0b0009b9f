"""`block_mask`: which blocks of scores a `mask_mod` leaves visible, found once and kept by the user."""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from flash_jax import mods
from flash_jax.spec import MAP_BLOCK, BlockMask, Mod
from flash_jax.tiles import mods as tile_mods


def block_mask(mask_mod: Callable, shape: Sequence[int], mod_operands: Sequence[ArrayLike] = ()) -> BlockMask:
    """The map of a `mask_mod`, so that `flash_attention(block_mask=...)` skips blocks in which nothing is allowed.

    Without a map every tile is visited and evaluates the `mask_mod`; with it, those that are allowed as a whole need no
    mask either. Make it once for each set of lengths and operands, and keep it: each entry of [T, S] is evaluated, a
    strip of 128 rows at a time, in memory O(S).

    Args:
      mask_mod: `mask_mod(batch, head, q_index, k_index, *operands)`, True where attention is allowed; see
        `flash_attention`.
      shape: of the scores, [..., H, T, S]. A dim before T that is 1 or left out makes one map for all examples or
        heads: right where the mask_mod does not look at that index.
      mod_operands: what the mask_mod reads, as given to `flash_attention`.

    Returns:
      A `BlockMask`, a pytree of one int8 array [..., H, ceil(T / 128), ceil(S / 128)]. It must be made anew when what
      the mask_mod reads changes.

    Raises:
      TypeError, ValueError, NotImplementedError: as `flash_attention` about mask_mod and mod_operands; for a `shape`
        that is no tuple of at least two positive ints.

    Example:
      >>> import jax.numpy as jnp
      >>> from flash_jax import block_mask, flash_attention
      >>> def every_other(b, h, i, j):
      ...     return (i // 128 - j // 128) % 2 == 0
      >>> found = block_mask(every_other, (512, 512))
      >>> found.states[0]
      Array([[2, 0, 2, 0],
             [0, 2, 0, 2],
             [2, 0, 2, 0],
             [0, 2, 0, 2]], dtype=int8)
      >>> x = jnp.ones((1, 512, 4, 64))
      >>> flash_attention(x, x, x, block_mask=found).shape
      (1, 512, 4, 64)
    """
    if not isinstance(shape, (tuple, list)) or len(shape) < 2 or not all(_is_positive(n) for n in shape):
        raise ValueError(f"`shape` must be [..., H, T, S] of at least two positive ints; got {shape!r}.")
    full = tuple(int(n) for n in ((1, *shape) if len(shape) == 2 else shape))
    batch, (heads, T, S) = full[:-3], full[-3:]
    given = mods.operands(mod_operands, len(batch), True)
    mod = mods.mask_mod(mask_mod, given, batch, heads)
    if mod is None:
        raise TypeError("`mask_mod` must be a function; got None.")
    tables = [x.reshape(x.shape[len(batch) :]) for x in given]

    @jax.jit
    def strips(tables):
        count = int(np.prod(batch, dtype=np.int64))
        starts = _arange(-(-T // MAP_BLOCK)) * MAP_BLOCK
        index = [x.ravel() for x in jnp.meshgrid(_arange(count), _arange(heads), starts, indexing="ij")]
        return jax.lax.map(lambda at: _strip(mod, at, (T, S), tables), tuple(index))

    states = strips(tables)
    return BlockMask(states.reshape(*batch, heads, -(-T // MAP_BLOCK), states.shape[-1]), mask_mod, full)


def _strip(mod: Mod, at: tuple, lengths: tuple[int, int], tables: list) -> jax.Array:
    """int8 [blocks of keys]: the states of the blocks in one strip of rows, at (example, head, first row)."""

    def read(operand, index):
        x = tables[operand]
        return x[tuple(jnp.clip(i, 0, n - 1) for i, n in zip(index, x.shape, strict=True))]

    b, h, row = at
    (T, S), blocks = lengths, -(-lengths[1] // MAP_BLOCK)
    i = row + jnp.arange(MAP_BLOCK, dtype=jnp.int32)[:, None]
    j = jnp.arange(blocks * MAP_BLOCK, dtype=jnp.int32)[None, :]
    allowed = jnp.broadcast_to(tile_mods.evaluate(mod, [b, h, i, j], read), (MAP_BLOCK, j.size))
    inside = (i < T) & (j < S)
    cut = lambda x: x.reshape(MAP_BLOCK, blocks, MAP_BLOCK)  # noqa: E731
    some, all_ = cut(allowed & inside).any((0, 2)), cut(allowed | ~inside).all((0, 2))
    return (some.astype(jnp.int8) + (some & all_).astype(jnp.int8)).astype(jnp.int8)


def _arange(n: int) -> jax.Array:
    return jnp.arange(n, dtype=jnp.int32)


def _is_positive(n) -> bool:
    return isinstance(n, (int, np.integer)) and not isinstance(n, bool) and bool(n > 0)
