"""Forward-mode kernel: tangents of the output and of the log-sum-exp."""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl

from flash_jax.spec import AttentionSpec, Operands, leads
from flash_jax.tiles.rows import may_shift, row_norm
from flash_jax.tiles.scores import Scoring
from flash_jax.triton import columns
from flash_jax.triton.entries import probabilities
from flash_jax.triton.forward import q_tile
from flash_jax.triton.launch import (
    Shape,
    flat,
    flat_output,
    has_nan,
    load_stats,
    output,
    over_tiles,
    store_stats,
    with_care,
)
from flash_jax.triton.operands import Inputs, Reader, View, flattened, inputs, specs
from flash_jax.triton.order import Grid, bytes_of_head, launch_tiles
from flash_jax.triton.tiling import tile_for

_FEW = 8  # columns of a float32 head: so few that IEEE products need no more registers


class Given(NamedTuple):
    """Arrays, refs or specs: q, k, v, out [..., T, H, Dv] and lse [..., H, T]."""

    q: Any
    k: Any
    v: Any
    out: Any
    lse: Any

    def flattened(self) -> "Given":
        """The arrays with their leading dims flattened into one."""
        return Given(*(flat(x, 3) for x in self[:4]), *(flat(x, 2) for x in self[4:]))


class Moving(NamedTuple):
    """Their tangents, None where there is none: of q, k, v, and of operands, of whose `mods` those alone that move."""

    q: Any
    k: Any
    v: Any
    extra: Inputs

    def flattened(self, shape: Shape) -> "Moving":
        """The arrays with their leading dims flattened into one."""
        q, k, v = (None if x is None else flat(x, 3) for x in (self.q, self.k, self.v))
        return Moving(q, k, v, flattened(self.extra, shape))


@dataclasses.dataclass(frozen=True)
class Scores:
    """The tangent of the scores of a tile; `mods` says which of the `mod_operands` move."""

    reader: Reader
    moved: Reader  # of the tangents of operands
    scoring: Scoring
    mods: tuple[int, ...]

    @property
    def shift(self) -> bool:
        """Whether anything moves them but products of q and k."""
        return may_shift(name for name, _ in self.moved.numbers.items())

    def tangent(self, qk: jax.Array, d_qk: jax.Array | None, view: View, place: tuple) -> jax.Array:
        """dS [block_q, block_kv] at `place` (row, column, masked), d_qk being the tangent of the products."""
        dots, scoring, parts = self.moved.numbers, self.scoring, []
        if d_qk is not None:
            parts.append(d_qk * scoring.scale.value)
        if dots.scale is not None:
            parts.append(qk * dots.scale)
        slope = scoring.slope(qk, view.mod) if parts else None
        if slope is not None:
            parts = [sum(parts[1:], parts[0]) * slope]
        if self.mods:
            parts += view.mod.along(scoring.capped(qk), self.reader.read, self._read, self.mods.__contains__)
        if dots.bias is not None:
            parts.append(self.moved.dense_tile("bias", *place).astype(jnp.float32))
        if dots.alibi_slopes is not None:
            parts.append(-dots.alibi_slopes[...] * view.distance)
        return jnp.broadcast_to(sum(parts[1:], parts[0]), qk.shape)

    def _read(self, operand: int, index: list) -> jax.Array:
        return self.moved.read(self.mods.index(operand), index)


class Sums(NamedTuple):
    """What is added up over tiles; None what is not needed."""

    d_out: Any  # [block_q, Dv]
    p_ds: Any  # [block_q]
    p: Any  # [block_q]


