"""What a kernel sees of the optional operands: their blocks, ranges of tiles, and the view of one tile."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from flash_jax.spec import OWN_RANK, AttentionSpec, Operands
from flash_jax.tiles import block_map, dropout, masks, ranges
from flash_jax.tiles.block_map import TileList
from flash_jax.tiles.masks import Geometry, Int, Slots, TileRange
from flash_jax.tiles.mods import TileMod, evaluate
from flash_jax.tiles.scores import Scoring
from flash_jax.triton.instructions import arithmetic
from flash_jax.triton.launch import Shape, flat
from flash_jax.triton.tiling import Tile

_SLOT_DIMS = {
    "bias": 2, "mask": 2, "dropout_words": 1, "q_positions": 1, "kv_positions": 1, "q_segment_ids": 1,
    "kv_segment_ids": 1, "alibi_slopes": 0, "sinks": 0, "mod_heads": 0, "ranges": 2, "tiles": 2,
}  # fmt: skip
"""Dims of a ref that remain when one example and one head are chosen."""


class Inputs(NamedTuple):
    """The optional operands of a kernel and what is known of its tiles; arrays, specs or refs.

    Where no closed form says which tiles to visit, `ranges` is int32 [..., tiles, 4], a `TileRange` for each query tile
    or each key tile: found outside the kernel, once for all heads, and for all layers of a model. Where there is a
    block map, `tiles` says it instead: lists for each query tile, or each key tile, or the state of each pair (see
    tiles/block_map.py).
    """

    operands: Operands
    ranges: Any
    tiles: Any


def inputs(operands: Operands, tile: Tile, shape: Shape, spec: AttentionSpec, by: str = "query") -> Inputs:
    """The arrays, with their leading dims as they are; `by` is "query", "key" or "pair", see `Inputs`."""
    arrays, blocks = _narrow(operands), (tile.block_q, tile.block_kv)
    if operands.block_map is not None:
        found = block_map.states(operands, spec, (shape.T, shape.S), blocks)
        if by != "pair":
            found = block_map.lists(found if by == "query" else jnp.swapaxes(found, -1, -2))
        return Inputs(dataclasses.replace(arrays, block_map=None), None, found)
    if not ranges.is_scanned(operands):
        return Inputs(arrays, None, None)
    geometry = Geometry.of(spec, operands, shape.T, shape.S).beside(2)
    found = ranges.tile_ranges(operands, spec, geometry, (shape.T, shape.S), blocks, side=int(by == "key"))
    return Inputs(arrays, found, None)


def _narrow(operands: Operands) -> Operands:
    """The operands, a huge mask widened: Triton counts the offsets of up to 2^32 bytes in 32 bits, with a sign."""
    mask = operands.mask
    if mask is None or mask.size < 2**31:
        return operands
    return dataclasses.replace(operands, mask=mask.astype(jnp.int16))


def flattened(x: Inputs, shape: Shape) -> Inputs:
    """The arrays with their leading dims flattened into one."""
    count = len(shape.lead)
    return jax.tree.map(lambda v: flat(v, v.ndim - count), x)


def specs(x: Inputs, shape: Shape, groups: int | None) -> Inputs:
    """Block specs for a grid (tiles, heads, examples): all slots of the example, and one head, or `groups` of them."""

    def spec(name, v):
        lead = v.shape[: len(shape.lead)]
        own, example = v.shape[len(lead) :], shape.example(lead)
        if name in ("alibi_slopes", "sinks", "mod_heads"):
            return pl.BlockSpec((None, groups), lambda t, h, b: (example(b), h))
        if name == "dropout_words":
            return pl.BlockSpec((None, groups, 2), lambda t, h, b: (example(b), h, 0))
        if name in ("bias", "mask", "tiles") and own[0] > 1:
            return pl.BlockSpec((None, groups, *own[1:]), lambda t, h, b: (example(b), h, 0, 0))
        if name in ("bias", "mask", "tiles"):
            return pl.BlockSpec((None, None, *own[1:]), lambda t, h, b: (example(b), 0, 0, 0))
        return pl.BlockSpec((None, *own), lambda t, h, b: (example(b), *(0,) * len(own)))

    names = x._fields[1:]
    rest = (v if v is None else spec(name, v) for name, v in zip(names, x[1:], strict=True))
    return Inputs(x.operands.map(spec), *rest)


class View(NamedTuple):
    """One tile of scores [block_q, block_kv], or transposed; None where there is nothing of the kind.

    `keep` [n] says which of the streaming queries or keys take part in the tile, where not all do. `forbidden` is where
    an entry is not allowed and may be NaN: where positions are indices, `keep` and its like have removed all of these.
    """

    allowed: jax.Array | None
    forbidden: jax.Array | None
    keep: jax.Array | None
    addend: jax.Array | None
    distance: Any  # of positions, where there are alibi slopes
    kept: jax.Array | None
    mod: Any  # the score_mod at the tile, a TileMod

    def guarded(self) -> "View":
        """The view, of whose entries that are not allowed any may be NaN."""
        return self if self.allowed is None else self._replace(forbidden=~self.allowed)


@dataclasses.dataclass(frozen=True)
class Reader:
    """Reads the operands of one example in a kernel.

    With `transposed`, tiles are [block_kv, block_q] and queries stream past; otherwise keys do. `example` gives, by
    name, the index of the example in refs that hold them all; None where refs hold the one of this program.
    """

    inputs: Inputs
    numbers: Operands  # the scalars among them read, the others as refs
    geometry: Geometry
    spec: AttentionSpec
    shape: Shape
    tile: Tile
    transposed: bool
    example: Callable[[str], Int] | None

    @classmethod
    def of(
        cls,
        x: Inputs,
        spec: AttentionSpec,
        shape: Shape,
        tile: Tile,
        transposed: bool = False,
        example: Callable[[str], Int] | None = None,
    ) -> "Reader":
        """The reader of a kernel's refs."""

        def read(name, ref):
            if OWN_RANK.get(name) != 0:
                return ref
            return ref[...] if example is None else ref[example(name)]

        numbers = x.operands.map(read)
        geometry = Geometry.of(spec, numbers, shape.T, shape.S)
        return cls(x, numbers, geometry, spec, shape, tile, transposed, example)

    @property
    def closed(self) -> bool:
        """Whether a closed form says what a tile that needs a mask allows."""
        return not ranges.is_scanned(self.numbers) and not self.dense

    @property
    def dense(self) -> bool:
        """Whether any entry may be masked, by a mask or by a mask_mod."""
        return self.numbers.mask is not None or self.spec.mask_mod is not None

    def scoring(self, dtype: Any) -> Scoring:
        """How the call makes scores, for inputs of `dtype`."""
        quick, wide = jnp.dtype(dtype).itemsize < 4, jnp.dtype(dtype) != jnp.float16
        return Scoring.of(self.spec, self.numbers, quick=quick, wide=wide, arithmetic=arithmetic(self.spec))

    def kv_range(self, i: Int) -> TileRange | TileList:
        """The key/value tiles that query tile i attends."""
        if self.inputs.tiles is not None:
            return self._list(i, None)
        return self._all_masked(self._kv_range(i))

    def _kv_range(self, i: Int) -> TileRange:
        """The same where there is no block map, and without regard to a dense mask."""
        tile = self.tile
        if self.inputs.ranges is not None:
            return self._found(i)
        return masks.kv_range(i * tile.block_q, tile.block_q, tile.block_kv, self.geometry, self.spec)

    def q_range(self, j: Int) -> TileRange:
        """The query tiles that attend key/value tile j, where there is no block map."""
        tile = self.tile
        if self.inputs.ranges is not None:
            return self._all_masked(self._found(j))
        found = masks.q_range(j * tile.block_kv, tile.block_q, tile.block_kv, self.geometry, self.spec)
        return self._all_masked(found)

    def _found(self, own: Int) -> TileRange:
        """What `ranges` has for tile number `own`."""
        at = (*self._prefix("ranges"), own)
        return TileRange(*(self.inputs.ranges[(*at, jnp.asarray(n, jnp.int32))] for n in range(4)))

    def q_list(self, j: Int, head: Int) -> TileList:
        """The query tiles that attend key/value tile j by the block map; `head` is the one to choose of several."""
        return self._list(j, head)

    def _list(self, own: Int, head: Int | None) -> TileList:
        """The tiles of the other side that tile number `own` of this side meets."""
        at = (*self._prefix("tiles", head), own)

        def entry(n):
            return self.inputs.tiles[(*at, jnp.asarray(n, jnp.int32))]

        return TileList(lambda n: entry(n + 2), entry(0), entry(1))

    def visible(self, i: Int, j: Int, head: Int) -> bool | jax.Array:
        """Whether query tile i may attend anything of key/value tile j; for refs that hold all examples and heads."""
        if self.inputs.tiles is not None:
            return self.inputs.tiles[(*self._prefix("tiles", head), i, j)].astype(jnp.int32) != block_map.SKIPPED
        found = self._kv_range(i)
        return (found.start <= j) & (j < found.stop)

    def _all_masked(self, found: TileRange) -> TileRange:
        """With a dense mask or a mask_mod no tile is known to be full."""
        if not self.dense:
            return found
        return found.all_partial()

    def view(self, row: Int, col: Int, masked: bool, head: Any = None, careful: bool = True) -> View:
        """The tile at `row` and `col`; `head` is the one to choose where refs hold several.

        Without `careful`, `keep` may be True also of slots that take no part; see `launch.with_care`.
        """
        o, tile = self.numbers, self.tile
        rows = row + jnp.arange(tile.block_q, dtype=jnp.int32)
        cols = col + jnp.arange(tile.block_kv, dtype=jnp.int32)
        allowed = keep = addend = distance = kept = mod = None
        read = masked or o.alibi_slopes is not None
        r, c = self._slots(rows, row, True, read), self._slots(cols, col, False, read)
        if masked:
            allowed = masks.allowed(r, c, self.geometry, self.spec)
            if o.mask is not None:
                seen = self.dense_tile("mask", row, col, masked, head)
                allowed &= seen if seen.dtype == jnp.bool_ else seen != 0
            if self.spec.mask_mod is not None:
                place = self._coordinates(r, c, head)
                allowed &= evaluate(self.spec.mask_mod, list(place), self.read)
            keep = self._keep(allowed if careful else None, rows, cols, row, col)
        if o.bias is not None:
            addend = self.dense_tile("bias", row, col, masked, head).astype(jnp.float32)
        if o.alibi_slopes is not None:
            distance = masks.distance(r, c, self.geometry)
            alibi = -o.alibi_slopes[self._prefix("alibi_slopes", head) or ...] * distance
            addend = alibi if addend is None else addend + alibi
        if o.dropout_words is not None:
            prefix = self._prefix("dropout_words", head)
            row_word, col_word = (o.dropout_words[(*prefix, jnp.asarray(n, jnp.int32))] for n in (0, 1))
            kept = dropout.kept(row_word, col_word, *self._numbered(r, c), self.spec.dropout_rate)
        if self.spec.score_mod is not None:
            place = self._coordinates(r, c, head)
            mod = TileMod.of(self.spec.score_mod, place, self.read, jnp.float32)
        forbidden = None if allowed is None or self.closed else ~allowed
        return View(allowed, forbidden, keep, addend, distance, kept, mod)

    def _coordinates(self, rows: Slots, cols: Slots, head: Any) -> tuple:
        """Batch, head, q index and k index, as a mod gets them."""
        h = self.numbers.mod_heads[self._prefix("mod_heads", head) or ...]
        return self.numbers.mod_examples, h, *self._numbered(rows, cols)

    def _numbered(self, rows: Slots, cols: Slots) -> tuple[jax.Array, jax.Array]:
        """Rows and columns as dropout and mods count them."""
        return rows.numbered(self.numbers.row_start), cols.numbered(self.numbers.col_start)

    def read(self, operand: int, index: list) -> jax.Array:
        """The entries of one of `mods`; an index outside is moved to the nearest end."""
        ref = self.numbers.mods[operand]
        prefix = () if self.example is None else (self.example(f"mods.{operand}"),)
        sizes = ref.shape[len(prefix) :]
        index = [jnp.clip(x, 0, n - 1) for x, n in zip(index, sizes, strict=True)]
        shape = np.broadcast_shapes(*(x.shape for x in index))
        if shape:
            index = [jnp.broadcast_to(x, shape) for x in index]
        return ref[(*prefix, *index) or ...]

    def _keep(self, allowed, rows, cols, row, col):
        """Which of the streaming slots take part in the tile, or, without `allowed`, may do so."""
        if not self.closed and allowed is not None:
            return allowed.astype(jnp.int32).max(axis=0) > 0
        tile, geometry = self.tile, self.geometry
        if not ranges.is_scanned(self.numbers):
            if self.transposed:
                return masks.attending_rows(rows, col, tile.block_kv, geometry, self.spec)
            return masks.attended_cols(cols, row, tile.block_q, geometry, self.spec)
        if self.transposed:
            return None if geometry.all_rows and self.shape.T % tile.block_q == 0 else rows < geometry.q_length
        return None if geometry.all_cols and self.shape.S % tile.block_kv == 0 else cols < geometry.kv_length

    def _prefix(self, name: str, head: Any = None) -> tuple:
        """The indices that choose this example and head in the ref called `name`."""
        ref = getattr(self.inputs, name) if name in Inputs._fields else getattr(self.numbers, name)
        prefix = () if self.example is None else (self.example(name),)
        if len(ref.shape) - len(prefix) > _SLOT_DIMS[name]:
            prefix = (*prefix, jnp.zeros((), jnp.int32) if ref.shape[len(prefix)] == 1 else head)
        return prefix

    def _slots(self, index: jax.Array, start: Int, of_query: bool, read: bool) -> Slots:
        """The queries or keys of a tile, along their dim of it; positions and ids only if they are to be read."""
        side, length = ("q", self.shape.T) if of_query else ("kv", self.shape.S)
        inside = None if length % index.shape[0] == 0 else index < length

        def load(name):
            ref = getattr(self.numbers, name)
            if ref is None or not read:
                return None
            part = ref.at[(*self._prefix(name), pl.ds(start, index.shape[0]))]
            return part[...] if inside is None else plgpu.load(part, mask=inside, other=0)

        slots = Slots(index, load(f"{side}_positions"), load(f"{side}_segment_ids"))
        along_rows = of_query != self.transposed
        return slots.laid(lambda x: x[:, None] if along_rows else x[None, :])

    def dense_tile(self, name: str, row: Int, col: Int, masked: bool, head: Any = None) -> jax.Array:
        """The tile of a bias or mask, [block_q or 1, block_kv or 1] or transposed; 0 outside the array."""
        ref, prefix = getattr(self.numbers, name), self._prefix(name, head)
        sizes = ref.shape[len(prefix) :]
        index, inside = [], None
        streams = 0 if self.transposed else 1  # along this axis, tiles that need no mask lie inside the array
        blocks = self.tile.block_q, self.tile.block_kv
        for axis, (n, start, block) in enumerate(zip(sizes, (row, col), blocks, strict=True)):
            index.append(jnp.zeros((), jnp.int32) if n == 1 else pl.ds(start, block))
            if n > 1 and n % block and (masked or axis != streams):
                here = start + jnp.arange(block, dtype=jnp.int32) < n
                if 1 not in sizes:
                    here = here[:, None] if axis == 0 else here[None, :]
                inside = here if inside is None else inside & here
        part = ref.at[(*prefix, *index)]
        if inside is None:
            x = part[...]
        else:
            nothing = False if ref.dtype == jnp.bool_ else 0
            x = plgpu.load(part, mask=jnp.broadcast_to(inside, part.shape), other=nothing)
        if x.ndim == 2:
            return x.T if self.transposed else x
        if x.ndim == 0:
            return x[None, None]
        along_q = sizes[0] > 1
        return x[:, None] if along_q != self.transposed else x[None, :]
