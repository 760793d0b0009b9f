"""The loop over visible pairs of tiles, and how full arrays are cut into tiles.

A tile keeps the batch and all heads whole, so each step is a few batched matrix products. Arrays are laid out by head
group: queries [..., T, K, G, D] with G = H // K, keys [..., S, K, D], scores of a tile [..., K, G, block_q, block_kv].
Leading dims stay as they are; a size-1 dim (an operand that is not mapped under vmap) meets a full one by broadcasting
within a tile.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from flash_jax.spec import AttentionSpec, Operands
from flash_jax.tiles import masks
from flash_jax.tiles.masks import Geometry


class Tile(NamedTuple):
    """One pair of tiles: the first row and key (traced), and whether entries of it may not be allowed."""

    row: jax.Array
    col: jax.Array
    masked: bool


@dataclasses.dataclass(frozen=True)
class Plan:
    """How one call is cut into tiles."""

    spec: AttentionSpec
    geometry: Geometry  # ints, or arrays of the batch's rank
    heads: tuple[int, int]  # (K, G)
    lengths: tuple[int, int]  # (T, S)
    blocks: tuple[int, int]  # (block_q, block_kv)

    @classmethod
    def of(cls, q: jax.Array, k: jax.Array, operands: Operands, spec: AttentionSpec) -> "Plan":
        """The plan for query [..., T, H, D] and key [..., S, K, D]."""
        T, H, _ = q.shape[-3:]
        S, K, _ = k.shape[-3:]
        sizes = spec.block_sizes
        block_q = (sizes and sizes.block_q) or _default_block(T)
        block_kv = (sizes and sizes.block_kv) or _default_block(S)
        geometry = Geometry.of(spec, operands, T, S)
        return cls(spec, geometry, (K, H // K), (T, S), (min(block_q, T), min(block_kv, S)))

    def q_rows(self, x: jax.Array) -> jax.Array:
        """[..., T, H, D] as [..., T padded to whole tiles, K, G, D]."""
        return _pad(x.reshape(*x.shape[:-2], *self.heads, x.shape[-1]), -4, self.blocks[0])

    def q_stats(self, x: jax.Array) -> jax.Array:
        """[..., H, T] as [..., K, G, T padded]."""
        return _pad(x.reshape(*x.shape[:-2], *self.heads, x.shape[-1]), -1, self.blocks[0])

    def kv_rows(self, x: jax.Array) -> jax.Array:
        """[..., S, K, D] as [..., S padded, K, D]."""
        return _pad(x, -3, self.blocks[1])

    def q_shape(self, lead: tuple[int, ...], width: int) -> tuple[int, ...]:
        """Shape of an array of padded query rows, head-major: [..., K, G, T padded, width]."""
        return (*lead, *self.heads, _round_up(self.lengths[0], self.blocks[0]), width)

    def kv_shape(self, lead: tuple[int, ...], width: int) -> tuple[int, ...]:
        """Shape of an array of padded keys: [..., S padded, K, width]."""
        return (*lead, _round_up(self.lengths[1], self.blocks[1]), self.heads[0], width)

    def q_tile(self, x: jax.Array, tile: Tile) -> jax.Array:
        """The tile's rows of [..., T, K, G, D]; in a masked tile, rows that attend nothing of it are 0."""
        x = lax.dynamic_slice_in_dim(x, tile.row, self.blocks[0], axis=x.ndim - 4)
        if not tile.masked:
            return x
        rows = tile.row + jnp.arange(self.blocks[0], dtype=jnp.int32)
        keep = masks.attending_rows(rows, tile.col, self.blocks[1], self._expanded(1), self.spec)
        return jnp.where(keep[..., None, None, None], x, 0)

    def kv_tile(self, x: jax.Array, tile: Tile) -> jax.Array:
        """The tile's keys of [..., S, K, D]; in a masked tile, keys that no row of it attends are 0."""
        x = lax.dynamic_slice_in_dim(x, tile.col, self.blocks[1], axis=x.ndim - 3)
        if not tile.masked:
            return x
        cols = tile.col + jnp.arange(self.blocks[1], dtype=jnp.int32)
        keep = masks.attended_cols(cols, tile.row, self.blocks[0], self._expanded(1), self.spec)
        return jnp.where(keep[..., None, None], x, 0)

    def stat_tile(self, x: jax.Array, tile: Tile) -> jax.Array:
        """The tile's columns of [..., K, G, T]."""
        return lax.dynamic_slice_in_dim(x, tile.row, self.blocks[0], axis=x.ndim - 1)

    def allowed(self, tile: Tile) -> jax.Array | None:
        """bool [..., 1, 1, block_q, block_kv], or None where all is allowed."""
        if not tile.masked:
            return None
        rows = tile.row + jnp.arange(self.blocks[0], dtype=jnp.int32)
        cols = tile.col + jnp.arange(self.blocks[1], dtype=jnp.int32)
        return masks.allowed(rows[:, None], cols[None, :], self._expanded(4), self.spec)

    def alive_rows(self) -> jax.Array:
        """bool [..., 1, 1, T padded]: rows before the query length."""
        rows = jnp.arange(_round_up(self.lengths[0], self.blocks[0]), dtype=jnp.int32)
        return rows < self._expanded(3).q_length

    def _expanded(self, dims: int) -> Geometry:
        """The geometry with `dims` more dims at the end of what is an array."""
        g = self.geometry
        lift = lambda x: x if isinstance(x, int) else x.reshape(x.shape + (1,) * dims)  # noqa: E731
        return dataclasses.replace(g, q_length=lift(g.q_length), kv_length=lift(g.kv_length), q_offset=lift(g.q_offset))

    def scan(self, body: Callable[[Any, Tile], Any], carry: Any) -> Any:
        """Runs `carry = body(carry, tile)` over all visible pairs of tiles.

        The trip count is static and the body's intermediates are recomputed rather than stored, so JAX can
        differentiate the loop of a sum in linear memory. Pairs are known now where the geometry is static; otherwise
        each is asked about.
        """
        static = all(isinstance(x, int) for x in dataclasses.astuple(self.geometry))
        full, partial = self._static_pairs() if static else ([], self._all_pairs())
        for pairs, masked in ((full, False), (partial, True)):
            if not len(pairs):
                continue

            @jax.checkpoint
            def step(carry, pair, masked=masked):
                tile = Tile(pair[0], pair[1], masked)
                if static:
                    return body(carry, tile), None
                return lax.cond(self._visible(tile), lambda c: body(c, tile), lambda c: c, carry), None

            carry, _ = lax.scan(step, carry, np.asarray(pairs, np.int32))
        return carry

    def _all_pairs(self) -> list[tuple[int, int]]:
        (T, S), (block_q, block_kv) = self.lengths, self.blocks
        return [(row, col) for row in range(0, T, block_q) for col in range(0, S, block_kv)]

    def _static_pairs(self) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        """(full, partial) pairs of first rows and columns."""
        full, partial = [], []
        block_q, block_kv = self.blocks
        for row in range(0, self.lengths[0], block_q):
            seen = masks.kv_range(row, block_q, block_kv, self.geometry, self.spec)
            for j in range(seen.start, seen.stop):
                # Rows past the query length get no gradient, so here a full tile must end before it.
                whole = seen.full_start <= j < seen.full_stop and row + block_q <= self.geometry.q_length
                (full if whole else partial).append((row, j * block_kv))
        return full, partial

    def _visible(self, tile: Tile) -> jax.Array:
        """Whether any example of the batch has something to show in the tile."""
        seen = masks.kv_range(tile.row, self.blocks[0], self.blocks[1], self.geometry, self.spec)
        j = lax.div(tile.col, jnp.full_like(tile.col, self.blocks[1]))
        return jnp.any((seen.start <= j) & (j < seen.stop))