@dataclasses.dataclass(frozen=True)
class Block:
    """The rows of one program: what it has loaded of them, and what it adds up."""

    scores: Scores
    refs: Given
    moving: Moving
    row: Any
    q: columns.Columns
    d_q: columns.Columns | None
    lse: jax.Array

    @property
    def turns(self) -> bool:
        """Whether the scores move."""
        return self.moving.q is not None or self.moving.k is not None or self.scores.shift

    @property
    def exact(self) -> bool:
        """Whether inputs are float32."""
        return self.q[0].dtype == jnp.float32

    @property
    def product(self) -> AttentionSpec:
        """How q and k are multiplied: of a few columns, whose errors do not average out, by IEEE products."""
        spec = self.scores.reader.spec
        few = self.scores.reader.shape.D <= _FEW and spec.precision == "x3"
        return dataclasses.replace(spec, precision="ieee") if few else spec

    def tile(self, j: Any, masked: bool, careful: bool, products: bool) -> tuple:
        """(place, view, loader of streaming arrays, Q K_j^T, its tangent if `products`) of key/value tile j."""
        reader = self.scores.reader
        col = j * reader.tile.block_kv
        view = reader.view(self.row, col, masked, careful=careful)
        view = view.guarded() if self.scores.shift else view  # what is added to scores may be NaN anywhere
        load = functools.partial(_load, (pl.ds(col, reader.tile.block_kv),), view.keep)
        k = load(self.refs.k, reader.shape.D)
        qk, d_qk = columns.inner(self.q, k, self.product), None  # [block_q, block_kv]
        if products and self.d_q is not None:
            d_qk = columns.inner(self.d_q, k, self.product)
        if products and self.moving.k is not None:
            d_qk = columns.inner(self.q, load(self.moving.k, reader.shape.D), self.product, d_qk)
        return (self.row, col, masked), view, load, qk, d_qk

    def add_mean(self, j: Any, sums: Sums, masked: bool) -> Sums:
        """The sums over P dS and P with those of tile j; for 16 bits of dS only what is not from products."""
        place, view, _, qk, d_qk = self.tile(j, masked, False, self.exact)
        p, _ = self._p(qk, view)
        p_ds = _selected(p * self.scores.tangent(qk, d_qk, view, place), view)
        return Sums(None, sums.p_ds + p_ds.sum(axis=1), sums.p + p.sum(axis=1))

    def add(self, j: Any, sums: Sums, base: jax.Array | None, masked: bool, careful: bool) -> Sums:
        """All sums with those of tile j, dS measured from `base`."""
        d_out, p_ds_sum, p_sum = sums
        spec, shape = self.scores.reader.spec, self.scores.reader.shape
        place, view, load, qk, d_qk = self.tile(j, masked, careful, True)
        p, p_kept = self._p(qk, view)
        if self.turns:
            ds = self.scores.tangent(qk, d_qk, view, place)
            p_ds = _selected(p * (ds if base is None else ds - base[:, None]), view)
            p_ds_sum += p_ds.sum(axis=1)
            p_ds = p_ds if view.kept is None else jnp.where(view.kept, p_ds, 0)
            d_out = columns.add_product(d_out, p_ds, load(self.refs.v, shape.Dv), spec)
        if self.moving.v is not None:
            d_out = columns.add_product(d_out, p_kept, load(self.moving.v, shape.Dv), spec)
        return Sums(d_out, p_ds_sum, None if p_sum is None else p_sum + p.sum(axis=1))

    def _p(self, qk: jax.Array, view: View) -> tuple[jax.Array, jax.Array]:
        return probabilities(qk, self.lse[:, None], view, self.scores.scoring)


def _load(rows: tuple, keep: jax.Array | None, ref: Any, head_dim: int) -> columns.Columns:
    return columns.load(ref, rows, keep, head_dim)


def _selected(p_ds: jax.Array, view: View) -> jax.Array:
    """P dS, where P is 0 also of a dS that is NaN."""
    return p_ds if view.forbidden is None else jnp.where(view.forbidden, 0, p_ds)


