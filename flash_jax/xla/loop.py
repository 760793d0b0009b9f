"""The loop over visible pairs of tiles, and what a tile sees of the arrays (see xla/layout.py for their layout).

A tile keeps the batch and all heads whole, so each step is a few batched matrix products.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from flash_jax.spec import AttentionSpec, Operands
from flash_jax.tiles import block_map, dropout, masks, ranges
from flash_jax.tiles.masks import Geometry, Slots
from flash_jax.tiles.mods import TileMod, evaluate
from flash_jax.tiles.scores import Scale, Scoring
from flash_jax.xla.layout import dense_tile, pad, round_up


class Tile(NamedTuple):
    """One pair of tiles: the first row and key (traced), and whether entries of it may not be allowed."""

    row: jax.Array
    col: jax.Array
    masked: bool


@dataclasses.dataclass(frozen=True)
class Plan:
    """How one call is cut into tiles."""

    spec: AttentionSpec
    operands: Operands  # positions, ids, bias and mask as a tile meets them
    geometry: Geometry  # ints, or arrays of the batch's rank
    scoring: Scoring  # arrays in it have four dims more
    heads: tuple[int, int]  # (K, G)
    lengths: tuple[int, int]  # (T, S)
    blocks: tuple[int, int]  # (block_q, block_kv)
    stats_dtype: Any  # of scores

    @classmethod
    def of(cls, q: jax.Array, k: jax.Array, operands: Operands, spec: AttentionSpec) -> "Plan":
        """The plan for query [..., T, H, D] and key [..., S, K, D]."""
        T, H, _ = q.shape[-3:]
        S, K, _ = k.shape[-3:]
        sizes = spec.block_sizes
        block_q = (sizes and sizes.block_q) or _default_block(T)
        block_kv = (sizes and sizes.block_kv) or _default_block(S)
        scoring = Scoring.of(spec, operands)
        lifted = Scale(*(_lift(x, 4) for x in scoring.scale))
        return cls(
            spec,
            operands,
            Geometry.of(spec, operands, T, S),
            dataclasses.replace(scoring, scale=lifted),
            (K, H // K),
            (T, S),
            (min(block_q, T), min(block_kv, S)),
            np.promote_types(q.dtype, np.float32),
        )

    def q_rows(self, x: jax.Array) -> jax.Array:
        """[..., T, H, D] as [..., T padded to whole tiles, K, G, D]."""
        return pad(x.reshape(*x.shape[:-2], *self.heads, x.shape[-1]), -4, self.blocks[0])

    def q_stats(self, x: jax.Array) -> jax.Array:
        """[..., H, T] as [..., K, G, T padded]."""
        return pad(self.by_head(x, 1), -1, self.blocks[0])

    def kv_rows(self, x: jax.Array) -> jax.Array:
        """[..., S, K, D] as [..., S padded, K, D]."""
        return pad(x, -3, self.blocks[1])

    def by_head(self, x: jax.Array, after: int) -> jax.Array:
        """[..., H or 1, and `after` dims] with the heads as K, G (or 1, 1)."""
        return x.reshape(self.shape_by_head(x.shape, after))

    def shape_by_head(self, shape: tuple[int, ...], after: int) -> tuple[int, ...]:
        """The shape that `by_head` gives an array of `shape`."""
        axis = len(shape) - 1 - after
        return (*shape[:axis], *(self.heads if shape[axis] > 1 else (1, 1)), *shape[axis + 1 :])

    def q_shape(self, lead: tuple[int, ...], width: int) -> tuple[int, ...]:
        """Shape of an array of padded query rows, head-major: [..., K, G, T padded, width]."""
        return (*lead, *self.heads, round_up(self.lengths[0], self.blocks[0]), width)

    def kv_shape(self, lead: tuple[int, ...], width: int) -> tuple[int, ...]:
        """Shape of an array of padded keys: [..., S padded, K, width]."""
        return (*lead, round_up(self.lengths[1], self.blocks[1]), self.heads[0], width)

    def alive_rows(self) -> jax.Array:
        """bool [..., 1, 1, T padded]: rows before the query length."""
        rows = jnp.arange(round_up(self.lengths[0], self.blocks[0]), dtype=jnp.int32)
        return rows < self.geometry.beside(3).q_length

    def view(self, tile: Tile) -> "View":
        """What the tile sees."""
        return View.of(self, tile)

    @property
    def closed(self) -> bool:
        """Whether positions alone, and these in closed form, decide what is allowed."""
        dense = self.operands.mask is not None or self.operands.bias is not None
        mods = self.spec.score_mod is not None or self.spec.mask_mod is not None
        return not dense and not mods and not ranges.is_scanned(self.operands)

    def scan(self, body: Callable[[Any, Tile], Any], carry: Any) -> Any:
        """Runs `carry = body(carry, tile)` over all visible pairs of tiles.

        The trip count is static and the body's intermediates are recomputed rather than stored, so JAX can
        differentiate the loop of a sum in linear memory. Pairs are known now where the geometry is static; otherwise
        each is asked about.
        """
        static = all(x is None or isinstance(x, int) for x in dataclasses.astuple(self.geometry))
        scanned = ranges.is_scanned(self.operands)
        mapped = self.operands.block_map is not None
        static &= not scanned and not mapped
        full, partial = self._static_pairs() if static else ([], self._all_pairs())
        visible = self._on_map() if mapped else self._judged() if scanned else self._visible
        for pairs, masked in ((full, False), (partial, True)):
            if not len(pairs):
                continue

            @jax.checkpoint
            def step(carry, pair, masked=masked):
                tile = Tile(pair[0], pair[1], masked)
                if static:
                    return body(carry, tile), None
                return lax.cond(visible(tile), lambda c: body(c, tile), lambda c: c, carry), None

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
                (full if whole and self.closed else partial).append((row, j * block_kv))
        return full, partial

    def _visible(self, tile: Tile) -> jax.Array:
        """Whether any example of the batch has something to show in the tile, where positions are indices."""
        seen = masks.kv_range(tile.row, self.blocks[0], self.blocks[1], self.geometry, self.spec)
        j = lax.div(tile.col, jnp.full_like(tile.col, self.blocks[1]))
        return jnp.any((seen.start <= j) & (j < seen.stop))

    def _on_map(self) -> Callable[[Tile], jax.Array]:
        """As `_visible`, where a block map has its say."""
        states = block_map.states(self.operands, self.spec, self.lengths, self.blocks)
        states = states.max(tuple(range(states.ndim - 2)))

        def visible(tile):
            at = (lax.div(x, jnp.full_like(x, n)) for x, n in zip((tile.row, tile.col), self.blocks, strict=True))
            return states[tuple(at)] != block_map.SKIPPED

        return visible

    def _judged(self) -> Callable[[Tile], jax.Array]:
        """As `_visible`, where positions are arrays or there are segment ids."""
        o, (block_q, block_kv) = self.operands, self.blocks
        sides = [(o.q_positions, o.q_segment_ids, block_q), (o.kv_positions, o.kv_segment_ids, block_kv)]
        summaries = [ranges.summary(*side) for side in sides]

        def bounds(side, summary, start):
            positions, segments, block = side
            tile = lax.div(start, jnp.full_like(start, block))
            fields = [] if summary is None else jnp.moveaxis(summary, -2, 0)
            fields = [lax.dynamic_index_in_dim(x, tile, x.ndim - 1, keepdims=False) for x in fields]
            return ranges.bounds(tile, block, fields, positions is not None, segments is not None)

        def visible(tile):
            q, kv = (bounds(*args) for args in zip(sides, summaries, (tile.row, tile.col), strict=True))
            return jnp.any(ranges.judge(q, kv, o.q_positions is not None, self.geometry, self.spec)[0])

        return visible


class View(NamedTuple):
    """What one tile sees: which entries are allowed, and the slices of arrays that it meets.

    `allowed`, `addend` (bias and alibi) and `kept` (dropout) are [..., K or 1, G or 1, block_q, block_kv], None where
    there is nothing of the kind; keep_rows [..., block_q, K or 1, G or 1] and keep_cols [..., block_kv, K or 1] say
    which rows and keys take part.
    """

    plan: Plan
    tile: Tile
    allowed: jax.Array | None
    keep_rows: jax.Array | None
    keep_cols: jax.Array | None
    addend: jax.Array | None
    distance: Any  # of positions, where there are alibi slopes
    kept: jax.Array | None
    mod: Any  # the score_mod at the tile, a TileMod

    @classmethod
    def of(cls, plan: Plan, tile: Tile) -> "View":
        """The view of `plan` at `tile`."""
        o, spec = plan.operands, plan.spec
        rows = _slots(plan, tile.row, plan.blocks[0], o.q_positions, o.q_segment_ids)
        cols = _slots(plan, tile.col, plan.blocks[1], o.kv_positions, o.kv_segment_ids)
        rows = rows.laid(lambda x: x[..., None, None, :, None])
        cols = cols.laid(lambda x: x[..., None, None, None, :])
        geometry = plan.geometry.beside(4)
        starts = tile.row, tile.col
        bias = None if o.bias is None else dense_tile(plan.by_head(o.bias, 2), starts, plan.blocks)
        allowed = keep_rows = keep_cols = mod = None
        if tile.masked:
            allowed = masks.allowed(rows, cols, geometry, spec)
            if spec.mask_mod is not None:
                place = _coordinates(plan, rows, cols)
                allowed &= evaluate(spec.mask_mod, list(place), table_reader(o.mods))
            if o.mask is not None:
                allowed &= dense_tile(plan.by_head(o.mask, 2), starts, plan.blocks)
            if bias is not None:
                allowed &= bias != -jnp.inf
            keep_rows = jnp.moveaxis(allowed.any(-1), -1, -3)
            keep_cols = jnp.moveaxis(allowed.any((-3, -2)), -1, -2)
        addend = None if bias is None else bias.astype(np.promote_types(bias.dtype, np.float32))
        distance = None
        if o.alibi_slopes is not None:
            distance = masks.distance(rows, cols, geometry).astype(o.alibi_slopes.dtype)
            alibi = -plan.by_head(o.alibi_slopes, 0)[..., None, None] * distance
            addend = alibi if addend is None else addend + alibi
        kept = None
        if o.dropout_words is not None:
            row_word, col_word = (plan.by_head(o.dropout_words[..., n], 0)[..., None, None] for n in (0, 1))
            kept = dropout.kept(row_word, col_word, *_numbered(plan, rows, cols), spec.dropout_rate)
        if spec.score_mod is not None:
            place, dtype = _coordinates(plan, rows, cols), plan.stats_dtype
            mod = TileMod.of(spec.score_mod, place, table_reader(o.mods), dtype)
        return cls(plan, tile, allowed, keep_rows, keep_cols, addend, distance, kept, mod)

    def q(self, x: jax.Array) -> jax.Array:
        """The tile's rows of [..., T, K, G, D]; rows that attend nothing of it are 0."""
        x = lax.dynamic_slice_in_dim(x, self.tile.row, self.plan.blocks[0], axis=x.ndim - 4)
        return x if self.keep_rows is None else jnp.where(self.keep_rows[..., None], x, 0)

    def kv(self, x: jax.Array) -> jax.Array:
        """The tile's keys of [..., S, K, D]; keys that no row of it attends are 0."""
        x = lax.dynamic_slice_in_dim(x, self.tile.col, self.plan.blocks[1], axis=x.ndim - 3)
        return x if self.keep_cols is None else jnp.where(self.keep_cols[..., None], x, 0)

    def stat(self, x: jax.Array) -> jax.Array:
        """The tile's columns of [..., K, G, T], as [..., K, G, block_q, 1]."""
        return lax.dynamic_slice_in_dim(x, self.tile.row, self.plan.blocks[0], axis=x.ndim - 1)[..., None]

    def probability(self, product: jax.Array, lse_rows: jax.Array) -> jax.Array:
        """p of the products q . k of the tile, before dropout."""
        return self.plan.scoring.probability(product, self.stat(lse_rows), self.addend, self.mod, self.allowed)

    def drop(self, p: jax.Array) -> jax.Array:
        """p after dropout."""
        return p if self.kept is None else jnp.where(self.kept, p * (1 / (1 - self.plan.spec.dropout_rate)), 0)