def product(subscripts: str, a: jax.Array, b: jax.Array, spec: AttentionSpec) -> jax.Array:
    """einsum summed in float32 (float64 for float64 inputs), with float32 operands at the precision of the call."""
    precision = lax.Precision.DEFAULT if spec.precision == "tf32" else lax.Precision.HIGHEST
    dtype = np.promote_types(a.dtype, np.float32)
    return jnp.einsum(subscripts, a, b, precision=precision, preferred_element_type=dtype)


def add_tile(total: jax.Array, x: jax.Array, start: jax.Array, axis: int) -> jax.Array:
    """`total` with tile `x` added from `start` on along `axis` (negative), summed over what `total` holds at size 1."""
    axis += total.ndim
    size = x.shape[axis]
    x = sum_to(x, (*total.shape[:axis], size, *total.shape[axis + 1 :]))
    old = lax.dynamic_slice_in_dim(total, start, size, axis)
    return lax.dynamic_update_slice_in_dim(total, old + x, start, axis)


def sum_to(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """x summed over the dims that have size 1 in `shape`."""
    dims = tuple(d for d, (have, want) in enumerate(zip(x.shape, shape, strict=True)) if have != want)
    return x.sum(dims, keepdims=True) if dims else x


def broadcast_lead(*arrays: tuple[jax.Array | None, int]) -> tuple[int, ...]:
    """The common leading dims of (array, number of trailing dims) pairs, Nones left out."""
    return np.broadcast_shapes(*(x.shape[: x.ndim - trailing] for x, trailing in arrays if x is not None))


def _pad(x: jax.Array, axis: int, block: int) -> jax.Array:
    """x with zeros at the end of `axis`, up to a whole number of tiles."""
    axis += x.ndim
    missing = _round_up(x.shape[axis], block) - x.shape[axis]
    return jnp.pad(x, [(0, missing if d == axis else 0) for d in range(x.ndim)]) if missing else x


def _round_up(n: int, block: int) -> int:
    return -(-n // block) * block


def _default_block(length: int) -> int:
    """Large enough that the loop's overhead is small beside its products, small enough to stay in a cache."""
    return 256 if length <= 8192 else 512 if length <= 32768 else 1024
