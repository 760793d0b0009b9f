"""Tiles of which each row is a head's vector: cut along the head dim, loaded, multiplied and stored piece by piece.

Triton's arrays have power-of-two sizes. A head dim between two powers is covered by two pieces where that leaves less
to pad: 96 by 64 + 32, 80 too, 192 by 128 + 64. Pieces also bound how many products a tensor core adds up: it cuts off
the low bits of each partial sum, which shows in float32, so there pieces are of 32 or 64 columns, and
their products are added by ordinary instructions.

A tile is a tuple of arrays [rows, piece], `Columns` below, whatever the number of pieces.
"""

import functools
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from flash_jax.spec import AttentionSpec
from flash_jax.triton.tiling import padded

Columns: TypeAlias = tuple[jax.Array, ...]

_PRECISION = {
    "ieee": lax.Precision.HIGHEST,
    "x3": lax.DotAlgorithmPreset.TF32_TF32_F32_X3,
    "tf32": lax.DotAlgorithmPreset.TF32_TF32_F32,
}


class Piece(NamedTuple):
    """Columns [start, start + size), of which the first `valid` exist."""

    start: int
    size: int
    valid: int


@functools.cache
def pieces(head_dim: int, itemsize: int) -> tuple[Piece, ...]:
    """The pieces that cover a head dim of elements of `itemsize` bytes."""
    whole = padded(head_dim)
    if itemsize == 4:
        most = 32 if head_dim <= 64 else 64  # smaller ones are more exact, but many of them spill registers
        sizes = [min(whole, most)] * -(-head_dim // most)
    elif whole > 32 and head_dim <= whole * 3 // 4:
        sizes = [whole // 2, whole // 4]
    else:
        sizes = [whole]
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    return tuple(Piece(start, size, min(size, head_dim - start)) for start, size in zip(starts, sizes, strict=True))


def width(head_dim: int, itemsize: int) -> int:
    """Columns of a head dim and its padding."""
    return sum(piece.size for piece in pieces(head_dim, itemsize))


def load(ref: Any, rows: tuple, keep: jax.Array | None, head_dim: int) -> Columns:
    """The tile at `rows` (indices of all dims of the ref but the last), 0 in rows where `keep` [n] is False.

    What is not kept, and columns from the head dim on, are not read: they may lie outside the array, or hold NaN.
    """
    tile = []
    for piece in pieces(head_dim, ref.dtype.itemsize):
        part = ref.at[(*rows, pl.ds(piece.start, piece.size))]
        mask = _mask(part.shape, keep, piece)
        tile.append(part[...] if mask is None else plgpu.load(part, mask=mask, other=0))
    return tuple(tile)


def store(ref: Any, x: Columns, keep: jax.Array | None, head_dim: int) -> None:
    """Writes a tile to a ref [rows, columns], where `keep` [rows] is True, in the ref's dtype.

    The tile is cut as the inputs are, whose dtype may be another.
    """
    start = 0
    for part in x:
        piece = Piece(start, part.shape[1], min(part.shape[1], head_dim - start))
        target = ref.at[:, pl.ds(piece.start, piece.size)]
        plgpu.store(target, part.astype(ref.dtype), mask=_mask(part.shape, keep, piece))
        start += piece.size


def _mask(shape: tuple[int, ...], keep: jax.Array | None, piece: Piece) -> jax.Array | None:
    columns = None
    if piece.valid < piece.size:
        columns = jnp.broadcast_to((jnp.arange(piece.size, dtype=jnp.int32) < piece.valid)[None, :], shape)
    if keep is None:
        return columns
    rows = jnp.broadcast_to(keep[:, None], shape)
    return rows if columns is None else rows & columns


def zeros(rows: int, head_dim: int, dtype: Any) -> Columns:
    """A float32 accumulator for a tile of vectors whose dtype is `dtype`."""
    return tuple(jnp.zeros((rows, piece.size), jnp.float32) for piece in pieces(head_dim, jnp.dtype(dtype).itemsize))


def inner(a: Columns, b: Columns, spec: AttentionSpec, total: jax.Array | None = None) -> jax.Array:
    """(total +) a @ b^T, [rows of a, rows of b]; `a` is what stays in the loop."""
    for x, y in zip(a, b, strict=True):
        if total is None:
            total = _product(x, y, spec, trans_b=True)
        else:
            total = _plus_product(total, x, y, spec, trans_b=True)
    return total  # pyright: ignore[reportReturnType]  (there is a piece, at least)


def add_product(total: Columns, p: jax.Array, x: Columns, spec: AttentionSpec) -> Columns:
    """total + p @ x for p [rows of total, rows of x], rounded to x's dtype first."""
    p = p.astype(x[0].dtype)
    return tuple(_plus_product(t, p, part, spec) for t, part in zip(total, x, strict=True))


def _plus_product(
    total: jax.Array, a: jax.Array, b: jax.Array, spec: AttentionSpec, trans_b: bool = False
) -> jax.Array:
    """total + a @ b; the addition of its own in float32, where a compiler would move it into the product."""
    if a.dtype == jnp.float32 and spec.precision != "tf32":
        return total - _product(-a, b, spec, trans_b)
    return total + _product(a, b, spec, trans_b)


def _product(a: jax.Array, b: jax.Array, spec: AttentionSpec, trans_b: bool = False) -> jax.Array:
    """a @ b, summed in float32; float32 operands at the precision that the call asks for."""
    precision = _PRECISION[spec.precision] if a.dtype == jnp.float32 else lax.Precision.DEFAULT
    if spec.interpret:  # CPUs have no TF32 algorithms
        precision = lax.Precision.HIGHEST
    return plgpu.dot(a, b, trans_b=trans_b, precision=precision)
