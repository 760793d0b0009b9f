"""What a forward kernel does with each pair of tiles: compute it whole, with a mask, or not at all.

For looking at a call, not for running it. The judgement is that of the kernels, made for all query tiles at once.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from flash_jax.spec import OWN_RANK, AttentionSpec, Operands
from flash_jax.tiles import block_map, masks, ranges
from flash_jax.tiles.block_map import FULL, PARTIAL, SKIPPED
from flash_jax.tiles.masks import Geometry, Slots, TileRange
from flash_jax.tiles.mods import evaluate

DECIDING = (
    "q_offset", "q_lengths", "kv_lengths", "prefix_lengths", "q_positions", "kv_positions", "q_segment_ids",
    "kv_segment_ids", "block_map",
)  # fmt: skip
"""The operands that decide which tiles are visited. A mask, or a mask_mod without a map, makes all of them partial."""

_BY_HEAD = ("bias", "mask", "block_map")


class Pairs(NamedTuple):
    """How many pairs of tiles are full (computed without a mask), partial (with one) and skipped."""

    full: int
    partial: int
    skipped: int

    @property
    def total(self) -> int:
        """All of them."""
        return sum(self)


class Survey(NamedTuple):
    """The range of key tiles that each query tile of an example visits, int64 [query tiles] each, as in `TileRange`."""

    start: np.ndarray
    full_start: np.ndarray
    full_stop: np.ndarray
    stop: np.ndarray
    kv_tiles: int

    @property
    def q_tiles(self) -> int:
        """How many query tiles there are."""
        return len(self.start)

    @property
    def pairs(self) -> Pairs:
        """The pairs counted."""
        visited, full = int((self.stop - self.start).sum()), int((self.full_stop - self.full_start).sum())
        return Pairs(full, visited - full, len(self.start) * self.kv_tiles - visited)

    def states(self, first: int, last: int) -> np.ndarray:
        """int8 [last - first, key tiles]: SKIPPED, PARTIAL or FULL, for the query tiles from `first` to before `last`.

        No more of them than there are.
        """
        start, full_start, full_stop, stop = (x[first:last, None] for x in self[:4])
        j = np.arange(self.kv_tiles)
        visited, full = (start <= j) & (j < stop), (full_start <= j) & (j < full_stop)
        return visited.astype(np.int8) * PARTIAL + full.astype(np.int8) * (FULL - PARTIAL)


class ListedSurvey(NamedTuple):
    """What becomes of each tile where a block map has its say: int8 [query tiles, key tiles]."""

    found: np.ndarray

    @property
    def q_tiles(self) -> int:
        """How many query tiles there are."""
        return self.found.shape[0]

    @property
    def kv_tiles(self) -> int:
        """How many key tiles there are."""
        return self.found.shape[1]

    @property
    def pairs(self) -> Pairs:
        """The pairs counted."""
        return Pairs(*(int((self.found == state).sum()) for state in (FULL, PARTIAL, SKIPPED)))

    def states(self, first: int, last: int) -> np.ndarray:
        """As `Survey.states`."""
        return self.found[first:last]


def survey(
    operands: Operands, spec: AttentionSpec, lengths: tuple[int, int], blocks: tuple[int, int], masked: bool
) -> Survey | ListedSurvey:
    """The survey of one example and head, whose operands (see `of_example`) have values.

    lengths: (T, S). blocks: (block_q, block_kv). masked: whether the call has a dense mask.
    """
    tiles = -(-lengths[0] // blocks[0]), -(-lengths[1] // blocks[1])
    if 0 in tiles:
        return Survey(*(np.zeros(tiles[0], np.int64),) * 4, kv_tiles=tiles[1])
    deciding = Operands(**{name: getattr(operands, name) for name in DECIDING})
    if operands.block_map is not None:
        listed = np.asarray(_on_map(deciding, spec=spec, lengths=lengths, blocks=blocks))
        return ListedSurvey(np.minimum(listed, PARTIAL) if masked else listed)
    found = _seen(deciding, spec=spec, lengths=lengths, blocks=blocks, tiles=tiles)
    start, full_start, full_stop, stop = (np.broadcast_to(np.asarray(x, np.int64), tiles[:1]) for x in found)
    if masked or spec.mask_mod is not None:
        full_start = full_stop = stop
    return Survey(start, full_start, full_stop, stop, tiles[1])


@functools.partial(jax.jit, static_argnames=("spec", "lengths", "blocks", "tiles"))
def _seen(operands: Operands, *, spec, lengths, blocks, tiles) -> TileRange:
    """The tiles that each query tile visits, and the full ones among them, without regard to a dense mask."""
    geometry = Geometry.of(spec, operands, lengths[0], lengths[1])
    if not ranges.is_scanned(operands):
        rows = jnp.arange(tiles[0], dtype=jnp.int32) * blocks[0]
        return masks.kv_range(rows, blocks[0], blocks[1], geometry, spec)

    found = ranges.tile_ranges(operands, spec, geometry, lengths, blocks, side=0)
    return TileRange(*jnp.moveaxis(found, -1, 0))


@functools.partial(jax.jit, static_argnames=("spec", "lengths", "blocks"))
def _on_map(operands: Operands, *, spec, lengths, blocks) -> jax.Array:
    """int8 [query tiles, key tiles], without regard to a dense mask."""
    return block_map.states(operands, spec, lengths, blocks)[0]


def of_example(
    operands: Operands, lead: tuple[int, ...], example: int, head: int = 0, dense: tuple[str, ...] = ()
) -> Operands:
    """The operands that decide what is allowed, of one example and head: numbers, arrays [T], [S] and [T or 1, S or 1].

    `lead` are the call's leading dims, `example` counts them in row-major order. `dense` may name bias and mask. A
    block map keeps its dim of heads, at size 1.
    """
    at = np.unravel_index(example, lead) if lead else ()

    def pick(name, x):
        own = x.shape[: x.ndim - OWN_RANK[name]]
        index = tuple(int(i) if n > 1 else 0 for i, n in zip(at, own, strict=True))
        if name in _BY_HEAD:
            h = head if x.shape[-3] > 1 else 0
            index += (slice(h, h + 1) if name == "block_map" else h,)
        return x[index] if index else x

    names = [name for name in (*DECIDING, *dense) if getattr(operands, name) is not None]
    return Operands(**{name: pick(name, getattr(operands, name)) for name in names})


def entries(
    operands: Operands, spec: AttentionSpec, lengths: tuple[int, int], place: tuple[int, int], tables: dict
) -> np.ndarray:
    """bool [T, S]: which entries of one example and head take part; a score_mod is not asked.

    operands, lengths: as for `survey`. place: (example, head). tables: by its number, what a mask_mod reads.
    """
    T, S = lengths
    o, (i, j) = operands, (jnp.arange(n, dtype=jnp.int32) for n in lengths)
    rows = Slots(i, o.q_positions, o.q_segment_ids).laid(lambda x: x[:, None])
    cols = Slots(j, o.kv_positions, o.kv_segment_ids).laid(lambda x: x[None, :])
    numbers = dataclasses.replace(o, bias=None, mask=None, block_map=None)
    allowed = masks.allowed(rows, cols, Geometry.of(spec, numbers, T, S), spec)
    if o.mask is not None:
        allowed &= o.mask
    if o.bias is not None:
        allowed &= o.bias != -jnp.inf
    if spec.mask_mod is not None:
        b, h = (jnp.asarray(n, jnp.int32) for n in place)
        allowed &= evaluate(spec.mask_mod, [b, h, rows.slot, cols.slot], lambda n, index: _entry(tables[n], index))
    return np.broadcast_to(np.asarray(allowed), lengths)


def _entry(table: jax.Array, index: list) -> jax.Array:
    """What a mod reads; an index outside is moved to the nearest end."""
    return table[tuple(jnp.clip(i, 0, n - 1) for i, n in zip(index, table.shape, strict=True))]
