"""Backward pass: gradients as a sum over tiles, plain JAX; differentiated again for second derivatives."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from flash_jax.compat import vary_like
from flash_jax.spec import AttentionSpec, Operands
from flash_jax.tiles import rows as whole_rows
from flash_jax.tiles import softmax
from flash_jax.tiles.reads import Read, dense_shape, embed, gradients, in_whole, wanted_reads
from flash_jax.tiles.rows import by_rows, needed_sums, refine, shared_gradients
from flash_jax.xla.layout import add_dense_tile, add_tile, broadcast_lead, diagonal_sums, product, round_up
from flash_jax.xla.loop import Plan, Tile, View


class Rows(NamedTuple):
    """What the tiles read, as it is or laid out for them (see xla/layout.py)."""

    q: jax.Array
    k: jax.Array
    v: jax.Array
    out_ct: jax.Array
    lse: jax.Array
    delta: jax.Array


def backward(
    primals: tuple[jax.Array, jax.Array, jax.Array, Operands],
    out: jax.Array,
    lse: jax.Array,
    out_ct: jax.Array,
    lse_ct: jax.Array | None,
    leads: dict[str, tuple[int, ...]],
    spec: AttentionSpec,
    over_keys: Callable | None = None,
) -> dict[str, jax.Array]:
    """Gradients of the inputs named in `leads` (FlashAttention-2, algorithm 2), each with the leading dims given there.

    With p = exp(s - lse) and ds = p * (out_ct v^T - delta): dv = p^T out_ct, dq = scale ds k, dk = scale ds^T q,
    dbias = ds, dscale = sum of ds * (q k^T). `out` and `lse` are independent inputs, so the whole is a sum over tiles
    in all of them.

    `over_keys(f)` adds up the dicts f(k, v, operands, spec) of the parts of the keys, where `key` and `value` are but
    one part; what it returns under "key" and "value" belongs to that one.
    """
    q, k, v, operands = primals
    T, S = spec.whole or (q.shape[-3], k.shape[-3])
    add_up = over_keys or (lambda f: f(k, v, operands, spec))
    dead = softmax.dead_rows(out, lse, operands.sinks)
    if spec.score_mod is not None:  # rows that it makes dead may hold NaN; other reasons the tiles know
        q, out_ct = (softmax.without_dead(x, dead) for x in (q, out_ct))
    delta = softmax.delta(out, out_ct, dead, lse_ct)
    p_sink = None if operands.sinks is None else whole_rows.sink_probability(operands.sinks, lse)
    rows = Rows(q, k, v, out_ct, softmax.dead_to_inf(lse, dead), delta)
    lead = broadcast_lead((lse, 2), (out_ct, 3), (lse_ct, 2))
    if q.dtype.itemsize >= 4:
        sums = add_up(functools.partial(_row_sums, lax.stop_gradient(rows), lead))
        delta, norm = refine(sums["p_sums"], sums["ds_sums"], delta, lse_ct, p_sink)
        per_row = jnp.swapaxes(norm, -1, -2)[..., None]
        p_sink = None if p_sink is None else p_sink * norm
        rows = rows._replace(out_ct=out_ct * per_row, delta=delta * norm)

    found = add_up(functools.partial(_added, rows, lead, leads))
    sums = {name: found.pop(name) for name in list(found) if name.endswith("sums")}
    total = jnp.where(dead, 0, whole_rows.row_total(delta, lse_ct, p_sink))
    row = delta, total, p_sink, dead
    if mod := spec.score_mod or spec.mask_mod:
        entries, sizes = {}, (q.shape[-3], k.shape[-3])
        for n, x in wanted_reads(spec.score_mod, leads).items():
            by_row = x.kind == "rows"
            entry = whole_rows.row_gradient(sums, _name(n), row) if by_row else found.pop(_name(n))
            entries[n] = x, in_whole(x, entry, operands, sizes, spec.whole) if by_row else entry
        found |= gradients(entries, operands, leads, mod, (T, S))
    found |= shared_gradients(operands, {n: own for n, own in leads.items() if n not in found}, sums, row, lse_ct)
    named = dict(operands.items(), query=q, key=k, value=v)
    return {name: found[name].astype(named[name].dtype) for name in leads}


def _laid(plan: Plan, rows: Rows, k: jax.Array, v: jax.Array) -> Rows:
    """The rows, with these keys and values, laid out for tiles."""
    q, out_ct = plan.q_rows(rows.q), plan.q_rows(rows.out_ct)
    return Rows(q, plan.kv_rows(k), plan.kv_rows(v), out_ct, plan.q_stats(rows.lse), plan.q_stats(rows.delta))


def _added(rows: Rows, lead, leads: dict, k, v, operands: Operands, spec: AttentionSpec) -> dict[str, jax.Array]:
    """What the tiles add up to: gradients, sums over rows, and what the reads of a score_mod meet."""
    plan = Plan.of(rows.q, k, operands, spec)
    laid = _laid(plan, rows, k, v)
    totals = vary_like(_zeros(plan, (rows.q, k, v, operands), leads, lead), rows, k, v, operands)
    totals = plan.scan(lambda totals, tile: _add_tile(plan, totals, tile, laid, leads), totals)

    T, S = plan.lengths
    finish = {
        "query": lambda x: x[..., :T, :, :, :].reshape(*x.shape[:-4], T, *rows.q.shape[-2:]),
        "key": lambda x: x[..., :S, :, :],
        "value": lambda x: x[..., :S, :, :],
        "bias": lambda x: x.reshape(*leads["bias"], *operands.bias.shape[-3:]),
    }
    found = {name: finish[name](x) for name, x in totals.items() if name in finish}
    if "bias" in found and spec.whole is not None and operands.bias.shape[-1] == S:
        found["bias"] = embed(found["bias"], found["bias"].ndim - 1, operands.col_start, spec.whole[1])
    for n, x in wanted_reads(spec.score_mod, leads).items():
        if x.kind != "rows":
            found[_name(n)] = in_whole(x, _read_sums(plan, x, totals[_name(n)]), operands, (T, S), spec.whole)
    stats = (*lead, rows.q.shape[-2], T)
    return found | {n: x[..., :T].reshape(x.shape[0], *stats) for n, x in totals.items() if n.endswith("sums")}


def _zeros(plan: Plan, primals, leads, lead) -> dict[str, jax.Array]:
    """The totals to which tiles add."""
    q, k, v, operands = primals
    T, S = plan.lengths
    dtype = np.promote_types(q.dtype, np.float32)
    stats = plan.q_shape(lead, 1)[:-1]
    shapes = {
        "query": lambda lead: (*lead, stats[-1], *plan.heads, q.shape[-1]),
        "key": lambda lead: plan.kv_shape(lead, k.shape[-1]),
        "value": lambda lead: plan.kv_shape(lead, v.shape[-1]),
        "bias": lambda lead: plan.shape_by_head((*lead, *operands.bias.shape[-3:]), 2),
    }
    shapes = {name: shapes[name](own) for name, own in leads.items() if name in shapes}
    if by_rows(operands, leads, S):
        del shapes["bias"]
    reads = wanted_reads(plan.spec.score_mod, leads)
    shapes |= {
        _name(n): _read_shape(plan, x, plan.spec.score_mod, leads, lead) for n, x in reads.items() if x.kind != "rows"
    }
    by_row = tuple(_name(n) for n, x in reads.items() if x.kind == "rows")
    shapes |= {f"{name}_sums": (1 if name == "ds" else 2, *stats) for name in needed_sums(operands, leads, S, by_row)}
    return {name: jnp.zeros(shape, dtype) for name, shape in shapes.items()}


def _name(number: int) -> str:
    """What the sums of a read of a score_mod are called."""
    return f"read.{number}"


def _read_shape(plan: Plan, read: Read, mod: Any, leads: dict, lead: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of what a read sums up over tiles: columns, diagonals (i - j ascending), or all entries."""
    (T, S), (block_q, block_kv) = plan.lengths, plan.blocks
    if read.kind == "columns":
        return *lead, *plan.heads, round_up(S, block_kv)
    if read.kind == "diagonals":
        return *lead, *plan.heads, round_up(T, block_q) + round_up(S, block_kv) - 1
    sizes = plan.heads[0] * plan.heads[1], T, S
    return plan.shape_by_head(dense_shape(read, leads, plan.operands, mod, sizes), 2)


