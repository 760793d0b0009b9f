"""Forward pass: online softmax over key/value tiles, plain JAX."""

import jax
import jax.numpy as jnp
import numpy as np

from flash_jax.compat import vary_like
from flash_jax.spec import AttentionSpec, Operands
from flash_jax.tiles import scores, softmax
from flash_jax.xla.loop import Plan, Tile, broadcast_lead, product


def forward(
    q: jax.Array, k: jax.Array, v: jax.Array, operands: Operands, spec: AttentionSpec
) -> tuple[jax.Array, jax.Array]:
    """out [..., T, H, Dv] and lse [..., H, T] (FlashAttention-2, algorithm 1); temporary memory is linear in T."""
    plan = Plan.of(q, k, operands, spec)
    T, H = q.shape[-3:-1]
    lead = broadcast_lead((q, 3), (k, 3), (v, 3), *((x, 0) for x in jax.tree.leaves(operands)))
    dtype = np.promote_types(q.dtype, np.float32)
    scale = lift_scale(scores.split_scale(spec, operands))
    q_rows, k_rows, v_rows = plan.q_rows(q), plan.kv_rows(k), plan.kv_rows(v)
    accumulator = jnp.zeros(plan.q_shape(lead, v.shape[-1]), dtype)
    row_max, row_sum = jnp.full(accumulator.shape[:-1], -jnp.inf, dtype), jnp.zeros(accumulator.shape[:-1], dtype)

    def body(carry, tile: Tile):
        accumulator, row_max, row_sum = carry
        raw = scale.sign * product(
            "...qkgd,...skd->...kgqs", plan.q_tile(q_rows, tile), plan.kv_tile(k_rows, tile), spec
        )
        allowed = plan.allowed(tile)
        if allowed is not None:
            raw = jnp.where(allowed, raw, -jnp.inf)
        p, shrink, new_max, new_sum = softmax.step(
            raw, plan.stat_tile(row_max, tile), plan.stat_tile(row_sum, tile), scale.multiplier, masked=tile.masked
        )
        v_tile = plan.kv_tile(v_rows, tile)
        old = jax.lax.dynamic_slice_in_dim(accumulator, tile.row, p.shape[-2], accumulator.ndim - 2)
        new = old * shrink[..., None] + product("...kgqs,...ske->...kgqe", p.astype(v.dtype), v_tile, spec)
        put = jax.lax.dynamic_update_slice_in_dim
        last = row_max.ndim - 1
        return (
            put(accumulator, new, tile.row, last),
            put(row_max, new_max, tile.row, last),
            put(row_sum, new_sum, tile.row, last),
        )

    carry = vary_like((accumulator, row_max, row_sum), q, k, v, operands)
    accumulator, row_max, row_sum = plan.scan(body, carry)
    alive, divisor, lse = softmax.finish(row_max, row_sum, scale.multiplier, plan.alive_rows())
    out = jnp.where(alive[..., None], accumulator / divisor[..., None], 0)
    out = jnp.moveaxis(out[..., :T, :], -2, -4)  # [..., K, G, T, Dv] -> [..., T, K, G, Dv]
    return out.reshape(*lead, T, H, v.shape[-1]).astype(q.dtype), lse[..., :T].reshape(*lead, H, T)


def lift_scale(scale: scores.Scale) -> scores.Scale:
    """A per-example scale [...] as [..., 1, 1, 1, 1], so that it meets a tile of scores."""
    return scores.Scale(*(x[..., None, None, None, None] if isinstance(x, jax.Array) else x for x in scale))
