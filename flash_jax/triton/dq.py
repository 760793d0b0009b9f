"""Backward kernel for what belongs to a query: its gradient, sums over its row of scores, and the row's dS itself."""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from flash_jax.spec import AttentionSpec, Operands
from flash_jax.tiles.masks import Int, TileRange
from flash_jax.tiles.scores import Scoring
from flash_jax.triton import columns
from flash_jax.triton.entries import Residuals, probabilities, score_gradient, to_product, weight_of_read
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
from flash_jax.triton.tiling import Tile, tile_for


class Given(NamedTuple):
    """What a program reads of one example: arrays, specs or refs."""

    extra: Inputs
    residuals: Residuals

    def with_bias(self, bias: Any) -> "Given":
        """With another bias."""
        operands = dataclasses.replace(self.extra.operands, bias=bias)
        return self._replace(extra=self.extra._replace(operands=operands))


class Found(NamedTuple):
    """What a program writes of one example: arrays, specs, refs, or the sums so far."""

    dq: Any
    sums: dict[str, list]


def flash_attention_dq_kernel(
    program, given: tuple[Given, ...], before_ref, found: tuple[Found, ...], ds_ref, *, spec, tile, shape
):
    """dQ_i = scale sum_j dS_ij K_j, with dS = P * (dO V^T - delta) and P = exp(S - L) (algorithm 2, lines 11-15).

    One program computes block_q rows of one query head, of one example or of each `given`; key/value tiles stream past.
    `sums` of what is `found`, by name, take sums over each row: "ds", "p", and for "scale", "alibi_slopes" and "read.n"
    those of x dS and x P, with x = q . k (bent by softcap and score_mod), x = -distance, and x the derivative of the
    score to what the n-th read of the score_mod gives. `dq` is None where only these are wanted. ds_ref, unless it is
    None, takes dS, added up over the examples, plus what `before_ref` holds, also where nothing is visible.
    """
    i = q_tile(program, shape, tile, spec)
    row = i * tile.block_q
    rows = row + jnp.arange(tile.block_q, dtype=jnp.int32)
    inside = None if shape.T % tile.block_q == 0 else rows < shape.T
    bias = given[0].extra.operands.bias
    examples = [_Queries.load(x.with_bias(bias), inside, (spec, tile, shape)) for x in given]

    def body(j, carry, masked, careful):
        col, total, after = j * tile.block_kv, None, []
        for x, so_far in zip(examples, carry, strict=True):
            entries = x.entries(row, col, masked, careful)
            total = entries.ds if total is None else total + entries.ds
            if len(after) == len(examples) - 1:  # before the last product, during which no registers hold it then
                _store_entries(ds_ref, before_ref, total, col, inside, shape.S if masked else None)
            after.append(x.added(so_far, entries))
        return after

    start = [
        Found(
            None if x.dq is None else columns.zeros(tile.block_q, shape.D, own.residuals.q.dtype),
            {name: [jnp.zeros((tile.block_q,), jnp.float32) for _ in refs] for name, refs in x.sums.items()},
        )
        for x, own in zip(found, given, strict=True)
    ]
    reader = examples[0].reader  # examples that share a program attend the same tiles
    seen = reader.kv_range(i)

    def run(careful):
        tiles = seen.all_partial() if careful else seen
        return over_tiles(tiles, functools.partial(body, careful=careful), start, whole=shape.S >= tile.block_kv)

    guard = found[0].dq is not None and not reader.closed
    results = with_care(run, guard, lambda results: has_nan(*(part for x in results for part in x.dq)))
    for x, (dq, sums), refs in zip(examples, results, found, strict=True):
        alive = (x.lse != jnp.inf) & (rows < x.reader.geometry.q_length)
        if dq is not None:
            scale = x.scoring.scale.value
            columns.store(refs.dq, tuple(jnp.where(alive[:, None], part * scale, 0) for part in dq), inside, shape.D)
        for name, totals in sums.items():
            for ref, total in zip(refs.sums[name], totals, strict=True):
                store_stats(ref, jnp.where(alive, total, 0), inside)
    if ds_ref is not None:
        _store_nothing(ds_ref, before_ref, seen, inside, (tile, shape))


class _Entries(NamedTuple):
    """A tile of one example: its keys, q . k, probabilities before dropout, dS."""

    k: columns.Columns
    view: View
    qk: jax.Array
    p: jax.Array
    ds: jax.Array


