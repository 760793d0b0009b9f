"""Which keys a query attends: inside one tile, and which tiles of a row or column have anything to show.

Forward, dq, dkv and tangent of every blockwise implementation ask here, so that they cannot disagree. What positions
decide (causal, window, prefix, chunk) is one interval of key positions for each query, `keys_of`, and one interval of
query positions for each key, `queries_of`; both move monotonically, so that those of a tile follow from its ends.

Where positions are indices, ranges of tiles follow in closed form (`kv_range`, `q_range`). Where they are arrays, or
there are segment ids, tiles/ranges.py judges pairs of tiles by their least and greatest positions and ids.

Numbers that are static stay Python ints throughout, and a loop whose bounds are ints and empty is never emitted.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax

from flash_jax.spec import AttentionSpec, Operands

Int: TypeAlias = int | jax.Array  # a Python int, or an int32 scalar or array

_FAR = 2**30  # beyond every position and length


@dataclasses.dataclass(frozen=True)
class Geometry:
    """Lengths, offset and prefix of one example (or, as arrays that broadcast against a tile, of several)."""

    q_length: Int
    kv_length: Int
    q_offset: Int
    q_size: int  # T and S, which the lengths do not exceed
    kv_size: int
    prefix: Int | None = None

    @classmethod
    def of(cls, spec: AttentionSpec, operands: Operands, q_size: int, kv_size: int) -> "Geometry":
        """The geometry that `spec` and `operands` (arrays, or scalars read from a kernel's refs) ask for."""
        q_length = _first(operands.q_lengths, spec.q_length, q_size)
        kv_length = _first(operands.kv_lengths, spec.kv_length, kv_size)
        q_offset = _first(operands.q_offset, spec.q_offset, kv_length - q_length)
        prefix = spec.prefix_length if operands.prefix_lengths is None else operands.prefix_lengths
        return cls(q_length, kv_length, q_offset, q_size, kv_size, prefix)

    def map(self, f: Callable) -> "Geometry":
        """The geometry with `f` applied to each number or array of an example."""
        return Geometry(
            f(self.q_length), f(self.kv_length), f(self.q_offset), self.q_size, self.kv_size, f(self.prefix)
        )

    def beside(self, dims: int) -> "Geometry":
        """The geometry whose arrays, of one number for each example, have so many dims of 1 more, to meet tiles."""
        return self.map(lambda x: x.reshape(*x.shape, *(1,) * dims) if isinstance(x, jax.Array) else x)

    @property
    def all_rows(self) -> bool:
        """Whether, as far as is known now, every row is before the query length."""
        return isinstance(self.q_length, int) and self.q_length == self.q_size

    @property
    def all_cols(self) -> bool:
        """Whether, as far as is known now, every key is before the key/value length."""
        return isinstance(self.kv_length, int) and self.kv_length == self.kv_size


def _first(*candidates):
    return next(x for x in candidates if x is not None)


class Slots(NamedTuple):
    """The queries, or the keys, of a tile: slot in the array, and position and segment id where these are arrays."""

    slot: jax.Array
    position: jax.Array | None = None
    segment: jax.Array | None = None

    def laid(self, f: Callable[[jax.Array], jax.Array]) -> "Slots":
        """The slots with each array reshaped by `f`, to lie along a dim of a tile."""
        position, segment = (x if x is None else f(x) for x in (self.position, self.segment))
        return Slots(f(self.slot), position, segment)

    def numbered(self, start: jax.Array | None) -> jax.Array:
        """Rows or columns as dropout and mods count them: over the whole call, of which this may be a part."""
        return self.slot if start is None else self.slot + start


class TileRange(NamedTuple):
    """Tiles [start, stop) have something to show; those in [full_start, full_stop) need no mask."""

    start: Int
    full_start: Int
    full_stop: Int
    stop: Int

    def all_partial(self) -> "TileRange":
        """The same tiles, each as if it needed a mask."""
        return TileRange(self.start, self.stop, self.stop, self.stop)


def allowed(rows: Slots, cols: Slots, geometry: Geometry, spec: AttentionSpec) -> jax.Array:
    """bool: whether query rows[...] attends key cols[...]; the two broadcast, as [block_q, 1] and [1, block_kv] do.

    What is known of a row or a column alone goes into what the two are compared by, so that an entry of the tile costs
    no more than these comparisons.
    """
    row_ok, col_ok = rows.slot < geometry.q_length, cols.slot < geometry.kv_length
    first, stop = keys_of(query_positions(rows, geometry), geometry, spec)
    at = cols.slot if cols.position is None else cols.position
    compared = []
    if rows.segment is not None and cols.segment is not None:
        compared.append(
            jnp.where(row_ok, rows.segment, -1) == jnp.where(col_ok, cols.segment, -2)  # negative: `validate.segments`
        )
    elif stop is not None:
        at, stop = jnp.where(col_ok, at, _FAR), jnp.where(row_ok, stop, -_FAR)
    elif first is not None:
        at, first = jnp.where(col_ok, at, -_FAR), jnp.where(row_ok, first, _FAR)
    else:
        return row_ok & col_ok
    if first is not None:
        compared.append(at >= first)
    if stop is not None:
        compared.append(at < stop)
    return functools.reduce(jnp.logical_and, compared)


def query_positions(rows: Slots, geometry: Geometry) -> jax.Array:
    """Where the queries stand; keys without an array of positions stand at their index."""
    return rows.slot + geometry.q_offset if rows.position is None else rows.position


def distance(rows: Slots, cols: Slots, geometry: Geometry) -> jax.Array:
    """|pos(i) - pos(j)| as float32, broadcast over both."""
    at = cols.slot if cols.position is None else cols.position
    return jnp.abs(query_positions(rows, geometry) - at).astype(jnp.float32)


def keys_of(position: Int, geometry: Geometry, spec: AttentionSpec) -> tuple[Int | None, Int | None]:
    """(first, stop): a query here attends the keys at positions first <= p < stop; None is unbounded."""
    left, right = spec.band if geometry.prefix is None else spec.window or (None, None)
    first = None if left is None else position - left
    stop = None if right is None else position + (right + 1)
    if spec.causal and geometry.prefix is not None:
        stop = _lesser(stop, _max(position + 1, geometry.prefix))
    if spec.chunk_size is not None:
        start = _chunk_start(position, spec.chunk_size)
        first, stop = _greater(first, start), _lesser(stop, start + spec.chunk_size)
    return first, stop


def queries_of(position: Int, geometry: Geometry, spec: AttentionSpec) -> tuple[Int | None, Int | None]:
    """(first, stop): a key here is attended by the queries at positions first <= p < stop; None is unbounded."""
    left, right = spec.band if geometry.prefix is None else spec.window or (None, None)
    first = None if right is None else position - right
    stop = None if left is None else position + (left + 1)
    if spec.causal and geometry.prefix is not None:
        first = _greater(first, _where(position < geometry.prefix, -_FAR, position))
    if spec.chunk_size is not None:
        start = _chunk_start(position, spec.chunk_size)
        first, stop = _greater(first, start), _lesser(stop, start + spec.chunk_size)
    return first, stop


def kv_range(row: Int, block_q: int, block_kv: int, geometry: Geometry, spec: AttentionSpec) -> TileRange:
    """The key/value tiles that the query tile starting at `row` attends, where positions are indices.

    A full tile is one that every row of the query tile that is not past the query length attends wholly: what a kernel
    computes in rows past it, it discards at the end.
    """
    last = _min(row + block_q, geometry.q_length) - 1
    first_key, stop_full = keys_of(row + geometry.q_offset, geometry, spec)
    first_full, stop_key = keys_of(last + geometry.q_offset, geometry, spec)
    first_key, first_full = (0 if x is None else _max(x, 0) for x in (first_key, first_full))
    stop_key, stop_full = (_lesser(x, geometry.kv_length) for x in (stop_key, stop_full))
    if not geometry.all_rows:
        stop_key = _if(last >= row, stop_key)
    return _tiles(first_key, stop_key, first_full, stop_full, block_kv)


def q_range(col: Int, block_q: int, block_kv: int, geometry: Geometry, spec: AttentionSpec) -> TileRange:
    """The query tiles that attend the key/value tile starting at `col`, where positions are indices.

    Full where every row attends every key of the tile that is not past the key/value length.
    """
    last = _min(col + block_kv, geometry.kv_length) - 1
    first_row, stop_full = queries_of(col, geometry, spec)
    first_full, stop_row = queries_of(last, geometry, spec)
    first_row, first_full = (0 if x is None else _max(x - geometry.q_offset, 0) for x in (first_row, first_full))
    stop_row, stop_full = (
        geometry.q_length if x is None else _min(x - geometry.q_offset, geometry.q_length)
        for x in (stop_row, stop_full)
    )
    if not geometry.all_cols:
        stop_row = _if(last >= col, stop_row)
    return _tiles(first_row, stop_row, first_full, stop_full, block_q)


def attended_cols(cols: jax.Array, row: Int, block_q: int, geometry: Geometry, spec: AttentionSpec) -> jax.Array:
    """bool like `cols`: whether any query of the tile starting at `row` attends the key; the others may hold NaN.

    Where positions are indices. (The rows' intervals of keys overlap or touch, so nothing lies between them.)
    """
    last = _min(row + block_q, geometry.q_length) - 1
    first, _ = keys_of(row + geometry.q_offset, geometry, spec)
    _, stop = keys_of(last + geometry.q_offset, geometry, spec)
    ok = cols < geometry.kv_length
    if first is not None:
        ok &= cols >= first
    if stop is not None:
        ok &= cols < stop
    return ok


def seen_cols(cols: jax.Array, geometry: Geometry, spec: AttentionSpec) -> jax.Array | None:
    """bool like `cols`: whether any query at all attends the key; None where each key is known to have one."""
    if geometry.all_cols and isinstance(geometry.q_length, int) and isinstance(geometry.q_offset, int):
        first, _ = keys_of(geometry.q_offset, geometry, spec)
        _, stop = keys_of(geometry.q_length - 1 + geometry.q_offset, geometry, spec)
        if _known(first, lambda x: x <= 0) and _known(stop, lambda x: x >= geometry.kv_size):
            return None
    return attended_cols(cols, 0, geometry.q_size, geometry, spec)


def attending_rows(rows: jax.Array, col: Int, block_kv: int, geometry: Geometry, spec: AttentionSpec) -> jax.Array:
    """bool like `rows`: whether the query attends any key of the tile starting at `col`; the others may hold NaN."""
    last = _min(col + block_kv, geometry.kv_length) - 1
    first, _ = queries_of(col, geometry, spec)
    _, stop = queries_of(last, geometry, spec)
    ok = rows < geometry.q_length
    if first is not None:
        ok &= rows >= first - geometry.q_offset
    if stop is not None:
        ok &= rows < stop - geometry.q_offset
    return ok


def _known(x: Int | None, condition) -> bool:
    """Whether a bound is absent, or an int of which the condition holds."""
    return x is None or isinstance(x, int) and condition(x)


def _tiles(start: Int, stop: Int, full_start: Int, full_stop: Int, block: int) -> TileRange:
    """From positions to tiles: partial tiles count towards the visible ones, only whole ones are full."""
    first, stop_tile = _floor_div(start, block), _floor_div(_max(stop, 0) + block - 1, block)
    end = _max(first, stop_tile)
    full_first = first
    if not (isinstance(full_start, int) and full_start == 0):  # 0: nothing is cut off before the first tile
        full_first = _min(_max(_floor_div(full_start + block - 1, block), first), end)
    full_end = _floor_div(_max(full_stop, 0), block)
    if isinstance(full_end, int) and isinstance(stop_tile, int) and full_end == stop_tile:  # none is cut off at the end
        return TileRange(first, full_first, end, end)
    full_end = _min(_max(full_end, full_first), end)
    return TileRange(first, full_first, full_end, end)


# Arithmetic that stays in Python where both sides are Python ints.


def _min(a: Int, b: Int) -> Int:
    return min(a, b) if isinstance(a, int) and isinstance(b, int) else jnp.minimum(a, b)


def _max(a: Int, b: Int) -> Int:
    return max(a, b) if isinstance(a, int) and isinstance(b, int) else jnp.maximum(a, b)


def _lesser(bound: Int | None, b: Int) -> Int:
    """The lesser of two upper bounds, of which the first may be absent."""
    return b if bound is None else _min(bound, b)


def _greater(bound: Int | None, b: Int) -> Int:
    """The greater of two lower bounds, of which the first may be absent."""
    return b if bound is None else _max(bound, b)


def _if(condition: bool | jax.Array, a: Int) -> Int:
    """a where the condition holds, else 0."""
    return a * condition if isinstance(condition, bool) else a * condition.astype(jnp.int32)


def _where(condition: bool | jax.Array, a: int, b: Int) -> Int:
    """a where the condition holds, else b."""
    if isinstance(condition, bool):
        return a if condition else b
    return jnp.where(condition, jnp.full(condition.shape, a, jnp.int32), b)


def _floor_div(a: Int, n: int) -> Int:
    """a // n for a >= 0 (where truncation is the floor, and one instruction)."""
    return a // n if isinstance(a, int) else lax.div(a, jnp.full_like(a, n))


def _chunk_start(position: Int, size: int) -> Int:
    """The first position of the chunk that holds `position`, which may be negative."""
    if isinstance(position, int):
        return position // size * size
    rest = lax.rem(position, jnp.full_like(position, size))  # has the sign of the position
    return position - rest - size * (rest < 0).astype(jnp.int32)
