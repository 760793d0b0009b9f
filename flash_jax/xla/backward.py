"""Backward pass: gradients as a sum over tiles, plain JAX; differentiated again for second derivatives."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from flash_jax.compat import vary_like
from flash_jax.spec import AttentionSpec, Operands
from flash_jax.tiles import rows as whole_rows
from flash_jax.tiles import softmax
from flash_jax.tiles.rows import ROW_SUMS, by_rows, needed_sums, refine, shared_gradients
from flash_jax.xla.layout import add_dense_tile, add_tile, broadcast_lead, product
from flash_jax.xla.loop import Plan, Tile, View


class Rows(NamedTuple):
    """What the tiles read, laid out for them (see xla/layout.py)."""

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
) -> dict[str, jax.Array]:
    """Gradients of the inputs named in `leads` (FlashAttention-2, algorithm 2), each with the leading dims given there.

    With p = exp(s - lse) and ds = p * (out_ct v^T - delta): dv = p^T out_ct, dq = scale ds k, dk = scale ds^T q,
    dbias = ds, dscale = sum of ds * (q k^T). `out` and `lse` are independent inputs, so the whole is a sum over tiles
    in all of them.
    """
    q, k, v, operands = primals
    plan = Plan.of(q, k, operands, spec)
    dead = softmax.dead_rows(out, lse, operands.sinks)
    delta = softmax.delta(out, out_ct, dead, lse_ct)
    p_sink = None if operands.sinks is None else whole_rows.sink_probability(operands.sinks, lse)
    lse_rows = plan.q_stats(softmax.dead_to_inf(lse, dead))
    rows = Rows(plan.q_rows(q), plan.kv_rows(k), plan.kv_rows(v), plan.q_rows(out_ct), lse_rows, plan.q_stats(delta))
    lead = broadcast_lead((lse, 2), (out_ct, 3), (lse_ct, 2))
    everything = (primals, out, lse, out_ct, lse_ct)
    if q.dtype.itemsize >= 4:
        delta, norm = _refined(plan, lax.stop_gradient(rows), delta, lse_ct, p_sink, lead)
        per_row = jnp.swapaxes(norm, -1, -2)[..., None]
        p_sink = None if p_sink is None else p_sink * norm
        rows = rows._replace(out_ct=plan.q_rows(out_ct * per_row), delta=plan.q_stats(delta * norm))

    totals = vary_like(_zeros(plan, primals, leads, lead), everything)
    totals = plan.scan(lambda totals, tile: _add_tile(plan, totals, tile, rows), totals)

    T, S = plan.lengths
    stats = (*lead, *lse.shape[-2:])
    sums = {name: x[..., :T].reshape(x.shape[0], *stats) for name, x in totals.items() if name.endswith("sums")}
    total = jnp.where(dead, 0, whole_rows.row_total(delta, lse_ct, p_sink))
    finish = {
        "query": lambda x: x[..., :T, :, :, :].reshape(*x.shape[:-4], T, *q.shape[-2:]),
        "key": lambda x: x[..., :S, :, :],
        "value": lambda x: x[..., :S, :, :],
        "bias": lambda x: x.reshape(*leads["bias"], *operands.bias.shape[-3:]),
    }
    found = {name: finish[name](x) for name, x in totals.items() if name in finish}
    found |= shared_gradients(operands, leads, sums, (delta, total, p_sink, dead), lse_ct)
    named = dict(vars(operands), query=q, key=k, value=v)
    return {name: found[name].astype(named[name].dtype) for name in leads}


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
    shapes |= {f"{name}_sums": (1 if name == "ds" else 2, *stats) for name in needed_sums(operands, leads, S)}
    return {name: jnp.zeros(shape, dtype) for name, shape in shapes.items()}


def _add_tile(plan: Plan, totals: dict[str, jax.Array], tile: Tile, rows: Rows) -> dict[str, jax.Array]:
    """The totals with what one tile adds."""
    totals, spec, view = dict(totals), plan.spec, plan.view(tile)
    q, k, ct = view.q(rows.q), view.kv(rows.k), view.q(rows.out_ct)
    qk, p, ds = _entries(plan, view, rows)
    if "value" in totals:
        dv = product("...kgqs,...qkge->...ske", view.drop(p).astype(ct.dtype), ct, spec)
        totals["value"] = add_tile(totals["value"], dv, tile.col, -3)
    if "bias" in totals:
        totals["bias"] = add_dense_tile(totals["bias"], ds, (tile.row, tile.col))
    slope = plan.scoring.slope(qk)
    to_qk = 1 if slope is None else slope
    entries = {"scale": lambda: qk * to_qk, "alibi_slopes": lambda: -view.distance}
    if "ds_sums" in totals:
        totals["ds_sums"] = add_tile(totals["ds_sums"], ds.sum(-1)[None], tile.row, -1)
    for name in ROW_SUMS:
        if f"{name}_sums" in totals:
            x = entries[name]()
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
    p = view.probability(qk, rows.lse, rows.q.dtype)
    dp = view.drop(product("...qkge,...ske->...kgqs", view.q(rows.out_ct), view.kv(rows.v), plan.spec))
    ds = p * (dp - view.stat(rows.delta))
    return qk, p, ds if view.allowed is None else jnp.where(view.allowed, ds, 0)


def _refined(plan: Plan, rows: Rows, delta, lse_ct, p_sink, lead) -> tuple[jax.Array, jax.Array]:
    """(delta, and a factor for p), [..., H, T], without the rounding of `out` and `lse`; for float32 and wider inputs.

    A float32 lse of 4 to 8 is rounded by up to 2.4e-7, and with it every p of the row, by more than all that follows.
    So the row is summed up once more: its p must add to 1 (less the sink's share), and delta is the sum of p * dp.
    """
    T = plan.lengths[0]
    zeros = jnp.zeros((2, *plan.q_shape(lead, 1)[:-1]), rows.lse.dtype)

    def body(total, tile):
        _, p, ds = _entries(plan, plan.view(tile), rows)
        return add_tile(total, jnp.stack(jnp.broadcast_arrays(p.sum(-1), ds.sum(-1))), tile.row, -1)

    sums = plan.scan(body, vary_like(zeros, rows))[..., :T].reshape(2, *lead, *delta.shape[-2:])
    return refine(sums[0], sums[1], delta, lse_ct, p_sink)
