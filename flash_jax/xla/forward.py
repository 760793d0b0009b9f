"""Forward pass: online softmax over key/value tiles, plain JAX."""

import jax
import jax.numpy as jnp
import numpy as np

from flash_jax.compat import vary_like
from flash_jax.spec import AttentionSpec, Operands, leads
from flash_jax.tiles import softmax
from flash_jax.xla.layout import product
from flash_jax.xla.loop import Plan, Tile


def forward(
    q: jax.Array, k: jax.Array, v: jax.Array, operands: Operands, spec: AttentionSpec, wide: bool = False
) -> tuple[jax.Array, jax.Array]:
    """out [..., T, H, Dv] and lse [..., H, T] (FlashAttention-2, algorithm 1); temporary memory is linear in T.

    With `wide`, out is in lse's dtype in place of query's.
    """
    plan = Plan.of(q, k, operands, spec)
    scoring = plan.scoring
    T, H = q.shape[-3:-1]
    lead = np.broadcast_shapes(*(x.shape[:-3] for x in (q, k, v)), *leads(operands, q.ndim - 3))
    dtype = np.promote_types(q.dtype, np.float32)
    q_rows, k_rows, v_rows = plan.q_rows(q), plan.kv_rows(k), plan.kv_rows(v)
    accumulator = jnp.zeros(plan.q_shape(lead, v.shape[-1]), dtype)
    row_max, row_sum = jnp.full(accumulator.shape[:-1], -jnp.inf, dtype), jnp.zeros(accumulator.shape[:-1], dtype)

    def body(carry, tile: Tile):
        accumulator, row_max, row_sum = carry
        view = plan.view(tile)
        qk = product("...qkgd,...skd->...kgqs", view.q(q_rows), view.kv(k_rows), spec)
        raw = scoring.raw(scoring.scale.sign * qk if scoring.plain else qk, view.addend, view.mod)
        if view.allowed is not None:
            raw = jnp.where(view.allowed, raw, -jnp.inf)
        p, shrink, new_max, new_sum = softmax.step(
            raw,
            view.stat(row_max)[..., 0],
            view.stat(row_sum)[..., 0],
            scoring.multiplier,
            masked=tile.masked or scoring.modified,
        )
        old = jax.lax.dynamic_slice_in_dim(accumulator, tile.row, p.shape[-2], accumulator.ndim - 2)
        seen = product("...kgqs,...ske->...kgqe", view.drop(p).astype(v.dtype), view.kv(v_rows), spec)
        new = old * shrink[..., None] + seen
        put = jax.lax.dynamic_update_slice_in_dim
        last = row_max.ndim - 1
        return (
            put(accumulator, new, tile.row, last),
            put(row_max, new_max, tile.row, last),
            put(row_sum, new_sum, tile.row, last),
        )

    carry = vary_like((accumulator, row_max, row_sum), q, k, v, operands)
    accumulator, row_max, row_sum = plan.scan(body, carry)
    sinks = None if operands.sinks is None else plan.by_head(operands.sinks, 0)[..., None]
    alive, divisor, lse = softmax.finish(row_max, row_sum, scoring.multiplier, plan.alive_rows(), sinks)
    out = jnp.where(alive[..., None], accumulator / divisor[..., None], 0)
    out = jnp.moveaxis(out[..., :T, :], -2, -4)  # [..., K, G, T, Dv] -> [..., T, K, G, Dv]
    out = out.reshape(*lead, T, H, v.shape[-1])
    return out if wide else out.astype(q.dtype), lse[..., :T].reshape(*lead, H, T)
