"""Backward kernel for what belongs to a key: gradients of key and value, and sums over its column of scores."""

import functools
from collections.abc import Collection

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from flash_jax.spec import AttentionSpec, Operands
from flash_jax.tiles import masks
from flash_jax.triton import columns
from flash_jax.triton.entries import Residuals, probabilities, score_gradient, to_product, weight_of_read
from flash_jax.triton.launch import (
    Shape,
    flat_output,
    has_nan,
    load_stats,
    output,
    over_tiles,
    store_stats,
    with_care,
)
from flash_jax.triton.operands import Reader, flattened, inputs, specs
from flash_jax.triton.order import Grid, bytes_of_head, launch_tiles
from flash_jax.triton.tiling import apart, padded, tile_for


def flash_attention_dkv_kernel(  # noqa: PLR0913
    j, extra, refs: Residuals, dk_ref, dv_ref, column_refs, *, spec, tile, shape
):
    """dV_j = sum_i P_ij^T dO_i and dK_j = scale sum_i dS_ij^T Q_i, over all rows and query heads (lines 11-16).

    One program computes block_kv rows of one key/value head, adding up the query heads that share it; query tiles
    stream past. It works on S^T = K_j Q_i^T, so that P^T and dS^T feed the products as they are. One of dk_ref and
    dv_ref may be None: then what only the other gradient needs is computed.

    `column_refs`, by name and where there is a dk_ref, take sums over the rows for each query head: "bias" that of dS,
    the gradient of a bias that is the same for all queries, and "read.n" that of x dS, with x the derivative of the
    score to what the n-th read of the score_mod gives.
    """
    reader = Reader.of(extra, spec, shape, tile, transposed=True)
    geometry, scoring = reader.geometry, reader.scoring(refs.k.dtype)
    col = j * tile.block_kv
    cols = col + jnp.arange(tile.block_kv, dtype=jnp.int32)
    within = None if shape.S % tile.block_kv == 0 else cols < shape.S
    inside = masks.seen_cols(cols, geometry, spec) if reader.closed else cols < geometry.kv_length
    inside = within if inside is None else inside
    whole = (slice(None),)
    k = columns.load(refs.k, whole, inside, shape.D)  # [block_kv, D]
    v = () if dk_ref is None else columns.load(refs.v, whole, inside, shape.Dv)  # [block_kv, Dv]

    def body(i, carry, head, careful, masked):
        dk, dv, sums = carry
        row = i * tile.block_q
        view = reader.view(row, col, masked, head, careful)
        here = pl.ds(row, tile.block_q)
        q = columns.load(refs.q, (here, head), view.keep, shape.D)
        out_ct = columns.load(refs.out_ct, (here, head), view.keep, shape.Dv)
        lse = load_stats(refs.lse.at[head, here], view.keep)
        qk = columns.inner(k, q, spec)  # [block_kv, block_q]
        p = probabilities(qk, lse[None, :], view, scoring)
        if dv is not None:
            dv = columns.add_product(dv, p[1], out_ct, spec)
        if dk is None:
            return dk, dv, sums
        delta = load_stats(refs.delta.at[head, here], view.keep)
        ds = score_gradient(p, columns.inner(v, out_ct, spec), delta[None, :], view, scoring, spec)
        sums = {
            name: x + (ds if name == "bias" else ds * weight_of_read(name, qk, view, scoring)).sum(axis=1)
            for name, x in sums.items()
        }
        return columns.add_product(dk, to_product(ds, qk, view, scoring), q, spec), dv, sums

    same = reader.q_range(j) if extra.tiles is None else None  # what all heads of the group see

    def one_head(head, carry, careful):
        head = jnp.asarray(head, jnp.int32)  # under jax_enable_x64 a loop counts in 64 bits
        sums = {name: jnp.zeros((tile.block_kv,), jnp.float32) for name in column_refs}
        seen = reader.q_list(j, head) if same is None else same
        one = functools.partial(body, head=head, careful=careful)
        tiles, whole = seen.all_partial() if careful else seen, shape.T >= tile.block_q
        *carry, sums = over_tiles(tiles, one, (*carry, sums), whole=whole)
        for name, x in sums.items():
            x = x if inside is None else jnp.where(inside, x, 0)
            store_stats(column_refs[name].at[head, pl.ds(jnp.zeros((), jnp.int32), tile.block_kv)], x, within)
        return tuple(carry)

    start = (
        None if dk_ref is None else columns.zeros(tile.block_kv, shape.D, refs.k.dtype),
        None if dv_ref is None else columns.zeros(tile.block_kv, shape.Dv, refs.v.dtype),
    )

    def run(careful):
        one = functools.partial(one_head, careful=careful)
        if shape.groups == 1:
            return one(jnp.zeros((), jnp.int32), start)
        return lax.fori_loop(0, shape.groups, one, start)

    dk, dv = with_care(run, not reader.closed, lambda found: has_nan(*jax.tree.leaves(found)))
    undropped = 1 / (1 - spec.dropout_rate) if spec.dropout_rate else None
    for ref, x, factor, head_dim in (
        (dk_ref, dk, scoring.scale.value, shape.D),
        (dv_ref, dv, undropped, shape.Dv),
    ):
        if x is not None:
            columns.store(ref, _finished(x, factor, inside), within, head_dim)


