"""Forward kernel."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl

from flash_jax.spec import AttentionSpec, Operands, leads
from flash_jax.tiles import softmax
from flash_jax.tiles.scores import LOG2_E, Scoring
from flash_jax.triton import columns, instructions, online
from flash_jax.triton.launch import (
    Shape,
    flat,
    flat_output,
    has_nan,
    output,
    over_tiles,
    store_stats,
    with_care,
)
from flash_jax.triton.operands import Reader, View, flattened, inputs, specs
from flash_jax.triton.order import Grid, bytes_of_head, launch_tiles
from flash_jax.triton.tiling import Tile, tile_for


def flash_attention_forward_kernel(program, extra, arrays, out_ref, lse_ref, *, spec, tile, shape):
    """O = softmax(scale Q K^T) V and L = log-sum-exp of the scores (Dao, "FlashAttention-2", 2023, algorithm 1).

    One program computes block_q rows of one head of one example. Q_i, the accumulator of O_i and the running maximum m
    and sum l of its rows stay in registers while key/value tiles stream past; with S = scale Q_i K_j^T (and softcap,
    bias, alibi),
        m' = max(m, rowmax S),  P = exp(S - m'),  l = exp(m - m') l + rowsum P,  O = exp(m - m') O + P V_j,
    and O is divided by l once, at the end. Where a low softcap bounds all scores, m is a constant. Tiles
    that need a mask run before those that do not; tiles with nothing visible are not visited.
    """
    q_ref, k_ref, v_ref = arrays
    reader = Reader.of(extra, spec, shape, tile)
    scoring = reader.scoring(q_ref.dtype)
    i = q_tile(program, shape, tile, spec)
    row = i * tile.block_q
    rows = row + jnp.arange(tile.block_q, dtype=jnp.int32)
    inside = None if shape.T % tile.block_q == 0 else rows < shape.T
    q = columns.load(q_ref, (slice(None),), inside, shape.D)  # [block_q, D]
    sign = scoring.scale.sign if scoring.plain else 1
    if isinstance(sign, float) and sign < 0:
        q, sign = tuple(-part for part in q), 1

    def body(j, sums, masked, careful):
        col = j * tile.block_kv
        view = reader.view(row, col, masked, careful=careful)
        here = (pl.ds(col, tile.block_kv),)
        k = columns.load(k_ref, here, view.keep, shape.D)
        qk = columns.inner(q, k, spec)  # [block_q, block_kv]
        if isinstance(sign, jax.Array):  # of each product: a q that was computed would not be read from shared memory
            qk *= sign
        p, shrink, sums = _step(qk, sums, view, scoring, masked, fused and not careful)
        if view.kept is not None:
            p = jnp.where(view.kept, p, 0)
        v = columns.load(v_ref, here, view.keep, shape.Dv)
        accumulator = sums.accumulator
        if shrink is not None:
            by = jnp.multiply if careful or not lazy else scoring.arithmetic.shrunk
            accumulator = tuple(by(part, shrink[:, None]) for part in accumulator)
        return sums._replace(accumulator=columns.add_product(accumulator, p, v, spec))

    fused = online.suits(scoring, max(shape.D, shape.Dv))
    # Not with dropout: what it keeps would wait in predicates, which are seven, while a thread decides.
    narrowest = min(piece.size for piece in columns.pieces(shape.Dv, q_ref.dtype.itemsize))
    lazy = fused and not spec.dropout_rate and instructions.can_shrink(tile, narrowest)
    start = online.Sums(
        columns.zeros(tile.block_q, shape.Dv, q_ref.dtype),
        jnp.full((tile.block_q,), -jnp.inf if scoring.base is None else scoring.base, jnp.float32),
        jnp.zeros((tile.block_q,), jnp.float32),
    )
    seen = reader.kv_range(i)

    def run(careful):
        tiles = seen.all_partial() if careful else seen
        sums = over_tiles(tiles, functools.partial(body, careful=careful), start, whole=shape.S >= tile.block_kv)
        return sums._replace(base=sums.base * scoring.multiplier) if fused and careful else sums

    def spoiled(sums):
        reasons = [] if reader.closed else [has_nan(*sums.accumulator)]
        return functools.reduce(jnp.logical_or, reasons + ([online.beyond(sums)] if fused else []))

    sums = with_care(run, fused or not reader.closed, spoiled)
    sink = None if extra.operands.sinks is None else extra.operands.sinks[...]
    alive = rows < reader.geometry.q_length
    multiplier = LOG2_E if scoring.base is not None else 1.0 if fused else scoring.multiplier
    alive, divisor, lse = softmax.finish(sums.base, sums.total, multiplier, alive, sink)
    if spec.dropout_rate:
        divisor *= 1 - spec.dropout_rate
    out = tuple(jnp.where(alive[:, None], part / divisor[:, None], 0) for part in sums.accumulator)
    columns.store(out_ref, out, inside, shape.Dv)
    store_stats(lse_ref, lse, inside)


def _step(qk, sums: online.Sums, view: View, scoring: Scoring, masked: bool, fused: bool):
    """(p, shrink, sums) of products q . k, see `online.step`; with a constant base only the sum of p changes."""
    if scoring.base is not None:
        p = scoring.relative(qk, view.allowed)
        return p, None, sums._replace(total=sums.total + p.sum(axis=1))
    raw = scoring.raw(qk, view.addend, view.mod)
    if view.allowed is not None:
        raw = jnp.where(view.allowed, raw, -jnp.inf)
    empty = masked or scoring.biased or scoring.modified  # whether a row may still have seen nothing
    return (online.step if fused else online.exact_step)(raw, sums, scoring, empty)


def q_tile(program, shape: Shape, tile: Tile, spec: AttentionSpec):
    """The query tile of a program: the heaviest first (a later row sees more keys), so that the last ones are light."""
    last = pl.cdiv(shape.T, tile.block_q) - 1
    return program if spec.band[1] is None else last - program


def forward(
    q: jax.Array, k: jax.Array, v: jax.Array, operands: Operands, spec: AttentionSpec, wide: bool = False
) -> tuple[jax.Array, jax.Array]:
    """out [..., T, H, Dv] in query's dtype (with `wide`, in float32) and lse [..., H, T] float32."""
    arrays = (q, k, v)
    lead = np.broadcast_shapes(*(x.shape[:-3] for x in arrays), *leads(operands, q.ndim - 3))
    shape = Shape.of(q, k, v, lead)
    tile = tile_for("forward", spec, q, k, v, operands)
    extra = inputs(operands, tile, shape, spec)

    def place(i, h):
        return q_tile(i, shape, tile, spec), h

    def whole(i, h):
        return 0, h // shape.groups

    out = output((*lead, shape.T, shape.H, shape.Dv), jnp.float32 if wide else q.dtype, q)
    lse = output((*lead, shape.H, shape.T), jnp.float32, q)
    streamed = bytes_of_head(k, v) // shape.groups
    grid = Grid.of(pl.cdiv(shape.T, tile.block_q), shape.H, streamed, shape, operands, spec)
    call = launch_tiles(
        functools.partial(flash_attention_forward_kernel, spec=spec, tile=tile, shape=shape),
        grid,
        (
            (
                specs(extra, shape, None),
                (
                    shape.rows(q, tile.block_q, None, place),
                    shape.rows(k, None, None, whole),
                    shape.rows(v, None, None, whole),
                ),
            ),
            (shape.rows(out, tile.block_q, None, place), shape.stats(lse, tile.block_q, None, place)),
        ),
        (flat_output(out, 3), flat_output(lse, 2)),
        tile,
        spec,
    )
    out_flat, lse_flat = call(flattened(extra, shape), tuple(flat(x, 3) for x in arrays))
    return out_flat.reshape(out.shape), lse_flat.reshape(lse.shape)