def _read_sums(plan: Plan, read: Read, x: jax.Array) -> jax.Array:
    """The sums of a read by columns, diagonals or entries, as `tiles.reads.operand_gradient` takes them."""
    after = 2 if read.kind == "dense" else 1
    K, G = x.shape[-after - 2 : -after]
    x = x.reshape(*x.shape[: -after - 2], K * G, *x.shape[x.ndim - after :])
    (T, S), padded = plan.lengths, round_up(plan.lengths[1], plan.blocks[1])
    if read.kind == "diagonals":
        return x[..., padded - S : padded + T - 1]
    return x if read.kind == "dense" else x[..., :S]


def _add_read(plan: Plan, total: jax.Array, read: Read, x: jax.Array, tile: Tile) -> jax.Array:
    """The sums of a read by columns, diagonals or entries, with those of a tile x."""
    if read.kind == "columns":
        return add_tile(total, x.sum(-2), tile.col, -1)
    if read.kind == "diagonals":
        padded = round_up(plan.lengths[1], plan.blocks[1])
        return add_tile(total, diagonal_sums(x), tile.row - tile.col + (padded - plan.blocks[1]), -1)
    return add_dense_tile(total, x, (tile.row, tile.col))


def _add_tile(plan: Plan, totals: dict[str, jax.Array], tile: Tile, rows: Rows, leads: dict) -> dict[str, jax.Array]:
    """The totals with what one tile adds."""
    totals, spec, view = dict(totals), plan.spec, plan.view(tile)
    q, k, ct = view.q(rows.q), view.kv(rows.k), view.q(rows.out_ct)
    qk, p, ds = _entries(plan, view, rows)
    if "value" in totals:
        dv = product("...kgqs,...qkge->...ske", view.drop(p).astype(ct.dtype), ct, spec)
        totals["value"] = add_tile(totals["value"], dv, tile.col, -3)
    if "bias" in totals:
        totals["bias"] = add_dense_tile(totals["bias"], ds, (tile.row, tile.col))
    slope = plan.scoring.slope(qk, view.mod)
    to_qk = 1 if slope is None else slope
    entries = {"scale": lambda: qk * to_qk, "alibi_slopes": lambda: -view.distance}
    for n, read in wanted_reads(spec.score_mod, leads).items():
        weight = functools.partial(view.mod.weight, plan.scoring.capped(qk), n)
        entries[_name(n)] = weight
        if read.kind != "rows":
            totals[_name(n)] = _add_read(plan, totals[_name(n)], read, ds * weight(), tile)
    if "ds_sums" in totals:
        totals["ds_sums"] = add_tile(totals["ds_sums"], ds.sum(-1)[None], tile.row, -1)
    for name, entry in entries.items():
        if f"{name}_sums" in totals:
            x = entry()
            sums = jnp.stack(jnp.broadcast_arrays((ds * x).sum(-1), (p * x).sum(-1)))
            totals[f"{name}_sums"] = add_tile(totals[f"{name}_sums"], sums, tile.row, -1)
    ds = (ds * to_qk * plan.scoring.scale.value).astype(q.dtype)
    if "query" in totals:
        totals["query"] = add_tile(totals["query"], product("...kgqs,...skd->...qkgd", ds, k, spec), tile.row, -4)
    if "key" in totals:
        totals["key"] = add_tile(totals["key"], product("...kgqs,...qkgd->...skd", ds, q, spec), tile.col, -3)
    return totals


