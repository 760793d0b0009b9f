"""Which pairs of tiles have something to show, where positions are arrays or there are segment ids.

Each tile is summed up once by its least and greatest position and segment id; a pair is judged by these numbers alone.
The judgement errs on the safe side: a pair that it calls invisible shows nothing, one that it calls full needs no mask.
So ids may come in any order; what is sorted, or packed document by document, is also skipped well.
"""

from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp

from flash_jax.spec import AttentionSpec, Operands
from flash_jax.tiles.masks import Geometry, Int, TileRange, keys_of

Sizes: TypeAlias = tuple[int, int]  # of queries and keys

_MOST = 2**31 - 1


class Bounds(NamedTuple):
    """What is known of the slots of one tile, or, as arrays, of many. Padding ids (negative) count in no segment."""

    start: Int  # the first slot
    stop: Int  # one past the last, which may lie past the array's end
    low: Int  # least and greatest position; of queries without an array of positions, without the offset
    high: Int
    segment_low: Any = None  # least and greatest id, None without ids
    segment_high: Any = None
    segment: Any = None  # the id, where all slots have this one and none is padding; else negative


def is_scanned(operands: Operands) -> bool:
    """Whether pairs of tiles must be judged one by one, since no closed form says which are visible."""
    arrays = (operands.q_positions, operands.kv_positions, operands.q_segment_ids, operands.kv_segment_ids)
    return any(x is not None for x in arrays)


def summary(positions: jax.Array | None, segments: jax.Array | None, block: int) -> jax.Array | None:
    """int32 [..., fields, tiles]: low, high (with positions), segment_low, segment_high, segment (with ids) of tiles.

    positions, segments: [..., length], cut into tiles of `block` slots; what is missing of the last counts for nothing.
    """
    fields = []
    if positions is not None:
        fields += [_reduce(positions, block, jnp.min, _MOST), _reduce(positions, block, jnp.max, -_MOST)]
    if segments is not None:
        low = _reduce(jnp.where(segments < 0, _MOST, segments), block, jnp.min, _MOST)
        high = _reduce(segments, block, jnp.max, -1)
        padding = _reduce(segments, block, jnp.min, _MOST) < 0
        fields += [low, high, jnp.where((low == high) & ~padding, low, -1)]
    if not fields:
        return None
    lead = jnp.broadcast_shapes(*(x.shape for x in fields))
    return jnp.stack([jnp.broadcast_to(x, lead) for x in fields], axis=-2)


def _reduce(x: jax.Array, block: int, f, fill: int) -> jax.Array:
    """`f` over each tile of the last axis."""
    missing = -x.shape[-1] % block
    x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, missing)], constant_values=fill)
    return f(x.reshape(*x.shape[:-1], -1, block), axis=-1)


def bounds(tile: Int, block: int, fields, positions: bool, segments: bool) -> Bounds:
    """The bounds of tile number `tile` (or an array of numbers) from the `fields` of its `summary`, in their order."""
    index, fields = tile * block, list(fields)
    low, high = (fields.pop(0), fields.pop(0)) if positions else (index, index + block - 1)
    return Bounds(index, index + block, low, high, *(fields if segments else (None, None, None)))


def judge(q: Bounds, kv: Bounds, q_positions: bool, geometry: Geometry, spec: AttentionSpec):
    """(visible, full), bools: whether any query of `q` may attend a key of `kv`, and whether each attends all.

    `q_positions` is whether the queries' positions are an array, to which the offset does not apply.
    """
    visible = (q.start < geometry.q_length) & (kv.start < geometry.kv_length)
    full = (q.stop <= geometry.q_length) & (kv.stop <= geometry.kv_length)
    low, high = (q.low, q.high) if q_positions else (q.low + geometry.q_offset, q.high + geometry.q_offset)
    (first, stop_full), (first_full, stop) = keys_of(low, geometry, spec), keys_of(high, geometry, spec)
    if first is not None and first_full is not None:
        visible &= kv.high >= first
        full &= kv.low >= first_full
    if stop is not None and stop_full is not None:
        visible &= kv.low < stop
        full &= kv.high < stop_full
    if q.segment is not None:
        visible &= (q.segment_low <= kv.segment_high) & (kv.segment_low <= q.segment_high)
        full &= (q.segment == kv.segment) & (q.segment >= 0)
    return visible, full & visible


def judge_all(operands: Operands, spec: AttentionSpec, geometry: Geometry, sizes: Sizes, blocks: Sizes):
    """(visible, full), bools [..., query tiles, key tiles]: every pair of tiles of `blocks` slots; sizes are (T, S).

    The numbers of `geometry` and the arrays of `operands` have the same leading dims, each of full size or 1, and those
    of `geometry` two dims of 1 after them.
    """

    def side(axis, positions, segments):
        shape, block = ((-1, 1), (1, -1))[axis], blocks[axis]
        tiles = jnp.arange(-(-sizes[axis] // block), dtype=jnp.int32).reshape(shape)
        found = summary(positions, segments, block)
        fields = [] if found is None else [x.reshape(*x.shape[:-1], *shape) for x in jnp.moveaxis(found, -2, 0)]
        return bounds(tiles, block, fields, positions is not None, segments is not None)

    q = side(0, operands.q_positions, operands.q_segment_ids)
    kv = side(1, operands.kv_positions, operands.kv_segment_ids)
    return judge(q, kv, operands.q_positions is not None, geometry, spec)


def hull(visible: jax.Array, full: jax.Array) -> TileRange:
    """The tiles to visit of each row of [..., n]; where full ones have others between them, all as if partial."""
    tiles = jnp.arange(visible.shape[-1], dtype=jnp.int32)

    def ends(seen):
        first = jnp.min(jnp.where(seen, tiles, _MOST), axis=-1, initial=_MOST)
        return first, jnp.max(jnp.where(seen, tiles + 1, 0), axis=-1, initial=0)

    (start, stop), (first, end) = ends(visible), ends(full)
    together = full.sum(axis=-1, dtype=jnp.int32) == end - first
    return TileRange(jnp.minimum(start, stop), jnp.where(together, first, stop), jnp.where(together, end, stop), stop)
