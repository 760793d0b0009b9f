"""What backward kernels share that read whole arrays and add up pairs of tiles in an order of their own."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from flash_jax.spec import AttentionSpec, Operands
from flash_jax.triton import columns
from flash_jax.triton.entries import Residuals, probabilities, score_gradient, weight_of_read
from flash_jax.triton.launch import Shape, load_stats
from flash_jax.triton.operands import Inputs, Reader, flattened, inputs
from flash_jax.triton.tiling import Tile


def add_pair(
    total: jax.Array,
    arrays: tuple[Inputs, Residuals],
    names: dict[str, tuple[int, ...]],
    place: tuple[Any, Any, Any, Any],
    read: str | None,
    static: tuple[AttentionSpec, Tile, Shape],
) -> jax.Array:
    """total [block_q, block_kv] + dS, or x dS, of one pair of tiles; nothing is computed where it is not visible.

    Args:
      total: the sum so far.
      arrays: refs that hold whole arrays, of leading dims `names`.
      names: the leading dims of each array, by its name.
      place: example (counted over all leading dims), head, query tile and key/value tile.
      read: None for dS, or the name of a read of the score_mod, whose x is the derivative of the score to what it
        gives.
      static: what is known before.
    """
    (extra, refs), (example, head, i, j), (spec, tile, shape) = arrays, place, static
    at = {name: jnp.asarray(shape.example(own)(example), jnp.int32) for name, own in names.items()}
    reader = Reader.of(extra, spec, shape, tile, example=lambda name: at[name])
    scoring = reader.scoring(refs.q.dtype)
    row, col = i * tile.block_q, j * tile.block_kv
    rows = row + jnp.arange(tile.block_q, dtype=jnp.int32)
    cols = col + jnp.arange(tile.block_kv, dtype=jnp.int32)
    inside_q = None if shape.T % tile.block_q == 0 else rows < shape.T
    inside_kv = None if shape.S % tile.block_kv == 0 else cols < shape.S

    def add(_, total):
        kv_head = lax.div(head, jnp.full_like(head, shape.groups))
        here_q, here_kv = pl.ds(row, tile.block_q), pl.ds(col, tile.block_kv)
        q = columns.load(refs.q, (at["q"], here_q, head), inside_q, shape.D)
        k = columns.load(refs.k, (at["k"], here_kv, kv_head), inside_kv, shape.D)
        v = columns.load(refs.v, (at["v"], here_kv, kv_head), inside_kv, shape.Dv)
        out_ct = columns.load(refs.out_ct, (at["out_ct"], here_q, head), inside_q, shape.Dv)
        lse = load_stats(refs.lse.at[at["lse"], head, here_q], inside_q)
        delta = load_stats(refs.delta.at[at["delta"], head, here_q], inside_q)
        view = reader.view(row, col, True, head).guarded()  # without `keep`: rows and keys are loaded as they are
        qk = columns.inner(q, k, spec)
        p = probabilities(qk, lse[:, None], view, scoring)
        ds = score_gradient(p, columns.inner(out_ct, v, spec), delta[:, None], view, scoring, spec)
        return total + (ds if read is None else ds * weight_of_read(read, qk, view, scoring))

    return lax.fori_loop(0, jnp.asarray(reader.visible(i, j, head)).astype(jnp.int32), add, total)


def whole_arrays(residuals: Residuals, operands: Operands, tile: Tile, shape: Shape, spec: AttentionSpec):
    """((Inputs, Residuals) flattened, block specs of the same structure, {name: leading dims})."""
    extra = inputs(operands, tile, shape, spec, by="pair")
    count = len(shape.lead)
    others = zip(Inputs._fields[1:], extra[1:], strict=True)
    named = {**dict(extra.operands.items()), **dict(others), **residuals._asdict()}
    names = {name: x.shape[:count] for name, x in named.items() if x is not None}
    arrays = flattened(extra, shape), residuals.flattened()
    vectors = Residuals(True, True, True, True, False, False)
    specs = jax.tree.map(whole_spec, arrays[0]), Residuals(*map(whole_spec, arrays[1], vectors))
    return arrays, specs, names


def whole_spec(x: Any, vectors: bool = False) -> pl.BlockSpec:
    """All of x; where its last dim is a head dim, with the padding that the tiles read (masked)."""
    last = (columns.width(x.shape[-1], x.dtype.itemsize) if vectors else x.shape[-1],) if x.ndim else ()
    return pl.BlockSpec((*x.shape[:-1], *last), lambda *_: (0,) * len(x.shape))
