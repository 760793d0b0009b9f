"""Which pairs of tiles have something to show, where positions are arrays or there are segment ids.

Each tile is summed up once by its least and greatest position and segment id; a pair is judged by these numbers alone.
The judgement errs on the safe side: a pair that it calls invisible shows nothing, one that it calls full needs no mask.
So ids may come in any order; what is sorted, or packed document by document, is also skipped well.
"""

import math
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax

from flash_jax.spec import AttentionSpec, Operands
from flash_jax.tiles.masks import Geometry, Int, TileRange, keys_of

Sizes: TypeAlias = tuple[int, int]  # of queries and keys

_MOST = 2**31 - 1
_PAIRS_AT_ONCE = 2**20  # pairs of tiles that are judged together


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
    return bool(_deciding(operands))


def _deciding(operands: Operands) -> list[jax.Array]:
    """The arrays for whose sake there is no closed form."""
    arrays = (operands.q_positions, operands.kv_positions, operands.q_segment_ids, operands.kv_segment_ids)
    return [x for x in arrays if x is not None]


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


def judge(q: Bounds, kv: Bounds, q_positions: bool, geometry: Geometry, spec: AttentionSpec) -> tuple[Any, Any]:
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


def judge_all(operands: Operands, spec: AttentionSpec, geometry: Geometry, sizes: Sizes, blocks: Sizes, only=None):
    """(visible, full), bools [..., query tiles, key tiles]: every pair of tiles of `blocks` slots; sizes are (T, S).

    The numbers of `geometry` and the arrays of `operands` have the same leading dims, each of full size or 1, and those
    of `geometry` two dims of 1 after them. `only` may be (side, numbers): of this side (0 or 1) these tiles alone.
    """

    def side(axis, positions, segments):
        numbers, block = jnp.arange(-(-sizes[axis] // blocks[axis]), dtype=jnp.int32), blocks[axis]
        found = summary(positions, segments, block)
        if only is not None and only[0] == axis:
            numbers = only[1]
            found = None if found is None else jnp.take(found, numbers, axis=-1)
        tiles, *fields = (jnp.expand_dims(x, -1 - axis) for x in (numbers, *_unstacked(found)))
        return bounds(tiles, block, fields, positions is not None, segments is not None)

    q = side(0, operands.q_positions, operands.q_segment_ids)
    kv = side(1, operands.kv_positions, operands.kv_segment_ids)
    return judge(q, kv, operands.q_positions is not None, geometry, spec)


def _unstacked(found: jax.Array | None) -> list[jax.Array]:
    """The fields of a summary."""
    return [] if found is None else [found[..., n, :] for n in range(found.shape[-2])]


def tile_ranges(
    operands: Operands, spec: AttentionSpec, geometry: Geometry, sizes: Sizes, blocks: Sizes, side: int
) -> jax.Array:
    """int32 [..., tiles, 4]: a `TileRange` of the other side for each query tile (side 0) or key tile (side 1).

    Arguments as in `judge_all`. Of many tiles, so many are judged at a time that memory stays linear in their number.
    """
    count = max(x.ndim - 1 for x in _deciding(operands))

    def found(numbers):
        only = None if numbers is None else (side, numbers)
        visible, full = map(jnp.asarray, judge_all(operands, spec, geometry, sizes, blocks, only))
        ranges = jnp.stack(hull(visible, full, axis=(-1, -2)[side]), axis=-1)
        # Positions that nothing is masked by have left no leading dims.
        return jnp.expand_dims(ranges, tuple(range(count + 2 - ranges.ndim)))

    own, other = (-(-sizes[n] // blocks[n]) for n in (side, 1 - side))
    *lead, _, _ = jax.eval_shape(found, None).shape
    at_once = max(1, _PAIRS_AT_ONCE // max(1, math.prod(lead) * other))
    if own <= at_once:
        return found(None)
    steps = -(-own // at_once)
    numbers = jnp.minimum(jnp.arange(steps * at_once, dtype=jnp.int32), own - 1).reshape(steps, at_once)
    parts = jnp.moveaxis(lax.map(found, numbers), 0, -3)  # [..., steps, at_once, 4]
    return parts.reshape(*lead, steps * at_once, 4)[..., :own, :]


def hull(visible: jax.Array, full: jax.Array, axis: int) -> TileRange:
    """The tiles to visit along an axis, the last or last but one; where full ones have others between them, all are
    visited as if partial.
    """
    tiles = jnp.expand_dims(jnp.arange(visible.shape[axis], dtype=jnp.int32), tuple(range(axis + 1, 0)))
    ends = [(jnp.where(seen, tiles, _MOST), jnp.where(seen, tiles + 1, 0)) for seen in (visible, full)]
    # One reduction, for which XLA makes one kernel.
    most, none = jnp.asarray(_MOST, jnp.int32), jnp.zeros((), jnp.int32)
    (start, stop), (first, end), count = lax.reduce(
        (*ends, full.astype(jnp.int32)), ((most, none), (most, none), none), _joined, (visible.ndim + axis,)
    )
    together = count == end - first
    return TileRange(jnp.minimum(start, stop), jnp.where(together, first, stop), jnp.where(together, end, stop), stop)


def _joined(a: tuple, b: tuple) -> tuple:
    """The ends of the visible tiles, those of the full ones, and how many these are, of two sets of tiles together."""
    ends = [(jnp.minimum(x[0], y[0]), jnp.maximum(x[1], y[1])) for x, y in zip(a[:2], b[:2], strict=True)]
    return (*ends, a[2] + b[2])