class _Queries(NamedTuple):
    """The queries of a program in one example, which stay while keys stream past."""

    refs: Residuals
    reader: Reader
    scoring: Scoring
    q: columns.Columns  # [block_q, D]
    out_ct: columns.Columns  # [block_q, Dv]
    lse: jax.Array  # [block_q]
    delta: jax.Array

    @classmethod
    def load(cls, given: Given, inside: jax.Array | None, static: tuple[AttentionSpec, Tile, Shape]) -> "_Queries":
        """Reads them."""
        (extra, refs), (spec, tile, shape), whole = given, static, (slice(None),)
        reader = Reader.of(extra, spec, shape, tile)
        q = columns.load(refs.q, whole, inside, shape.D)
        out_ct = columns.load(refs.out_ct, whole, inside, shape.Dv)
        stats = load_stats(refs.lse, inside), load_stats(refs.delta, inside)
        return cls(refs, reader, reader.scoring(refs.q.dtype), q, out_ct, *stats)

    def entries(self, row: Int, col: Int, masked: bool, careful: bool) -> _Entries:
        """The tile of the keys from `col` on."""
        spec, tile, shape = self.reader.spec, self.reader.tile, self.reader.shape
        view = self.reader.view(row, col, masked, careful=careful)
        here = (pl.ds(col, tile.block_kv),)
        k, v = (columns.load(x, here, view.keep, n) for x, n in ((self.refs.k, shape.D), (self.refs.v, shape.Dv)))
        qk = columns.inner(self.q, k, spec)  # [block_q, block_kv]
        p = probabilities(qk, self.lse[:, None], view, self.scoring)
        dp = columns.inner(self.out_ct, v, spec)
        return _Entries(k, view, qk, p[0], score_gradient(p, dp, self.delta[:, None], view, self.scoring, spec))

    def added(self, so_far: Found, entries: _Entries) -> Found:
        """With what a tile adds."""
        (dq, sums), (k, view, qk, p, ds) = so_far, entries
        weights = {"scale": lambda: to_product(qk, qk, view, self.scoring), "alibi_slopes": lambda: -view.distance}
        for name in sums:
            if name.startswith("read."):
                weights[name] = functools.partial(weight_of_read, name, qk, view, self.scoring)
        sums = {name: _add_sums(total, name, p, ds, weights) for name, total in sums.items()}
        if dq is not None:
            dq = columns.add_product(dq, to_product(ds, qk, view, self.scoring), k, self.reader.spec)
        return Found(dq, sums)


def _store_nothing(ref: Any, before_ref: Any, seen: Any, inside: jax.Array | None, static: tuple) -> None:
    """Writes the tiles of dS that are not in the range `seen`: 0, plus what `before_ref` has there."""
    tile, shape = static
    ds = jnp.zeros((tile.block_q, tile.block_kv), jnp.float32)

    def fill(j, carry, masked):
        _store_entries(ref, before_ref, ds, j * tile.block_kv, inside, shape.S)
        return carry

    for start, stop in ((0, seen.start), (jnp.maximum(seen.start, seen.stop), pl.cdiv(shape.S, tile.block_kv))):
        over_tiles(TileRange(start, stop, stop, stop), fill, (), whole=False)


def _store_entries(ref: Any, before_ref: Any, ds: jax.Array, col: Int, inside: jax.Array | None, S: int | None) -> None:
    """Writes a tile of dS to a ref [block_q, S], if there is one, plus what `before_ref` has there.

    S is None where the tile is known to end before it.
    """
    if ref is None:
        return
    here = (pl.ds(0 * col, ds.shape[0]), pl.ds(col, ds.shape[1]))  # both of one type, as interpret mode wants it in x64
    keep = None if inside is None else jnp.broadcast_to(inside[:, None], ds.shape)
    if S is not None and S % ds.shape[1]:
        exists = jnp.broadcast_to((col + jnp.arange(ds.shape[1], dtype=jnp.int32) < S)[None, :], ds.shape)
        keep = exists if keep is None else keep & exists
    if before_ref is not None:
        before = before_ref.at[here]
        ds += before[...] if keep is None else plgpu.load(before, mask=keep, other=0)
    plgpu.store(ref.at[here], ds.astype(ref.dtype), mask=keep)


def _add_sums(totals: list, name: str, p: jax.Array, ds: jax.Array, entries: dict) -> list:
    """The sums over each row of a tile, added to those so far."""
    if name in ("ds", "p"):
        return [totals[0] + {"ds": ds, "p": p}[name].sum(axis=1)]
    x = entries[name]()
    return [totals[0] + (ds * x).sum(axis=1), totals[1] + (p * x).sum(axis=1)]


