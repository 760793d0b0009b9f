"""Backward kernel for a bias that has an entry for each query and key."""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from flash_jax.spec import OWN_RANK, AttentionSpec, Operands
from flash_jax.triton import columns
from flash_jax.triton.entries import Residuals, probabilities, score_gradient
from flash_jax.triton.launch import Shape, flat_output, launch, load_stats, output
from flash_jax.triton.operands import Reader, flattened, inputs
from flash_jax.triton.tiling import tile_for


def flash_attention_dbias_kernel(extra, refs: Residuals, dbias_ref, *, spec, tile, shape, bias_lead, names):
    """dB = sum of dS = P * (dO V^T - delta) over the examples and heads that share the bias, one after the other.

    One program computes a tile [block_q, block_kv] of one head of one bias, recomputing the tile's scores for each
    (example, head) in a fixed order: the sum needs no memory, whatever it runs over. Grid: (pairs of tiles, heads of
    the bias, examples of the bias). Refs hold whole arrays. `names` gives the leading dims of each.
    """
    kv_tiles = pl.cdiv(shape.S, tile.block_kv)
    pair, bias_head, bias_example = (pl.program_id(n) for n in range(3))
    i, j = lax.div(pair, jnp.full_like(pair, kv_tiles)), lax.rem(pair, jnp.full_like(pair, kv_tiles))
    row, col = i * tile.block_q, j * tile.block_kv
    rows = row + jnp.arange(tile.block_q, dtype=jnp.int32)
    cols = col + jnp.arange(tile.block_kv, dtype=jnp.int32)
    inside_q = None if shape.T % tile.block_q == 0 else rows < shape.T
    inside_kv = None if shape.S % tile.block_kv == 0 else cols < shape.S
    shared_heads = shape.H // dbias_ref.shape[1]
    examples = shape.examples // dbias_ref.shape[0]

    def one(n, total):
        n = jnp.asarray(n, jnp.int32)
        turn = lax.div(n, jnp.full_like(n, shared_heads))
        head = bias_head if shared_heads == 1 else lax.rem(n, jnp.full_like(n, shared_heads))
        example = shape.combined(bias_lead)(bias_example, turn)
        at = {name: jnp.asarray(shape.example(own)(example), jnp.int32) for name, own in names.items()}
        reader = Reader.of(extra, spec, shape, tile, example=lambda name: at[name])
        scoring = reader.scoring(refs.q.dtype)

        def add(_, total):
            kv_head = lax.div(head, jnp.full_like(head, shape.groups))
            here_q, here_kv = pl.ds(row, tile.block_q), pl.ds(col, tile.block_kv)
            q = columns.load(refs.q, (at["q"], here_q, head), inside_q, shape.D)
            k = columns.load(refs.k, (at["k"], here_kv, kv_head), inside_kv, shape.D)
            v = columns.load(refs.v, (at["v"], here_kv, kv_head), inside_kv, shape.Dv)
            out_ct = columns.load(refs.out_ct, (at["out_ct"], here_q, head), inside_q, shape.Dv)
            lse = load_stats(refs.lse.at[at["lse"], head, here_q], inside_q)
            delta = load_stats(refs.delta.at[at["delta"], head, here_q], inside_q)
            view = reader.view(row, col, True, head)
            view = view.guarded()  # without `keep`: rows and keys are loaded as they are
            p = probabilities(columns.inner(q, k, spec), lse[:, None], view, scoring, refs.q.dtype)
            return total + score_gradient(p, columns.inner(out_ct, v, spec), delta[:, None], view, scoring, spec)

        return lax.fori_loop(0, jnp.asarray(reader.visible(i, j)).astype(jnp.int32), add, total)

    total = lax.fori_loop(0, examples * shared_heads, one, jnp.zeros((tile.block_q, tile.block_kv), jnp.float32))
    keep = None
    for inside, axis in ((inside_q, 1), (inside_kv, 0)):
        if inside is not None:
            inside = jnp.broadcast_to(jnp.expand_dims(inside, axis), total.shape)
            keep = inside if keep is None else keep & inside
    target = dbias_ref.at[bias_example, bias_head, pl.ds(row, tile.block_q), pl.ds(col, tile.block_kv)]
    plgpu.store(target, total.astype(dbias_ref.dtype), mask=keep)


def bias_pass(
    residuals: Residuals, operands: Operands, lead: tuple[int, ...], own: tuple[int, ...], spec: AttentionSpec
) -> jax.Array:
    """The gradient of bias [..., H or 1, T, S], with leading dims `own`: summed over those of size 1."""
    q, k, v = residuals[:3]
    shape = Shape.of(q, k, v, lead)
    tile = tile_for("dq", spec, q, k, v, operands)
    extra = inputs(operands, tile)
    names = {name: x.shape[: x.ndim - OWN_RANK[name]] for name, x in vars(operands).items() if x is not None}
    names |= {
        name: x.shape[:-2] for name, x in zip(("q_summary", "kv_summary"), extra[1:], strict=True) if x is not None
    }
    ranks = Residuals(3, 3, 3, 3, 2, 2)
    names |= {name: x.shape[: x.ndim - r] for name, x, r in zip(Residuals._fields, residuals, ranks, strict=True)}
    dbias = output((*own, *operands.bias.shape[-3:]), operands.bias.dtype, q)
    flat = flat_output(dbias, 3)
    pairs = pl.cdiv(shape.T, tile.block_q) * pl.cdiv(shape.S, tile.block_kv)
    kernel = functools.partial(
        flash_attention_dbias_kernel, spec=spec, tile=tile, shape=shape, bias_lead=own, names=names
    )
    arrays = flattened(extra), residuals.flattened()
    vectors = Residuals(True, True, True, True, False, False)
    whole = jax.tree.map(_whole, arrays[0]), Residuals(*map(_whole, arrays[1], vectors))
    call = launch(kernel, (pairs, flat.shape[1], flat.shape[0]), (whole, _whole(flat)), flat, tile, spec)
    return call(*arrays).reshape(dbias.shape)


def _whole(x, vectors: bool = False) -> pl.BlockSpec:
    """All of x; where its last dim is a head dim, with the padding that the tiles read (masked)."""
    last = columns.width(x.shape[-1], x.dtype.itemsize) if vectors else x.shape[-1]
    return pl.BlockSpec((*x.shape[:-1], last), lambda *_: (0,) * len(x.shape))
