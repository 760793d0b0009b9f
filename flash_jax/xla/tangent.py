"""Forward-mode pass: tangents of out and lse as a sum over tiles, plain JAX; differentiated for second derivatives."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from flash_jax.compat import vary_like
from flash_jax.spec import AttentionSpec, Operands
from flash_jax.tiles import softmax
from flash_jax.tiles.rows import may_shift, row_norm, sink_probability
from flash_jax.xla.layout import add_tile, dense_tile, product
from flash_jax.xla.loop import Plan, Tile, View, table_reader


class Rows(NamedTuple):
    """What the tiles read, laid out for them (see xla/layout.py): primals, tangents by name, and lse."""

    q: jax.Array
    k: jax.Array
    v: jax.Array
    dots: dict[str, jax.Array]
    lse: jax.Array


def tangent(
    primals: tuple[jax.Array, jax.Array, jax.Array, Operands],
    out: jax.Array,
    lse: jax.Array,
    tangents: dict[str, jax.Array],
    spec: AttentionSpec,
) -> tuple[jax.Array, jax.Array]:
    """(d out, d lse) along `tangents`, which holds those of the differentiable inputs that are not zero.

    With ds the tangent of the scores and p = exp(s - lse): d lse_i = sum_j p_ij ds_ij + p_sink dsink and
    d out_i = sum_j p_ij (ds_ij v_j + dv_j) - out_i d lse_i. `out` and `lse` are independent inputs.

    A number b_i taken off all ds of a row, and off d lse, changes nothing but rounding: where tangents shift whole
    rows, a first pass over the tiles finds their mean, so that the difference above is not one of large numbers.
    """
    q, k, v, operands = primals
    plan = Plan.of(q, k, operands, spec)
    T, H = q.shape[-3:-1]
    lay = {"query": plan.q_rows, "key": plan.kv_rows, "value": plan.kv_rows}
    lay["scale"] = lambda x: x[..., None, None, None, None]
    dead = softmax.dead_rows(out, lse, operands.sinks)
    if spec.score_mod is not None:  # rows that it makes dead may hold NaN; other reasons the tiles know
        q = softmax.without_dead(q, dead)
        tangents = {n: softmax.without_dead(x, dead) if n == "query" else x for n, x in tangents.items()}
    dots = {name: lay[name](x) if name in lay else x for name, x in tangents.items()}
    lse_rows = plan.q_stats(softmax.dead_to_inf(lse, dead))
    rows = Rows(plan.q_rows(q), plan.kv_rows(k), plan.kv_rows(v), dots, lse_rows)
    lead = np.broadcast_shapes(*(x.shape[: q.ndim - 3] for x in (lse, *tangents.values())))
    sums = jnp.zeros((2, *lead, *lse_rows.shape[-3:]), lse_rows.dtype)  # of p ds, and of p
    d_out = jnp.zeros((*lead, *rows.q.shape[-4:-1], v.shape[-1]), lse_rows.dtype)
    sums, d_out = vary_like((sums, d_out), primals, out, lse, tangents)

    base = jnp.zeros_like(sums[0])
    if may_shift(dots):
        base, _ = lax.stop_gradient(plan.scan(lambda x, tile: _add_tile(plan, rows, base, (x, None), tile)[0], sums))
    sums, d_out = plan.scan(lambda totals, tile: _add_tile(plan, rows, base, totals, tile), (sums, d_out))

    d_out = d_out[..., :T, :, :, :].reshape(*lead, T, H, v.shape[-1])
    d_lse, p_sum = sums[..., :T].reshape(2, *lead, H, T)
    row_base = base[..., :T].reshape(*lead, H, T)
    p_sink = None if operands.sinks is None else sink_probability(operands.sinks, lse)
    if q.dtype.itemsize >= 4:  # without the rounding of lse; see xla/backward.py
        norm = row_norm(p_sum, p_sink)
        d_out, d_lse = d_out * jnp.swapaxes(norm, -1, -2)[..., None], d_lse * norm
        p_sink = None if p_sink is None else p_sink * norm
    if p_sink is not None:  # the sink is one more entry of the row, and like the others measured from its base
        dsink = tangents["sinks"][..., None] if "sinks" in tangents else 0
        d_lse += p_sink * (dsink - row_base)
    d_out -= out.astype(d_out.dtype) * jnp.swapaxes(d_lse, -1, -2)[..., None]
    return d_out.astype(out.dtype), d_lse + row_base


def _add_tile(plan: Plan, rows: Rows, base: jax.Array, totals: tuple, tile: Tile) -> tuple:
    """The totals, (sums of p ds and of p, d out or None), with what one tile adds; ds is measured from `base`."""
    (sums, d_out), view = totals, plan.view(tile)
    qk = product("...qkgd,...skd->...kgqs", view.q(rows.q), view.kv(rows.k), plan.spec)
    p = view.probability(qk, rows.lse)
    ds = _score_tangent(plan, view, rows, qk)
    pds = jnp.zeros_like(p) if ds is None else p * (ds - view.stat(base))
    if view.allowed is not None:
        pds = jnp.where(view.allowed, pds, 0)
    sums = add_tile(sums, jnp.stack(jnp.broadcast_arrays(pds.sum(-1), p.sum(-1))), tile.row, -1)
    if d_out is None:
        return sums, None
    weighted = []
    if ds is not None:
        weighted.append((pds, rows.v))
    if "value" in rows.dots:
        weighted.append((p, rows.dots["value"]))
    for weight, v in weighted:
        seen = product("...kgqs,...ske->...qkge", view.drop(weight).astype(v.dtype), view.kv(v), plan.spec)
        d_out = add_tile(d_out, seen, tile.row, -4)
    return sums, d_out


def _score_tangent(plan: Plan, view: View, rows: Rows, qk: jax.Array) -> jax.Array | None:
    """The tangent of the tile's scores; None where no tangent enters them."""
    spec, scale, dots, parts = plan.spec, plan.scoring.scale.value, rows.dots, []
    if "query" in dots:
        parts.append(scale * product("...qkgd,...skd->...kgqs", view.q(dots["query"]), view.kv(rows.k), spec))
    if "key" in dots:
        parts.append(scale * product("...qkgd,...skd->...kgqs", view.q(rows.q), view.kv(dots["key"]), spec))
    if "scale" in dots:
        parts.append(dots["scale"] * qk)
    slope = plan.scoring.slope(qk, view.mod) if parts else None
    if slope is not None:
        parts = [sum(parts[1:], parts[0]) * slope]
    if view.mod is not None:
        moving = {n: dots[f"mods.{n}"] for n in range(len(plan.operands.mods)) if f"mods.{n}" in dots}
        tables, d_tables = table_reader(plan.operands.mods), table_reader(moving)
        parts += view.mod.along(plan.scoring.capped(qk), tables, d_tables, moving.__contains__)
    if "bias" in dots:
        bias = dense_tile(plan.by_head(dots["bias"], 2), (view.tile.row, view.tile.col), plan.blocks)
        parts.append(bias.astype(qk.dtype))
    if "alibi_slopes" in dots:
        parts.append(-plan.by_head(dots["alibi_slopes"], 0)[..., None, None] * view.distance)
    return sum(parts[1:], parts[0]) if parts else None
