"""Backward kernel for what a score_mod reads by the difference of q index and k index."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from flash_jax.spec import AttentionSpec, Operands
from flash_jax.triton.entries import Residuals
from flash_jax.triton.launch import Shape, flat_output, launch, output
from flash_jax.triton.pairs import add_pair, whole_arrays, whole_spec
from flash_jax.triton.tiling import tile_for


def flash_attention_diagonals_kernel(extra, refs: Residuals, out_ref, *, spec, tile, shape, names, read):
    """Sums of x dS over diagonals of the scores, x being the derivative of the score to what a read gives.

    Tiles are square, so that those on one diagonal of tiles lie alike: one program adds them up, entry by entry, for
    one head of one example, and at the end sums up the diagonals of what it has, 2 block - 1 of them. Neighbouring
    programs share diagonals and write theirs apart. Grid: (diagonals of tiles, H, examples). Refs hold whole arrays.
    """
    turn, head, example = (pl.program_id(n) for n in range(3))
    block = tile.block_q
    kv_tiles, q_tiles = pl.cdiv(shape.S, block), pl.cdiv(shape.T, block)
    ahead = turn - (kv_tiles - 1)  # query tile less key/value tile

    def add(i, total):
        i = jnp.asarray(i, jnp.int32)
        return add_pair(total, (extra, refs), names, (example, head, i, i - ahead), read, (spec, tile, shape))

    start, stop = jnp.maximum(ahead, 0), jnp.minimum(kv_tiles + ahead, q_tiles)
    total = lax.fori_loop(start, stop, add, jnp.zeros((block, block), jnp.float32))
    local = jnp.arange(block, dtype=jnp.int32)
    diagonal = (local[:, None] - local[None, :]) + (block - 1)

    def store(n, carry):
        n = jnp.asarray(n, jnp.int32)
        out_ref[example, head, turn, n] = jnp.where(diagonal == n, total, 0).sum()
        return carry

    lax.fori_loop(0, 2 * block, store, 0)


def diagonal_pass(
    residuals: Residuals, operands: Operands, lead: tuple[int, ...], spec: AttentionSpec, read: str
) -> jax.Array:
    """Sums [..., H, T + S - 1] over diagonals, of the least i - j first."""
    q, k, v = residuals[:3]
    shape = Shape.of(q, k, v, lead)
    tile = tile_for("dq", spec, q, k, v, operands)
    block = min(tile.block_q, tile.block_kv)
    tile = dataclasses.replace(tile, block_q=block, block_kv=block)
    arrays, specs, names = whole_arrays(residuals, operands, tile, shape, spec)
    kv_tiles = pl.cdiv(shape.S, block)
    sums = output((*lead, shape.H, pl.cdiv(shape.T, block) + kv_tiles - 1, 2 * block), jnp.float32, q)
    flat = flat_output(sums, 3)
    kernel = functools.partial(
        flash_attention_diagonals_kernel, spec=spec, tile=tile, shape=shape, names=names, read=read
    )
    call = launch(kernel, (flat.shape[2], shape.H, shape.examples), (specs, whole_spec(flat)), flat, tile, spec)
    found = call(*arrays).reshape(sums.shape)
    nothing = jnp.zeros((*found.shape[:-2], 1, block), found.dtype)
    ends = jnp.concatenate([found[..., :block], nothing], -2) + jnp.concatenate([nothing, found[..., block:]], -2)
    first = kv_tiles * block - shape.S
    return ends.reshape(*ends.shape[:-2], -1)[..., first : first + shape.T + shape.S - 1]
