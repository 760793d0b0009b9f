"""Which pairs of tiles have something to show, where positions are arrays or there are segment ids.

Each tile is summed up once by its least and greatest position and segment id; a pair is judged by these numbers alone.
The judgement errs on the safe side: a pair that it calls invisible shows nothing, one that it calls full needs no mask.
So ids may come in any order; what is sorted, or packed document by document, is also skipped well.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from flash_jax.spec import AttentionSpec, Operands
from flash_jax.tiles.masks import Geometry, Int, TileRange, keys_of

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


class Found(NamedTuple):
    """What a scan over tiles has found: visible ones in [start, stop), and in [first, last] `full` full ones."""

    start: jax.Array
    stop: jax.Array
    first: jax.Array
    last: jax.Array
    full: jax.Array

    @classmethod
    def nothing(cls) -> "Found":
        """Before the scan."""
        most, zero = jnp.asarray(_MOST, jnp.int32), jnp.zeros((), jnp.int32)
        return cls(most, zero, most, zero, zero)

    def add(self, tiles: jax.Array, visible: jax.Array, full: jax.Array) -> "Found":
        """With what is judged of `tiles`, a vector of their numbers."""
        return Found(
            jnp.minimum(self.start, jnp.where(visible, tiles, _MOST).min()),
            jnp.maximum(self.stop, jnp.where(visible, tiles + 1, 0).max()),
            jnp.minimum(self.first, jnp.where(full, tiles, _MOST).min()),
            jnp.maximum(self.last, jnp.where(full, tiles, 0).max()),
            self.full + full.astype(jnp.int32).sum(dtype=jnp.int32),  # else, under jax_enable_x64, of 64 bits
        )

    def range(self) -> TileRange:
        """The tiles to visit; where the full ones have others between them, all are visited as if partial."""
        start = jnp.minimum(self.start, self.stop)
        together = self.full == self.last - self.first + 1
        return TileRange(
            start, jnp.where(together, self.first, self.stop), jnp.where(together, self.last + 1, self.stop), self.stop
        )