def query_pass(  # noqa: PLR0913
    residuals: Residuals,
    operands: Operands,
    lead: tuple[int, ...],
    sums: tuple[str, ...],
    dtype: jnp.dtype | None,
    spec: AttentionSpec,
    entries: jax.ShapeDtypeStruct | None = None,
    before: jax.Array | None = None,
    *,
    together: bool = False,
) -> tuple[jax.Array | None, dict[str, jax.Array], jax.Array | None]:
    """(dq of `dtype`, or None where that is None; {name + "_sums": [n, ..., H, T]}; dS), with all leading dims.

    `entries` is what dS shall be like, None if it is not wanted; it is added to `before`, whose place it takes if that
    has the same dtype. With `together` each program has its rows of all examples, which must share the bias and attend
    the same tiles, and adds dS up over them.
    """
    q, k, v = residuals[:3]
    shape = Shape.of(q, k, v, lead)
    tile = tile_for(_name(entries, together), spec, q, k, v, operands)
    extra = inputs(operands, tile, shape, spec)
    programs = dataclasses.replace(shape, lead=(1,)) if together else shape  # with an output for each example

    def place(i, h):
        return q_tile(i, shape, tile, spec), h

    def whole(i, h):
        return 0, h // shape.groups

    dq = None if dtype is None else output((*programs.lead, *q.shape[-3:]), dtype, q)
    stat = output((*programs.lead, shape.H, shape.T), jnp.float32, q)
    found = Found(dq, {name: [stat] * (1 if name in ("ds", "p") else 2) for name in sums})
    block = Residuals(
        shape.rows(q, tile.block_q, None, place),
        shape.rows(k, None, None, whole),
        shape.rows(v, None, None, whole),
        shape.rows(residuals.out_ct, tile.block_q, None, place),
        shape.stats(residuals.lse, tile.block_q, None, place),
        shape.stats(residuals.delta, tile.block_q, None, place),
    )
    given_specs = (Given(specs(extra, shape, None), block),)
    found_specs = Found(
        None if dq is None else shape.rows(dq, tile.block_q, None, place),
        {name: [shape.stats(x, tile.block_q, None, place) for x in xs] for name, xs in found.sums.items()},
    )
    found_shapes = Found(
        None if dq is None else flat_output(dq, 3),
        {name: [flat_output(x, 2) for x in xs] for name, xs in found.sums.items()},
    )
    ds = None if entries is None else output(entries.shape, entries.dtype, q)
    strip = None if ds is None else shape.entries(ds, tile.block_q, place)
    given = (Given(flattened(extra, shape), residuals.flattened()),)
    count = shape.examples if together else 1
    if together:
        others = range(1, count)
        given += tuple(given[0].with_bias(None) for _ in others)  # the first one's is for all
        blocks = given_specs[0].with_bias(None)
        given_specs = _of_example(given_specs[0], 0), *(_of_example(blocks, n) for n in others)
    arrays = given, None if before is None else flat(before, 3)
    out_shapes = (found_shapes,) * count, None if ds is None else flat_output(ds, 3)
    in_place = ds is not None and before is not None and before.dtype == ds.dtype  # each is the last of its arrays
    aliases = {len(jax.tree.leaves(arrays)) - 1: len(jax.tree.leaves(out_shapes)) - 1} if in_place else {}
    streamed = bytes_of_head(k, v) * count // shape.groups
    call = launch_tiles(
        functools.partial(flash_attention_dq_kernel, spec=spec, tile=tile, shape=shape),
        Grid.of(pl.cdiv(shape.T, tile.block_q), shape.H, streamed, programs, operands, spec),
        ((given_specs, None if before is None else strip), ((found_specs,) * count, strip)),
        out_shapes,
        tile,
        spec,
        None if dq is not None else "flash_attention_row_sums_kernel",
        aliases,
    )
    results, ds_flat = call(*arrays)
    joined = jax.tree.map(lambda *parts: jnp.concatenate(parts) if together else parts[0], *results)
    sums_found = {
        f"{name}_sums": jnp.stack([x.reshape(*lead, *x.shape[1:]) for x in xs]) for name, xs in joined.sums.items()
    }
    dq_found = None if dq is None else joined.dq.reshape(*lead, *joined.dq.shape[1:])
    return dq_found, sums_found, None if ds is None else ds_flat.reshape(ds.shape)


def _name(entries: jax.ShapeDtypeStruct | None, together: bool) -> str:
    """The name by which `tile_for` knows the kernel."""
    if entries is None:
        return "dq"
    return "paired" if together else "partial" if entries.dtype.itemsize == 4 else "stored"


def _of_example(blocks: Given, number: int) -> Given:
    """Block specs of the example of this number, whatever that of the program."""

    def placed(block):
        return dataclasses.replace(block, index_map=lambda tile, head, _: block.index_map(tile, head, number))

    return jax.tree.map(placed, blocks, is_leaf=lambda x: isinstance(x, pl.BlockSpec))
