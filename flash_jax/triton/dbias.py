"""Backward kernel for what has an entry for each query and key: a bias, or an operand that a score_mod so reads.

A bias goes by triton/stored.py where that can.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from flash_jax.spec import AttentionSpec, Operands
from flash_jax.triton.entries import Residuals
from flash_jax.triton.launch import Shape, flat_output, launch, output
from flash_jax.triton.pairs import add_pair, whole_arrays, whole_spec
from flash_jax.triton.tiling import tile_for


def flash_attention_dbias_kernel(  # noqa: PLR0913
    extra, refs: Residuals, dbias_ref, *, spec, tile, shape, bias_lead, names, read
):
    """dB = sum of dS = P * (dO V^T - delta) over the examples and heads that share the bias, one after the other.

    One program computes a tile [block_q, block_kv] of one head of one bias, recomputing the tile's scores for each
    (example, head) in a fixed order: the sum needs no memory, whatever it runs over. Grid: (pairs of tiles, heads of
    the bias, examples of the bias). Refs hold whole arrays. `names` gives the leading dims of each, `read` is as in
    `add_pair`.
    """
    kv_tiles = pl.cdiv(shape.S, tile.block_kv)
    pair, bias_head, bias_example = (pl.program_id(n) for n in range(3))
    i, j = lax.div(pair, jnp.full_like(pair, kv_tiles)), lax.rem(pair, jnp.full_like(pair, kv_tiles))
    row, col = i * tile.block_q, j * tile.block_kv
    rows = row + jnp.arange(tile.block_q, dtype=jnp.int32)
    cols = col + jnp.arange(tile.block_kv, dtype=jnp.int32)
    shared_heads = shape.H // dbias_ref.shape[1]
    examples = shape.examples // dbias_ref.shape[0]

    def one(n, total):
        n = jnp.asarray(n, jnp.int32)
        turn = lax.div(n, jnp.full_like(n, shared_heads))
        head = bias_head if shared_heads == 1 else lax.rem(n, jnp.full_like(n, shared_heads))
        example = shape.combined(bias_lead)(bias_example, turn)
        return add_pair(total, (extra, refs), names, (example, head, i, j), read, (spec, tile, shape))

    total = lax.fori_loop(0, examples * shared_heads, one, jnp.zeros((tile.block_q, tile.block_kv), jnp.float32))
    keep = None
    for inside, axis, ragged in (
        (rows < shape.T, 1, shape.T % tile.block_q),
        (cols < shape.S, 0, shape.S % tile.block_kv),
    ):
        if ragged:
            inside = jnp.broadcast_to(jnp.expand_dims(inside, axis), total.shape)
            keep = inside if keep is None else keep & inside
    target = dbias_ref.at[bias_example, bias_head, pl.ds(row, tile.block_q), pl.ds(col, tile.block_kv)]
    plgpu.store(target, total.astype(dbias_ref.dtype), mask=keep)


def bias_pass(
    residuals: Residuals,
    operands: Operands,
    lead: tuple[int, ...],
    target: jax.ShapeDtypeStruct,
    spec: AttentionSpec,
    read: str | None = None,
) -> jax.Array:
    """The gradient of the bias, or of a read of the score_mod, summed up to the shape of `target`."""
    q, k, v = residuals[:3]
    shape = Shape.of(q, k, v, lead)
    tile = tile_for("dbias", spec, q, k, v, operands)
    arrays, specs, names = whole_arrays(residuals, operands, tile, shape, spec)
    dbias = output(target.shape, target.dtype, q)
    flat = flat_output(dbias, 3)
    pairs = pl.cdiv(shape.T, tile.block_q) * pl.cdiv(shape.S, tile.block_kv)
    kernel = functools.partial(
        flash_attention_dbias_kernel,
        spec=spec, tile=tile, shape=shape, bias_lead=target.shape[: len(lead)], names=names, read=read,
    )  # fmt: skip
    call = launch(kernel, (pairs, flat.shape[1], flat.shape[0]), (specs, whole_spec(flat)), flat, tile, spec)
    return call(*arrays).reshape(dbias.shape)
