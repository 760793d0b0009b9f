"""Backward kernels: one for query gradients, one for key and value gradients; no atomics."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from flash_jax.spec import AttentionSpec, Operands
from flash_jax.tiles import masks, scores, softmax
from flash_jax.triton import columns
from flash_jax.triton.forward import flat_output, q_tile
from flash_jax.triton.launch import Shape, flat, launch, load_stats, output, over_tiles, read, store_stats
from flash_jax.triton.tiling import tile_for
from flash_jax.xla.loop import sum_to


class Residuals(NamedTuple):
    """Arrays (or refs, or specs) that both kernels read: out_ct [..., T, H, Dv], lse and delta [..., H, T]."""

    q: Any
    k: Any
    v: Any
    out_ct: Any
    lse: Any
    delta: Any


def flash_attention_dq_kernel(operands, refs: Residuals, dq_ref, scale_refs, *, spec, tile, shape):
    """dQ_i = scale sum_j dS_ij K_j, with dS = P * (dO V^T - delta) and P = exp(S - L) (algorithm 2, lines 11-15).

    One program computes block_q rows of one query head; key/value tiles stream past. Grid: (query tiles, H, examples).
    `scale_refs` (None where not wanted) take the three sums over each row of which `scores.scale_gradient` makes the
    scale's.
    """
    operands = read(operands)
    geometry = masks.Geometry.of(spec, operands, shape.T, shape.S)
    scale = scores.split_scale(spec, operands)
    row = q_tile(pl.program_id(0), shape, tile, spec) * tile.block_q
    rows = row + jnp.arange(tile.block_q, dtype=jnp.int32)
    inside = None if shape.T % tile.block_q == 0 else rows < shape.T
    whole = (slice(None),)
    q = columns.load(refs.q, whole, inside, shape.D)  # [block_q, D]
    out_ct = columns.load(refs.out_ct, whole, inside, shape.Dv)  # [block_q, Dv]
    lse, delta = softmax.dead_to_inf(load_stats(refs.lse, inside)), load_stats(refs.delta, inside)  # [block_q]

    def body(j, carry, masked):
        dq, sums = carry
        col = j * tile.block_kv
        cols = col + jnp.arange(tile.block_kv, dtype=jnp.int32)
        keep = masks.attended_cols(cols, row, tile.block_q, geometry, spec) if masked else None
        here = (pl.ds(col, tile.block_kv),)
        k, v = columns.load(refs.k, here, keep, shape.D), columns.load(refs.v, here, keep, shape.Dv)
        qk = columns.inner(q, k, spec)  # [block_q, block_kv]
        allowed = masks.allowed(rows[:, None], cols[None, :], geometry, spec) if masked else None
        p = scores.probability(qk, lse[:, None], scale, allowed, refs.q.dtype)
        ds = p * (columns.inner(out_ct, v, spec) - delta[:, None])
        if scale_refs is not None:
            sums = [total + x.sum(axis=1) for total, x in zip(sums, (ds * qk, ds, p * qk), strict=True)]
        return columns.add_product(dq, ds, k, spec), sums

    sums = [jnp.zeros((tile.block_q,), jnp.float32)] * 3 if scale_refs is not None else []
    carry = columns.zeros(tile.block_q, shape.D, refs.q.dtype), sums
    seen = masks.kv_range(row, tile.block_q, tile.block_kv, geometry, spec)
    dq, sums = over_tiles(seen, body, carry, whole=shape.S >= tile.block_kv)
    alive = (lse != jnp.inf) & (rows < geometry.q_length)
    columns.store(dq_ref, tuple(jnp.where(alive[:, None], part * scale.value, 0) for part in dq), inside, shape.D)
    for ref, x in zip(scale_refs or (), sums, strict=True):
        store_stats(ref, jnp.where(alive, x, 0), inside)


def flash_attention_dkv_kernel(operands, refs: Residuals, dk_ref, dv_ref, *, spec, tile, shape):
    """dV_j = sum_i P_ij^T dO_i and dK_j = scale sum_i dS_ij^T Q_i, over all rows and query heads (lines 11-16).

    One program computes block_kv rows of one key/value head, adding up the query heads that share it; query tiles
    stream past. It works on S^T = K_j Q_i^T, so that P^T and dS^T feed the products as they are. Grid: (kv tiles, K,
    examples).
    """
    operands = read(operands)
    geometry = masks.Geometry.of(spec, operands, shape.T, shape.S)
    scale = scores.split_scale(spec, operands)
    col = pl.program_id(0) * tile.block_kv
    cols = col + jnp.arange(tile.block_kv, dtype=jnp.int32)
    inside = masks.seen_cols(cols, geometry, spec)
    if inside is None and shape.S % tile.block_kv:
        inside = cols < shape.S
    whole = (slice(None),)
    k = columns.load(refs.k, whole, inside, shape.D)  # [block_kv, D]
    v = columns.load(refs.v, whole, inside, shape.Dv)  # [block_kv, Dv]

    def body(i, carry, head, masked):
        dk, dv = carry
        row = i * tile.block_q
        rows = row + jnp.arange(tile.block_q, dtype=jnp.int32)
        keep = masks.attending_rows(rows, col, tile.block_kv, geometry, spec) if masked else None
        here = pl.ds(row, tile.block_q)
        q = columns.load(refs.q, (here, head), keep, shape.D)
        out_ct = columns.load(refs.out_ct, (here, head), keep, shape.Dv)
        lse, delta = load_stats(refs.lse.at[head, here], keep), load_stats(refs.delta.at[head, here], keep)
        qk = columns.inner(k, q, spec)  # [block_kv, block_q]
        allowed = masks.allowed(rows[None, :], cols[:, None], geometry, spec) if masked else None
        p = scores.probability(qk, lse[None, :], scale, allowed, refs.k.dtype)
        dv = columns.add_product(dv, p, out_ct, spec)
        ds = p * (columns.inner(v, out_ct, spec) - delta[None, :])
        return columns.add_product(dk, ds, q, spec), dv

    seen = masks.q_range(col, tile.block_q, tile.block_kv, geometry, spec)

    def one_head(head, carry):
        return over_tiles(seen, functools.partial(body, head=head), carry, whole=shape.T >= tile.block_q)

    dk = columns.zeros(tile.block_kv, shape.D, refs.k.dtype)
    dv = columns.zeros(tile.block_kv, shape.Dv, refs.v.dtype)
    dk, dv = (
        one_head(jnp.zeros((), jnp.int32), (dk, dv))
        if shape.groups == 1
        else lax.fori_loop(0, shape.groups, one_head, (dk, dv))
    )
    dk = tuple(part * scale.value for part in dk)
    if inside is not None:  # keys that nobody sees have the gradient 0, also where a full tile computed something
        dk, dv = (tuple(jnp.where(inside[:, None], part, 0) for part in x) for x in (dk, dv))
    within = None if shape.S % tile.block_kv == 0 else cols < shape.S
    columns.store(dk_ref, dk, within, shape.D)
    columns.store(dv_ref, dv, within, shape.Dv)


def backward(
    primals: tuple[jax.Array, jax.Array, jax.Array, Operands],
    out: jax.Array,
    lse: jax.Array,
    out_ct: jax.Array,
    lse_ct: jax.Array | None,
    leads: dict[str, tuple[int, ...]],
    spec: AttentionSpec,
) -> dict[str, jax.Array]:
    """Gradients of the inputs named in `leads`, with the leading dims given there; launches only what they need."""
    q, k, v, operands = primals
    delta = softmax.delta(out, out_ct, lse, lse_ct)
    residuals = Residuals(q, k, v, out_ct.astype(q.dtype), lse, delta)
    arrays = zip(residuals, (3, 3, 3, 3, 2, 2), strict=True)
    lead = np.broadcast_shapes(
        *(x.shape[: x.ndim - rank] for x, rank in arrays), *(x.shape for x in jax.tree.leaves(operands))
    )
    gradients = {}
    if "query" in leads or "scale" in leads:
        gradients |= _query_gradients(residuals, operands, lead, leads, spec, lse_ct)
    if "key" in leads or "value" in leads:
        gradients |= _key_value_gradients(residuals, operands, lead, leads, spec)
    dtypes = {"query": q.dtype, "key": k.dtype, "value": v.dtype, "scale": jnp.float32}
    return {
        name: sum_to(gradients[name], own + gradients[name].shape[len(own) :]).astype(dtypes[name])
        for name, own in leads.items()
    }


def _query_gradients(residuals, operands, lead, leads, spec, lse_ct) -> dict[str, jax.Array]:
    """{"query": ..., and "scale" where wanted} with all leading dims."""
    shape = Shape.of(residuals.q, residuals.k, residuals.v, lead)
    tile = tile_for("dq", spec, residuals.q, residuals.k, residuals.v)

    def place(i, h):
        return q_tile(i, shape, tile, spec), h

    def whole(i, h):
        return 0, h // shape.groups

    dq = _gradient(lead, residuals.q, leads.get("query"))
    sums = output((*lead, shape.H, shape.T), jnp.float32, residuals.q)
    n_sums = 3 if "scale" in leads else 0
    specs = Residuals(
        shape.rows(residuals.q, tile.block_q, None, place),
        shape.rows(residuals.k, None, None, whole),
        shape.rows(residuals.v, None, None, whole),
        shape.rows(residuals.out_ct, tile.block_q, None, place),
        shape.stats(residuals.lse, tile.block_q, None, place),
        shape.stats(residuals.delta, tile.block_q, None, place),
    )
    call = launch(
        functools.partial(flash_attention_dq_kernel, spec=spec, tile=tile, shape=shape),
        (pl.cdiv(shape.T, tile.block_q), shape.H, shape.examples),
        (
            (shape.scalars(operands), specs),
            (
                shape.rows(dq, tile.block_q, None, place),
                [shape.stats(sums, tile.block_q, None, place)] * n_sums or None,
            ),
        ),
        (flat_output(dq, 3), [flat_output(sums, 2)] * n_sums or None),
        tile,
        spec,
    )
    dq_flat, sums_flat = call(*_flattened(operands, residuals))
    found = {"query": dq_flat.reshape(dq.shape)}
    if n_sums:
        ds_qk, ds, p_qk = (x.reshape(sums.shape) for x in sums_flat)
        rows = scores.scale_gradient(ds_qk, ds, p_qk, residuals.lse, lse_ct)
        found["scale"] = jnp.where(residuals.lse == -jnp.inf, 0, rows).sum((-1, -2))
    return found


def _key_value_gradients(residuals, operands, lead, leads, spec) -> dict[str, jax.Array]:
    """{"key": ..., "value": ...} with all leading dims."""
    shape = Shape.of(residuals.q, residuals.k, residuals.v, lead)
    tile = tile_for("dkv", spec, residuals.q, residuals.k, residuals.v)

    def place(j, h):
        return j, h

    def whole(j, h):
        return 0, h  # the h-th block of `groups` query heads

    dk, dv = _gradient(lead, residuals.k, leads.get("key")), _gradient(lead, residuals.v, leads.get("value"))
    specs = Residuals(
        shape.rows(residuals.q, None, shape.groups, whole),
        shape.rows(residuals.k, tile.block_kv, None, place),
        shape.rows(residuals.v, tile.block_kv, None, place),
        shape.rows(residuals.out_ct, None, shape.groups, whole),
        shape.stats(residuals.lse, None, shape.groups, whole),
        shape.stats(residuals.delta, None, shape.groups, whole),
    )
    call = launch(
        functools.partial(flash_attention_dkv_kernel, spec=spec, tile=tile, shape=shape),
        (pl.cdiv(shape.S, tile.block_kv), shape.K, shape.examples),
        (
            (shape.scalars(operands), specs),
            (shape.rows(dk, tile.block_kv, None, place), shape.rows(dv, tile.block_kv, None, place)),
        ),
        (flat_output(dk, 3), flat_output(dv, 3)),
        tile,
        spec,
    )
    dk_flat, dv_flat = call(*_flattened(operands, residuals))
    return {"key": dk_flat.reshape(dk.shape), "value": dv_flat.reshape(dv.shape)}


def _gradient(lead: tuple[int, ...], x: jax.Array, own: tuple[int, ...] | None) -> jax.ShapeDtypeStruct:
    """The gradient of x with leading dims `lead`: float32 where it is summed over some of them afterwards."""
    dtype = x.dtype if own is None or own == lead else jnp.float32
    return output((*lead, *x.shape[-3:]), dtype, x)


def _flattened(operands: Operands, residuals: Residuals):
    flat_residuals = Residuals(*(flat(x, 3) for x in residuals[:4]), *(flat(x, 2) for x in residuals[4:]))
    return jax.tree.map(lambda x: flat(x, 0), operands), flat_residuals
