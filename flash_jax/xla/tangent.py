"""Forward-mode pass: tangents of out and lse as a sum over tiles, plain JAX; differentiated for second derivatives."""

import jax
import jax.numpy as jnp
import numpy as np

from flash_jax.compat import vary_like
from flash_jax.spec import AttentionSpec, Operands
from flash_jax.tiles import scores, softmax
from flash_jax.xla.forward import lift_scale
from flash_jax.xla.loop import Plan, Tile, add_tile, broadcast_lead, product


def tangent(
    primals: tuple[jax.Array, jax.Array, jax.Array, Operands],
    out: jax.Array,
    lse: jax.Array,
    tangents: dict[str, jax.Array],
    spec: AttentionSpec,
) -> tuple[jax.Array, jax.Array]:
    """(d out, d lse) along `tangents`, which holds those of "query", "key", "value" and "scale" that are not zero.

    With ds = scale (dq k^T + q dk^T) + dscale q k^T and p = exp(s - lse): d lse_i = sum_j p_ij ds_ij and
    d out_i = sum_j p_ij (ds_ij v_j + dv_j) - out_i d lse_i. `out` and `lse` are independent inputs.
    """
    q, k, v, operands = primals
    plan = Plan.of(q, k, operands, spec)
    T, H = q.shape[-3:-1]
    scale = lift_scale(scores.split_scale(spec, operands))
    dtype = np.promote_types(q.dtype, np.float32)
    rows = {"q": plan.q_rows(q), "k": plan.kv_rows(k), "v": plan.kv_rows(v)}
    dots = {
        name: plan.q_rows(x) if name == "query" else plan.kv_rows(x) for name, x in tangents.items() if name != "scale"
    }
    dscale = tangents["scale"][..., None, None, None, None] if "scale" in tangents else None
    lse_rows = plan.q_stats(softmax.dead_to_inf(lse))
    # The mean of q k^T in a row may be large, and `out` is rounded: so most of it stays out of the difference below.
    base = jnp.zeros((), dtype) if dscale is None else _row_base(dscale, scale, lse_rows)
    lead = broadcast_lead((lse, 2), *((x, 0 if name == "scale" else 3) for name, x in tangents.items()))
    d_out = jnp.zeros((*lead, *rows["q"].shape[-4:-1], v.shape[-1]), dtype)
    d_lse = jnp.zeros((*lead, *lse_rows.shape[-3:]), dtype)

    def body(totals, tile: Tile):
        d_out, d_lse = totals
        q_tile, k_tile, v_tile = (
            plan.q_tile(rows["q"], tile),
            plan.kv_tile(rows["k"], tile),
            plan.kv_tile(rows["v"], tile),
        )
        qk = product("...qkgd,...skd->...kgqs", q_tile, k_tile, spec)
        p = scores.probability(qk, plan.stat_tile(lse_rows, tile)[..., None], scale, plan.allowed(tile), q.dtype)
        ds = None if dscale is None else dscale * qk - plan.stat_tile(base, tile)[..., None]
        if "query" in dots:
            ds = _add(
                ds, scale.value * product("...qkgd,...skd->...kgqs", plan.q_tile(dots["query"], tile), k_tile, spec)
            )
        if "key" in dots:
            ds = _add(
                ds, scale.value * product("...qkgd,...skd->...kgqs", q_tile, plan.kv_tile(dots["key"], tile), spec)
            )
        if ds is not None:
            pds = p * ds
            d_lse = add_tile(d_lse, pds.sum(-1), tile.row, -1)
            d_out = add_tile(d_out, product("...kgqs,...ske->...qkge", pds.astype(v.dtype), v_tile, spec), tile.row, -4)
        if "value" in dots:
            pdv = product("...kgqs,...ske->...qkge", p.astype(v.dtype), plan.kv_tile(dots["value"], tile), spec)
            d_out = add_tile(d_out, pdv, tile.row, -4)
        return d_out, d_lse

    d_out, d_lse = plan.scan(body, vary_like((d_out, d_lse), primals, out, lse, tangents))
    d_out = d_out[..., :T, :, :, :].reshape(*lead, T, H, v.shape[-1])
    d_out -= out.astype(dtype) * jnp.swapaxes(d_lse[..., :T].reshape(*lead, H, T), -1, -2)[..., None]
    d_lse = (d_lse + base)[..., :T].reshape(*lead, H, T)
    return d_out.astype(out.dtype), d_lse


def _row_base(dscale: jax.Array, scale: scores.Scale, lse_rows: jax.Array) -> jax.Array:
    """dscale lse / scale, an estimate of d lse, where it is finite; 0 elsewhere."""
    value = jnp.asarray(scale.value)[..., 0]
    known = (lse_rows < jnp.inf) & (value != 0)
    return jnp.where(known, dscale[..., 0] * lse_rows / jnp.where(known, value, 1), 0)


def _add(a: jax.Array | None, b: jax.Array) -> jax.Array:
    return b if a is None else a + b
