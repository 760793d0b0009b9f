"""Backward pass: gradients as a sum over tiles, plain JAX; differentiated again for second derivatives."""

import jax
import jax.numpy as jnp
import numpy as np

from flash_jax.compat import vary_like
from flash_jax.spec import AttentionSpec, Operands
from flash_jax.tiles import scores, softmax
from flash_jax.xla.forward import lift_scale
from flash_jax.xla.loop import Plan, Tile, add_tile, broadcast_lead, product, sum_to


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

    With p = exp(s - lse) and ds = p * (out_ct v^T - delta): dv = p^T out_ct, dq = scale ds k, dk = scale ds^T q and
    dscale = sum of ds * (q k^T). `out` and `lse` are independent inputs, so the whole is a sum over tiles in all of
    them.
    """
    q, k, v, operands = primals
    plan = Plan.of(q, k, operands, spec)
    scale = lift_scale(scores.split_scale(spec, operands))
    dtype = np.promote_types(q.dtype, np.float32)
    q_rows, k_rows, v_rows, ct_rows = plan.q_rows(q), plan.kv_rows(k), plan.kv_rows(v), plan.q_rows(out_ct)
    delta = plan.q_stats(softmax.delta(out, out_ct, lse, lse_ct))
    lse_rows = plan.q_stats(softmax.dead_to_inf(lse))

    lead = broadcast_lead((lse, 2), (out_ct, 3), (lse_ct, 2))
    shapes = {
        "query": lambda lead: (*lead, *q_rows.shape[-4:]),
        "key": lambda lead: plan.kv_shape(lead, k.shape[-1]),
        "value": lambda lead: plan.kv_shape(lead, v.shape[-1]),
        "scale": lambda _: (3, *lead, *lse_rows.shape[-3:]),  # the sums that `scores.scale_gradient` takes
    }
    totals = {name: jnp.zeros(shapes[name](lead), dtype) for name, lead in leads.items()}

    def body(totals, tile: Tile):
        totals = dict(totals)
        q_tile, ct_tile = plan.q_tile(q_rows, tile), plan.q_tile(ct_rows, tile)
        k_tile, v_tile = plan.kv_tile(k_rows, tile), plan.kv_tile(v_rows, tile)
        qk = product("...qkgd,...skd->...kgqs", q_tile, k_tile, spec)
        p = scores.probability(qk, plan.stat_tile(lse_rows, tile)[..., None], scale, plan.allowed(tile), q.dtype)
        if "value" in totals:
            dv = product("...kgqs,...qkge->...ske", p.astype(v.dtype), ct_tile, spec)
            totals["value"] = add_tile(totals["value"], dv, tile.col, -3)
        dp = product("...qkge,...ske->...kgqs", ct_tile, v_tile, spec)
        ds = p * (dp - plan.stat_tile(delta, tile)[..., None])
        if "scale" in totals:
            sums = jnp.stack(jnp.broadcast_arrays(*(x.sum(-1) for x in (ds * qk, ds, p * qk))))
            totals["scale"] = add_tile(totals["scale"], sums, tile.row, -1)
        ds = (ds * scale.value).astype(q.dtype)
        if "query" in totals:
            dq = product("...kgqs,...skd->...qkgd", ds, k_tile, spec)
            totals["query"] = add_tile(totals["query"], dq, tile.row, -4)
        if "key" in totals:
            dk = product("...kgqs,...qkgd->...skd", ds, q_tile, spec)
            totals["key"] = add_tile(totals["key"], dk, tile.col, -3)
        return totals

    everything = (primals, out, lse, out_ct, lse_ct)
    totals = plan.scan(body, vary_like(totals, everything))
    T, S = plan.lengths
    finish = {
        "query": lambda x: x[..., :T, :, :, :].reshape(*x.shape[:-4], T, *q.shape[-2:]).astype(q.dtype),
        "key": lambda x: x[..., :S, :, :].astype(k.dtype),
        "value": lambda x: x[..., :S, :, :].astype(v.dtype),
        "scale": lambda x: _scale_total(x[..., :T].reshape(3, *lead, *lse.shape[-2:]), lse_ct, lse, leads["scale"]),
    }
    return {name: finish[name](x) for name, x in totals.items()}


def _scale_total(sums, lse_ct, lse, lead):
    ds_qk, ds, p_qk = sums
    rows = scores.scale_gradient(ds_qk, ds, p_qk, lse, lse_ct)
    return sum_to(jnp.where(lse == -jnp.inf, 0, rows).sum((-1, -2)), lead)