def _slots(plan: Plan, start: jax.Array, block: int, positions, segments) -> Slots:
    """Index [block], and position and id [..., block], of a tile's queries or keys."""
    cut = lambda x: x if x is None else lax.dynamic_slice_in_dim(pad(x, -1, block), start, block, x.ndim - 1)  # noqa: E731
    return Slots(start + jnp.arange(block, dtype=jnp.int32), cut(positions), cut(segments))


def _coordinates(plan: Plan, rows: Slots, cols: Slots) -> tuple:
    """Batch, head, q index and k index of a tile's entries, as a mod gets them."""
    b, h = _lift(plan.operands.mod_examples, 4), plan.by_head(plan.operands.mod_heads, 0)[..., None, None]
    return b, h, *_numbered(plan, rows, cols)


def _numbered(plan: Plan, rows: Slots, cols: Slots) -> tuple[jax.Array, jax.Array]:
    """Rows and columns as dropout and mods count them."""
    o = plan.operands
    return rows.numbered(_lift(o.row_start, 4)), cols.numbered(_lift(o.col_start, 4))


def table_reader(tables: tuple | dict) -> Callable:
    """Reads entries of `mods` at tiles: (number, indices) -> array; an index outside is moved to the nearest end."""

    def read(operand, index):
        x = tables[operand]
        lead = x.ndim - len(index)
        at = [_along(n, lead - d + 4) for d, n in enumerate(x.shape[:lead], 1)]
        inside = [jnp.clip(i, 0, n - 1) for i, n in zip(index, x.shape[lead:], strict=True)]
        return x[(*at, *inside)]

    return read


def _along(n: int, after: int) -> jax.Array:
    """0, 1, ... n - 1 along a dim that `after` others follow."""
    return jnp.arange(n, dtype=jnp.int32).reshape(n, *(1,) * after)


def _lift(x: Any, dims: int) -> Any:
    """A per-example array with `dims` more dims at the end; what is no array as it is."""
    return x.reshape(x.shape + (1,) * dims) if isinstance(x, jax.Array) else x


def _default_block(length: int) -> int:
    """Large enough that the loop's overhead is small beside its products, small enough to stay in a cache."""
    return 256 if length <= 8192 else 512 if length <= 32768 else 1024