def flash_attention_tangent_kernel(  # noqa: PLR0913
    program, extra, refs: Given, moving: Moving, d_out_ref, d_lse_ref, *, spec, tile, shape, mods
):
    """dL_i = sum_j P_ij dS_ij + P_sink dsink and dO_i = sum_j P_ij (dS_ij V_j + dV_j) - O_i dL_i, with P = exp(S - L).

    dS = scale (dQ K^T + Q dK^T), bent by softcap and score_mod, plus what scale, bias, slopes and mod_operands add. The
    sum of dO is over what dropout keeps of P.

    One program computes block_q rows of one query head; keys, values and their tangents stream past: the two products
    of dS go into one accumulator, dS V and P dV into another.

    A number taken off all dS of a row, and off dL, changes nothing but rounding. Some inputs may move a row's scores
    together by far more than apart (`tiles.rows.may_shift`); for these a first loop, over scores alone, finds the mean
    of what they add, so that the difference above is not one of large numbers. For float32 it finds the mean of dS.
    """
    reader = Reader.of(extra, spec, shape, tile)
    scoring = reader.scoring(refs.q.dtype)
    scores = Scores(reader, Reader.of(moving.extra, spec, shape, tile), scoring, mods)
    i = q_tile(program, shape, tile, spec)
    row = i * tile.block_q
    rows = row + jnp.arange(tile.block_q, dtype=jnp.int32)
    inside = None if shape.T % tile.block_q == 0 else rows < shape.T
    lse = load_stats(refs.lse, inside)  # [block_q]
    q = _load((slice(None),), inside, refs.q, shape.D)  # [block_q, D]
    d_q = None if moving.q is None else _load((slice(None),), inside, moving.q, shape.D)
    block = Block(scores, refs, moving, row, q, d_q, jnp.where(lse == -jnp.inf, jnp.inf, lse))
    seen = reader.kv_range(i)
    over = functools.partial(over_tiles, whole=shape.S >= tile.block_kv)

    zero = jnp.zeros((tile.block_q,), jnp.float32)
    base = None
    if scores.shift or (block.turns and block.exact):
        found = over(seen, block.add_mean, Sums(None, zero, zero))
        base = jnp.where(found.p > 0, found.p_ds / jnp.where(found.p > 0, found.p, 1), 0)
    idle = not (block.turns or moving.v is not None or block.exact)  # the sinks move alone
    start = Sums(columns.zeros(tile.block_q, shape.Dv, refs.v.dtype), zero, None if idle else zero)

    def run(careful):
        if idle:
            return start
        add = functools.partial(block.add, base=base, careful=careful)
        return over(seen.all_partial() if careful else seen, add, start)

    found = with_care(run, not reader.closed, lambda found: has_nan(*found.d_out))
    out = _load((slice(None),), inside, refs.out, shape.Dv)
    sinks = tuple(None if x.sinks is None else x.sinks[...] for x in (extra.operands, moving.extra.operands))
    alive = lse != -jnp.inf
    if sinks[0] is not None:
        alive = ~(_all_zero(out) & (lse == sinks[0]))
    alive &= rows < reader.geometry.q_length
    d_out, d_lse = _finished(found, out, (lse, alive, base), sinks, spec)
    columns.store(d_out_ref, d_out, inside, shape.Dv)
    store_stats(d_lse_ref, d_lse, inside)


def _all_zero(x: columns.Columns) -> jax.Array:
    """bool [rows]: whether a row is 0 throughout."""
    return functools.reduce(jnp.maximum, (jnp.abs(part.astype(jnp.float32)).max(axis=1) for part in x)) == 0


