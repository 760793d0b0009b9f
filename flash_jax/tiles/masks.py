"""Which keys a query attends: inside one tile, and which tiles of a row or column have anything to show.

Forward, dq, dkv and tangent of every blockwise implementation ask here, so that they cannot disagree. Numbers that are
static stay Python ints throughout, and a loop whose bounds are ints and empty is never emitted.
"""

import dataclasses
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax

from flash_jax.spec import AttentionSpec, Operands

Int: TypeAlias = int | jax.Array  # a Python int, or an int32 scalar or array


@dataclasses.dataclass(frozen=True)
class Geometry:
    """Lengths and offset of one example (or, as arrays that broadcast against a tile, of several)."""

    q_length: Int
    kv_length: Int
    q_offset: Int
    q_size: int  # T and S, which the lengths do not exceed
    kv_size: int

    @classmethod
    def of(cls, spec: AttentionSpec, operands: Operands, q_size: int, kv_size: int) -> "Geometry":
        """The geometry that `spec` and `operands` (arrays, or scalars read from a kernel's refs) ask for."""
        q_length = _first(operands.q_lengths, spec.q_length, q_size)
        kv_length = _first(operands.kv_lengths, spec.kv_length, kv_size)
        q_offset = _first(operands.q_offset, spec.q_offset, kv_length - q_length)
        return cls(q_length, kv_length, q_offset, q_size, kv_size)

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


class TileRange(NamedTuple):
    """Tiles [start, stop) have something to show; those in [full_start, full_stop) need no mask."""

    start: Int
    full_start: Int
    full_stop: Int
    stop: Int


def allowed(rows: jax.Array, cols: jax.Array, geometry: Geometry, spec: AttentionSpec) -> jax.Array:
    """bool: whether query rows[...] attends key cols[...]; the two broadcast, as [block_q, 1] and [1, block_kv] do."""
    left, right = spec.band
    ok = (rows < geometry.q_length) & (cols < geometry.kv_length)
    position = rows + geometry.q_offset
    if left is not None:
        ok &= cols >= position - left
    if right is not None:
        ok &= cols <= position + right
    return ok


def kv_range(row: Int, block_q: int, block_kv: int, geometry: Geometry, spec: AttentionSpec) -> TileRange:
    """The key/value tiles that the query tile starting at `row` attends.

    A full tile is one that every row of the query tile that is not past the query length attends wholly: what a kernel
    computes in rows past it, it discards at the end.
    """
    left, right = spec.band
    last = _min(row + block_q, geometry.q_length) - 1
    first_key, stop_key, first_full, stop_full = 0, geometry.kv_length, 0, geometry.kv_length
    if left is not None:
        first_key = _max(row + geometry.q_offset - left, 0)
        first_full = _max(last + geometry.q_offset - left, 0)
    if right is not None:
        stop_key = _min(last + geometry.q_offset + right + 1, stop_key)
        stop_full = _min(row + geometry.q_offset + right + 1, stop_full)
    if not geometry.all_rows:
        stop_key = _if(last >= row, stop_key)
    return _tiles(first_key, stop_key, first_full, stop_full, block_kv)


def q_range(col: Int, block_q: int, block_kv: int, geometry: Geometry, spec: AttentionSpec) -> TileRange:
    """The query tiles that attend the key/value tile starting at `col`.

    Full where every row attends every key of the tile that is not past the key/value length.
    """
    left, right = spec.band
    last = _min(col + block_kv, geometry.kv_length) - 1
    first_row, stop_row, first_full, stop_full = 0, geometry.q_length, 0, geometry.q_length
    if right is not None:
        first_row = _max(col - geometry.q_offset - right, 0)
        first_full = _max(last - geometry.q_offset - right, 0)
    if left is not None:
        stop_row = _min(last - geometry.q_offset + left + 1, stop_row)
        stop_full = _min(col - geometry.q_offset + left + 1, stop_full)
    if not geometry.all_cols:
        stop_row = _if(last >= col, stop_row)
    return _tiles(first_row, stop_row, first_full, stop_full, block_q)


def attended_cols(cols: jax.Array, row: Int, block_q: int, geometry: Geometry, spec: AttentionSpec) -> jax.Array:
    """bool like `cols`: whether any query of the tile starting at `row` attends the key; the others may hold NaN."""
    left, right = spec.band
    last = _min(row + block_q, geometry.q_length) - 1
    ok = cols < geometry.kv_length
    if left is not None:
        ok &= cols >= row + geometry.q_offset - left
    if right is not None:
        ok &= cols <= last + geometry.q_offset + right
    return ok


def seen_cols(cols: jax.Array, geometry: Geometry, spec: AttentionSpec) -> jax.Array | None:
    """bool like `cols`: whether any query at all attends the key; None where each key is known to have one."""
    if geometry.all_cols and isinstance(geometry.q_length, int) and isinstance(geometry.q_offset, int):
        left, right = spec.band
        first = left is None or geometry.q_offset <= left
        last = right is None or geometry.q_length + geometry.q_offset + right >= geometry.kv_size
        if first and last:
            return None
    return attended_cols(cols, 0, geometry.q_size, geometry, spec)


def attending_rows(rows: jax.Array, col: Int, block_kv: int, geometry: Geometry, spec: AttentionSpec) -> jax.Array:
    """bool like `rows`: whether the query attends any key of the tile starting at `col`; the others may hold NaN."""
    left, right = spec.band
    last = _min(col + block_kv, geometry.kv_length) - 1
    ok = rows < geometry.q_length
    if right is not None:
        ok &= rows >= col - geometry.q_offset - right
    if left is not None:
        ok &= rows <= last - geometry.q_offset + left
    return ok


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


def _if(condition: bool | jax.Array, a: Int) -> Int:
    """a where the condition holds, else 0."""
    return a * condition if isinstance(condition, bool) else a * condition.astype(jnp.int32)


def _floor_div(a: Int, n: int) -> Int:
    """a // n for a >= 0 (where truncation is the floor, and one instruction)."""
    return a // n if isinstance(a, int) else lax.div(a, jnp.full_like(a, n))
