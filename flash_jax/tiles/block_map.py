"""A block map at the tiles of a kernel, together with what else decides which pairs of tiles are visible.

The map (`block_mask`) says of blocks of 128 x 128 whether a mask_mod allows nothing, something or everything in them.
Tiles may be smaller or larger. What positions, segments and lengths say is joined to it here, outside the kernels, so
that these read one list: which tiles to visit with a mask, and which without.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from flash_jax.spec import MAP_BLOCK, AttentionSpec, Operands
from flash_jax.tiles import masks, ranges
from flash_jax.tiles.masks import Geometry, Int
from flash_jax.tiles.ranges import Sizes

SKIPPED, PARTIAL, FULL = 0, 1, 2


class TileList(NamedTuple):
    """Tiles to visit, in any order: those of `tile(n)` for n < full need no mask, those up to `stop` do."""

    tile: Callable[[Int], Int]  # n -> the number of a tile
    full: Int
    stop: Int

    def all_partial(self) -> "TileList":
        """The same tiles, none of them without a mask."""
        return self._replace(full=jnp.zeros_like(self.full))


def states(operands: Operands, spec: AttentionSpec, sizes: Sizes, blocks: Sizes) -> jax.Array:
    """int8 [..., H or 1, query tiles, key tiles]: SKIPPED, PARTIAL or FULL for tiles of `blocks`; sizes are (T, S)."""
    found = operands.block_map
    for axis, (size, block) in enumerate(zip(sizes, blocks, strict=True)):
        found = _at_tiles(found, found.ndim - 2 + axis, size, block)
    geometry = Geometry.of(spec, operands, *sizes).beside(2)
    heads = lambda x: x if x.ndim < 3 else x[..., None, :, :]  # noqa: E731  (of those without leading dims, none)
    visible, full = map(heads, _judged(operands, spec, geometry, sizes, blocks))
    if operands.mask is not None:
        full = jnp.zeros_like(full)
    return jnp.where(visible, jnp.where(full, found, jnp.minimum(found, PARTIAL)), SKIPPED)


def _at_tiles(found: jax.Array, axis: int, size: int, block: int) -> jax.Array:
    """States of blocks along `axis`, as those of tiles of `block` slots: of several blocks the common state."""
    first = np.arange(0, size, block)
    last = np.minimum(first + block, size) - 1
    parts = []
    for n in range(int(((last // MAP_BLOCK) - (first // MAP_BLOCK)).max()) + 1):
        parts.append(jnp.take(found, np.minimum(first // MAP_BLOCK + n, last // MAP_BLOCK), axis=axis))
    low, high = parts[0], parts[0]
    for part in parts[1:]:
        low, high = jnp.minimum(low, part), jnp.maximum(high, part)
    return jnp.where(low == high, low, jnp.asarray(PARTIAL, found.dtype))


def _judged(operands: Operands, spec: AttentionSpec, geometry: Geometry, sizes: Sizes, blocks: Sizes):
    """(visible, full), bools [..., query tiles, key tiles], by positions, segments and lengths."""
    if ranges.is_scanned(operands):
        return ranges.judge_all(operands, spec, geometry, sizes, blocks)
    counts = [-(-size // block) for size, block in zip(sizes, blocks, strict=True)]
    i, j = jnp.arange(counts[0], dtype=jnp.int32)[:, None], jnp.arange(counts[1], dtype=jnp.int32)[None, :]
    seen = masks.kv_range(i * blocks[0], blocks[0], blocks[1], geometry, spec)
    # Rows past the query length get no gradient, so a full tile must end before it.
    inside = (i + 1) * blocks[0] <= geometry.q_length
    return (seen.start <= j) & (j < seen.stop), (seen.full_start <= j) & (j < seen.full_stop) & inside


def lists(found: jax.Array) -> jax.Array:
    """int32 [..., n, m + 2] of states [..., n, m]: how many are full, how many visible, then the tiles, full first."""
    order = jnp.argsort(-found, axis=-1, stable=True).astype(jnp.int32)
    counts = [(found == FULL).sum(-1, dtype=jnp.int32), (found != SKIPPED).sum(-1, dtype=jnp.int32)]
    return jnp.concatenate([jnp.stack(counts, -1), order], axis=-1)
