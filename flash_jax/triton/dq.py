"""Backward kernel for what belongs to a query: its gradient, sums over its row of scores, and the row's dS itself."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from flash_jax.spec import AttentionSpec, Operands
from flash_jax.tiles.masks import Int, TileRange
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
from flash_jax.triton.operands import Reader, flattened, inputs, specs
from flash_jax.triton.order import Grid, bytes_of_head, launch_tiles
from flash_jax.triton.tiling import tile_for


def flash_attention_dq_kernel(  # noqa: PLR0913
    program, extra, refs: Residuals, before_ref, dq_ref, sum_refs, ds_ref, *, spec, tile, shape
):
    """dQ_i = scale sum_j dS_ij K_j, with dS = P * (dO V^T - delta) and P = exp(S - L) (algorithm 2, lines 11-15).

    One program computes block_q rows of one query head; key/value tiles stream past.
    `sum_refs`, by name, take sums over each row: "ds", "p", and for "scale", "alibi_slopes" and "read.n" those of x dS
    and x P, with x = q . k (bent by softcap and score_mod), x = -distance, and x the derivative of the score to what
    the n-th read of the score_mod gives. dq_ref is None where only these are wanted. ds_ref, unless it is None, takes
    dS, plus what `before_ref` holds, also where nothing is visible.
    """
    reader = Reader.of(extra, spec, shape, tile)
    scoring = reader.scoring(refs.q.dtype)
    i = q_tile(program, shape, tile, spec)
    row = i * tile.block_q
    rows = row + jnp.arange(tile.block_q, dtype=jnp.int32)
    inside = None if shape.T % tile.block_q == 0 else rows < shape.T
    whole = (slice(None),)
    q = columns.load(refs.q, whole, inside, shape.D)  # [block_q, D]
    out_ct = columns.load(refs.out_ct, whole, inside, shape.Dv)  # [block_q, Dv]
    lse, delta = load_stats(refs.lse, inside), load_stats(refs.delta, inside)  # [block_q]

    def body(j, carry, masked, careful):
        dq, sums = carry
        col = j * tile.block_kv
        view = reader.view(row, col, masked, careful=careful)
        here = (pl.ds(col, tile.block_kv),)
        k, v = columns.load(refs.k, here, view.keep, shape.D), columns.load(refs.v, here, view.keep, shape.Dv)
        qk = columns.inner(q, k, spec)  # [block_q, block_kv]
        p = probabilities(qk, lse[:, None], view, scoring)
        ds = score_gradient(p, columns.inner(out_ct, v, spec), delta[:, None], view, scoring, spec)
        _store_entries(ds_ref, before_ref, ds, col, inside, shape.S if masked else None)
        entries = {"scale": lambda: to_product(qk, qk, view, scoring), "alibi_slopes": lambda: -view.distance}
        entries |= {n: functools.partial(weight_of_read, n, qk, view, scoring) for n in sums if n.startswith("read.")}
        sums = {name: _add_sums(total, name, p[0], ds, entries) for name, total in sums.items()}
        if dq is not None:
            dq = columns.add_product(dq, to_product(ds, qk, view, scoring), k, spec)
        return dq, sums

    dq = None if dq_ref is None else columns.zeros(tile.block_q, shape.D, refs.q.dtype)
    sums = {name: [jnp.zeros((tile.block_q,), jnp.float32) for _ in refs_] for name, refs_ in sum_refs.items()}
    start, seen = (dq, sums), reader.kv_range(i)

    def run(careful):
        tiles = seen.all_partial() if careful else seen
        return over_tiles(tiles, functools.partial(body, careful=careful), start, whole=shape.S >= tile.block_kv)

    dq, sums = with_care(run, dq is not None and not reader.closed, lambda found: has_nan(*found[0]))
    alive = (lse != jnp.inf) & (rows < reader.geometry.q_length)
    if dq_ref is not None:
        scale = scoring.scale.value
        columns.store(dq_ref, tuple(jnp.where(alive[:, None], part * scale, 0) for part in dq), inside, shape.D)
    for name, totals in sums.items():
        for ref, x in zip(sum_refs[name], totals, strict=True):
            store_stats(ref, jnp.where(alive, x, 0), inside)
    if ds_ref is not None:
        _store_nothing(ds_ref, before_ref, seen, inside, (tile, shape))


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
    here = (slice(None), pl.ds(col, ds.shape[1]))
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


def query_pass(
    residuals: Residuals,
    operands: Operands,
    lead: tuple[int, ...],
    sums: tuple[str, ...],
    dtype: jnp.dtype | None,
    spec: AttentionSpec,
    entries: jax.ShapeDtypeStruct | None = None,
    before: jax.Array | None = None,
) -> tuple[jax.Array | None, dict[str, jax.Array], jax.Array | None]:
    """(dq of `dtype`, or None where that is None; {name + "_sums": [n, ..., H, T]}; dS), with all leading dims.

    `entries` is what dS shall be like, None if it is not wanted; it is added to `before`, whose place it takes if that
    has the same dtype.
    """
    q, k, v = residuals[:3]
    shape = Shape.of(q, k, v, lead)
    name = "dq" if entries is None else "partial" if entries.dtype.itemsize == 4 else "stored"
    tile = tile_for(name, spec, q, k, v, operands)
    extra = inputs(operands, tile, shape, spec)

    def place(i, h):
        return q_tile(i, shape, tile, spec), h

    def whole(i, h):
        return 0, h // shape.groups

    dq = None if dtype is None else output((*lead, *q.shape[-3:]), dtype, q)
    stat = output((*lead, shape.H, shape.T), jnp.float32, q)
    totals = {name: [stat] * (1 if name in ("ds", "p") else 2) for name in sums}
    block = Residuals(
        shape.rows(q, tile.block_q, None, place),
        shape.rows(k, None, None, whole),
        shape.rows(v, None, None, whole),
        shape.rows(residuals.out_ct, tile.block_q, None, place),
        shape.stats(residuals.lse, tile.block_q, None, place),
        shape.stats(residuals.delta, tile.block_q, None, place),
    )
    ds = None if entries is None else output(entries.shape, entries.dtype, q)
    strip = None if ds is None else shape.entries(ds, tile.block_q, place)
    out_specs = (
        None if dq is None else shape.rows(dq, tile.block_q, None, place),
        {name: [shape.stats(x, tile.block_q, None, place) for x in xs] for name, xs in totals.items()},
        strip,
    )
    out_shapes = (
        None if dq is None else flat_output(dq, 3),
        {name: [flat_output(x, 2) for x in xs] for name, xs in totals.items()},
        None if ds is None else flat_output(ds, 3),
    )
    arrays = flattened(extra, shape), residuals.flattened(), None if before is None else flat(before, 3)
    in_place = ds is not None and before is not None and before.dtype == ds.dtype
    aliases = {len(jax.tree.leaves(arrays)) - 1: len(jax.tree.leaves(out_shapes)) - 1} if in_place else {}
    streamed = bytes_of_head(k, v) // shape.groups
    grid = Grid.of(pl.cdiv(shape.T, tile.block_q), shape.H, streamed, shape, operands, spec)
    call = launch_tiles(
        functools.partial(flash_attention_dq_kernel, spec=spec, tile=tile, shape=shape),
        grid,
        ((specs(extra, shape, None), block, None if before is None else strip), out_specs),
        out_shapes,
        tile,
        spec,
        None if dq is not None else "flash_attention_row_sums_kernel",
        aliases,
    )
    dq_flat, sums_flat, ds_flat = call(*arrays)
    found = {f"{key}_sums": jnp.stack([x.reshape(stat.shape) for x in xs]) for key, xs in sums_flat.items()}
    return None if dq is None else dq_flat.reshape(dq.shape), found, None if ds is None else ds_flat.reshape(ds.shape)