def _finished(
    found: Sums, out: columns.Columns, row: tuple, sinks: tuple, spec: AttentionSpec
) -> tuple[columns.Columns, jax.Array]:
    """(d out, d lse) of sums over all tiles; a row that is not alive has only what the sink gives to lse.

    `row` is lse, whether it is alive, and base; `sinks` are the sink and its tangent.
    """
    lse, alive, base = row
    sink, d_sink = sinks
    d_lse = jnp.where(alive, found.p_ds, 0)
    base = None if base is None else jnp.where(alive, base, 0)
    p_sink = None if sink is None else jnp.where(lse == -jnp.inf, 0, jnp.exp(sink - lse))
    factor, norm = jnp.full_like(lse, 1 / (1 - spec.dropout_rate)), jnp.ones_like(lse)
    if found.p is not None:  # without the rounding of lse, of which d lse would have as much
        norm = row_norm(jnp.where(alive, found.p, 0), p_sink)
        factor, d_lse = factor * norm, d_lse * norm
        p_sink = None if p_sink is None else p_sink * norm
    if p_sink is not None and d_sink is not None:  # one more entry of the row
        d_lse += p_sink * d_sink
    relative = d_lse  # to base
    if base is not None and found.p is not None:  # the keys' share of it: all of it less the sink's may leave nothing
        relative = d_lse if p_sink is None else d_lse - p_sink * base
        d_lse += base if p_sink is None else base * (jnp.where(alive, found.p, 0) * norm)
    parts = zip(found.d_out, out, strict=True)
    d_out = (d * factor[:, None] - x.astype(jnp.float32) * relative[:, None] for d, x in parts)
    return tuple(jnp.where(alive[:, None], x, 0) for x in d_out), d_lse


def tangent(
    primals: tuple[jax.Array, jax.Array, jax.Array, Operands],
    out: jax.Array,
    lse: jax.Array,
    tangents: dict[str, jax.Array],
    spec: AttentionSpec,
) -> tuple[jax.Array, jax.Array]:
    """(d out, d lse) along `tangents`, which holds those of the differentiable inputs that are not zero."""
    q, k, v, operands = primals
    count = q.ndim - 3
    given = Given(q, k, v, out, lse)
    lead = np.broadcast_shapes(*(x.shape[:count] for x in (*given, *tangents.values())), *leads(operands, count))
    shape = Shape.of(q, k, v, lead)
    tile = tile_for("tangent", spec, q, k, v, operands)
    moving, mods = _moving(tangents, len(operands.mods))
    extra = inputs(operands, tile, shape, spec)

    def place(i, h):
        return q_tile(i, shape, tile, spec), h

    def whole(i, h):
        return 0, h // shape.groups

    def rows(x):
        return None if x is None else shape.rows(x, tile.block_q, None, place)

    def keys(x):
        return None if x is None else shape.rows(x, None, None, whole)

    block = Given(rows(q), keys(k), keys(v), rows(out), shape.stats(lse, tile.block_q, None, place))
    moving_block = Moving(rows(moving.q), keys(moving.k), keys(moving.v), specs(moving.extra, shape, None))
    d_out = output((*lead, *out.shape[-3:]), out.dtype, q)
    d_lse = output((*lead, *lse.shape[-2:]), lse.dtype, q)
    streamed = bytes_of_head(k, v, moving.k, moving.v) // shape.groups
    grid = Grid.of(pl.cdiv(shape.T, tile.block_q), shape.H, streamed, shape, operands, spec)
    call = launch_tiles(
        functools.partial(flash_attention_tangent_kernel, spec=spec, tile=tile, shape=shape, mods=mods),
        grid,
        (
            (specs(extra, shape, None), block, moving_block),
            (rows(d_out), shape.stats(d_lse, tile.block_q, None, place)),
        ),
        (flat_output(d_out, 3), flat_output(d_lse, 2)),
        tile,
        spec,
    )
    d_out_flat, d_lse_flat = call(flattened(extra, shape), given.flattened(), moving.flattened(shape))
    return d_out_flat.reshape(d_out.shape), d_lse_flat.reshape(d_lse.shape)


def _moving(tangents: dict[str, jax.Array], count: int) -> tuple[Moving, tuple[int, ...]]:
    """(the tangents in their places, numbers of the mod_operands, of which there are `count`, that have one)."""
    mods = tuple(n for n in range(count) if f"mods.{n}" in tangents)
    others = {name: tangents[name] for name in ("scale", "bias", "alibi_slopes", "sinks") if name in tangents}
    moved = Operands(**others, mods=tuple(tangents[f"mods.{n}"] for n in mods))
    q, k, v = (tangents.get(name) for name in ("query", "key", "value"))
    return Moving(q, k, v, Inputs(moved, None, None)), mods