def _entries(plan: Plan, view: View, rows: Rows) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(q k^T, p, ds) of a tile, [..., K, G, block_q, block_kv]."""
    qk = product("...qkgd,...skd->...kgqs", view.q(rows.q), view.kv(rows.k), plan.spec)
    p = view.probability(qk, rows.lse)
    dp = view.drop(product("...qkge,...ske->...kgqs", view.q(rows.out_ct), view.kv(rows.v), plan.spec))
    ds = p * (dp - view.stat(rows.delta))
    return qk, p, ds if view.allowed is None else jnp.where(view.allowed, ds, 0)


def _row_sums(rows: Rows, lead, k, v, operands: Operands, spec: AttentionSpec) -> dict[str, jax.Array]:
    """Sums of p and of ds over each row, [..., H, T], without the rounding of `out` and `lse`: for float32 and wider.

    A float32 lse of 4 to 8 is rounded by up to 2.4e-7, and with it every p of the row, by more than all that follows.
    So the row is summed up once more: its p must add to 1 (less the sink's share), and delta is the sum of p * dp.
    """
    plan = Plan.of(rows.q, k, operands, spec)
    laid = _laid(plan, rows, k, v)
    zeros = jnp.zeros((2, *plan.q_shape(lead, 1)[:-1]), rows.lse.dtype)

    def body(total, tile):
        _, p, ds = _entries(plan, plan.view(tile), laid)
        return add_tile(total, jnp.stack(jnp.broadcast_arrays(p.sum(-1), ds.sum(-1))), tile.row, -1)

    T = plan.lengths[0]
    sums = plan.scan(body, vary_like(zeros, laid, operands))[..., :T].reshape(2, *lead, rows.q.shape[-2], T)
    return {"p_sums": sums[0], "ds_sums": sums[1]}
