"""Forward-mode pass: tangents of out and lse as a sum over tiles, plain JAX; differentiated for second derivatives."""

import jax
import jax.numpy as jnp
import numpy as np

from flash_jax.compat import vary_like
from flash_jax.spec import OWN_RANK, AttentionSpec, Operands
from flash_jax.tiles import softmax
from flash_jax.tiles.rows import row_norm, sink_probability
from flash_jax.tiles.scores import Scale
from flash_jax.xla.layout import add_tile, broadcast_lead, dense_tile, product
from flash_jax.xla.loop import Plan, Tile, View


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
    """
    q, k, v, operands = primals
    plan = Plan.of(q, k, operands, spec)
    T, H = q.shape[-3:-1]
    dtype = np.promote_types(q.dtype, np.float32)
    rows = {"query": plan.q_rows(q), "key": plan.kv_rows(k), "value": plan.kv_rows(v)}
    lay = {"query": plan.q_rows, "key": plan.kv_rows, "value": plan.kv_rows}
    dots = {name: lay[name](x) if name in lay else x for name, x in tangents.items()}
    dead = softmax.dead_rows(out, lse, operands.sinks)
    lse_rows = plan.q_stats(softmax.dead_to_inf(lse, dead))
    # The mean of q k^T in a row may be large, and `out` is rounded: so most of it stays out of the difference below.
    base = jnp.zeros((), dtype)
    if "scale" in dots:
        dots["scale"] = dots["scale"][..., None, None, None, None]
        if plan.scoring.plain:
            base = _row_base(dots["scale"], plan.scoring.scale, lse_rows)
    lead = broadcast_lead((lse, 2), *((x, OWN_RANK[name]) for name, x in tangents.items()))
    d_out = jnp.zeros((*lead, *rows["query"].shape[-4:-1], v.shape[-1]), dtype)
    sums = jnp.zeros((2, *lead, *lse_rows.shape[-3:]), dtype)  # of p ds, and of p

    def body(totals, tile: Tile):
        d_out, sums = totals
        view = plan.view(tile)
        qk = product("...qkgd,...skd->...kgqs", view.q(rows["query"]), view.kv(rows["key"]), spec)
        p = view.probability(qk, lse_rows, q.dtype)
        ds = _score_tangent(plan, view, rows, dots, qk, base)
        pds = jnp.zeros_like(p) if ds is None else p * ds
        if view.allowed is not None:
            pds = jnp.where(view.allowed, pds, 0)
        sums = add_tile(sums, jnp.stack(jnp.broadcast_arrays(pds.sum(-1), p.sum(-1))), tile.row, -1)
        if ds is not None:
            seen = product("...kgqs,...ske->...qkge", view.drop(pds).astype(v.dtype), view.kv(rows["value"]), spec)
            d_out = add_tile(d_out, seen, tile.row, -4)
        if "value" in dots:
            pdv = product("...kgqs,...ske->...qkge", view.drop(p).astype(v.dtype), view.kv(dots["value"]), spec)
            d_out = add_tile(d_out, pdv, tile.row, -4)
        return d_out, sums

    d_out, sums = plan.scan(body, vary_like((d_out, sums), primals, out, lse, tangents))
    d_out = d_out[..., :T, :, :, :].reshape(*lead, T, H, v.shape[-1])
    d_lse, p_sum = sums[..., :T].reshape(2, *lead, H, T)
    p_sink = None if operands.sinks is None else sink_probability(operands.sinks, lse)
    if q.dtype.itemsize >= 4:  # without the rounding of lse; see xla/backward.py
        norm = row_norm(p_sum, p_sink)
        d_out, d_lse = d_out * jnp.swapaxes(norm, -1, -2)[..., None], d_lse * norm
    row_base = base[..., :T].reshape(*base.shape[:-3], H, T) if base.ndim else base
    if p_sink is not None:  # the sink is one more entry of the row, and like the others measured from its base
        dsink = tangents["sinks"][..., None] if "sinks" in tangents else 0
        d_lse += p_sink * (dsink - row_base)
    d_out -= out.astype(dtype) * jnp.swapaxes(d_lse, -1, -2)[..., None]
    return d_out.astype(out.dtype), d_lse + row_base


def _score_tangent(plan: Plan, view: View, rows: dict, dots: dict, qk: jax.Array, base: jax.Array) -> jax.Array | None:
    """The tangent of the tile's scores, less the row's base; None where no tangent enters them."""
    spec, scale, parts = plan.spec, plan.scoring.scale.value, []
    if "query" in dots:
        parts.append(scale * product("...qkgd,...skd->...kgqs", view.q(dots["query"]), view.kv(rows["key"]), spec))
    if "key" in dots:
        parts.append(scale * product("...qkgd,...skd->...kgqs", view.q(rows["query"]), view.kv(dots["key"]), spec))
    if "scale" in dots:
        parts.append(dots["scale"] * qk - (view.stat(base) if base.ndim else 0))
    slope = plan.scoring.slope(qk) if parts else None
    if slope is not None:
        parts = [sum(parts[1:], parts[0]) * slope]
    if "bias" in dots:
        bias = dense_tile(plan.by_head(dots["bias"], 2), (view.tile.row, view.tile.col), plan.blocks)
        parts.append(bias.astype(qk.dtype))
    if "alibi_slopes" in dots:
        parts.append(-plan.by_head(dots["alibi_slopes"], 0)[..., None, None] * view.distance)
    return sum(parts[1:], parts[0]) if parts else None


def _row_base(dscale: jax.Array, scale: Scale, lse_rows: jax.Array) -> jax.Array:
    """dscale lse / scale, an estimate of d lse, where it is finite; 0 elsewhere."""
    value = jnp.asarray(scale.value)[..., 0]
    known = (lse_rows < jnp.inf) & (value != 0)
    return jnp.where(known, dscale[..., 0] * lse_rows / jnp.where(known, value, 1), 0)