def _finished(x: columns.Columns, factor: float | jax.Array | None, inside: jax.Array | None) -> columns.Columns:
    """A sum times its factor; 0 for keys that nobody sees, also where a full tile computed something."""
    if factor is not None:
        x = tuple(part * factor for part in x)
    return x if inside is None else tuple(jnp.where(inside[:, None], part, 0) for part in x)


def key_value_pass(
    residuals: Residuals,
    operands: Operands,
    lead: tuple[int, ...],
    dtypes: tuple[jnp.dtype, jnp.dtype],
    wanted: Collection[str],
    columns_wanted: tuple[str, ...],
    spec: AttentionSpec,
) -> dict[str, jax.Array]:
    """{"key": dk, "value": dv}, of `dtypes`, and the named sums over each column [..., H, S], with all leading dims.

    `wanted` are names of these two. More may be found.
    """
    q, k, v = residuals[:3]
    kernels, found = [("key", "value")], {}
    if apart((padded(q.shape[-1]), padded(v.shape[-1])), k.dtype.itemsize):
        needed = {*wanted, *(("key",) if columns_wanted else ())}  # sums over columns are dk's by-products
        kernels = [(name,) for name in ("key", "value") if name in needed]
    for names in kernels:
        found |= _launch(residuals, operands, lead, dtypes, names, columns_wanted if "key" in names else (), spec)
    return found


def _launch(residuals, operands, lead, dtypes, names, columns_wanted, spec):  # noqa: PLR0913
    """As `key_value_pass`, by one kernel for the gradients in `names`."""
    q, k, v = residuals[:3]
    shape = Shape.of(q, k, v, lead)
    tile = tile_for("dkv", spec, q, k, v, operands)
    extra = inputs(operands, tile, shape, spec, by="key")

    def place(j, h):
        return j, h

    def whole(j, h):
        return 0, h  # the h-th block of `groups` query heads

    dk, dv = (
        output((*lead, *x.shape[-3:]), dtype, x) if name in names else None
        for name, x, dtype in zip(("key", "value"), (k, v), dtypes, strict=True)
    )
    column = output((*lead, shape.H, shape.S), jnp.float32, k)
    block = Residuals(
        shape.rows(q, None, shape.groups, whole),
        shape.rows(k, tile.block_kv, None, place),
        shape.rows(v, tile.block_kv, None, place),
        shape.rows(residuals.out_ct, None, shape.groups, whole),
        shape.stats(residuals.lse, None, shape.groups, whole),
        shape.stats(residuals.delta, None, shape.groups, whole),
    )
    streamed = bytes_of_head(q, residuals.out_ct) * shape.groups
    grid = Grid.of(pl.cdiv(shape.S, tile.block_kv), shape.K, streamed, shape, operands, spec)
    call = launch_tiles(
        functools.partial(flash_attention_dkv_kernel, spec=spec, tile=tile, shape=shape),
        grid,
        (
            (specs(extra, shape, shape.groups), block),
            (
                *(None if x is None else shape.rows(x, tile.block_kv, None, place) for x in (dk, dv)),
                {name: shape.stats(column, tile.block_kv, shape.groups, place) for name in columns_wanted},
            ),
        ),
        (
            *(None if x is None else flat_output(x, 3) for x in (dk, dv)),
            {name: flat_output(column, 2) for name in columns_wanted},
        ),
        tile,
        spec,
        f"flash_attention_d{''.join(name[0] for name in names)}_kernel",
    )
    *gradients, sums = call(flattened(extra, shape), residuals.flattened())
    pairs = zip(("key", "value"), (dk, dv), gradients, strict=True)
    found = {name: y.reshape(x.shape) for name, x, y in pairs if x is not None}
    return found | {name: x.reshape(column.shape) for name, x in sums.items()}
