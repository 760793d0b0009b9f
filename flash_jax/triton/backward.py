"""Backward pass: which kernels the wanted gradients need, and how their results make the gradients; no atomics."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from flash_jax.spec import AttentionSpec, Operands, leads
from flash_jax.tiles import rows, softmax
from flash_jax.tiles.reads import dense_shape, gradients, wanted_reads
from flash_jax.tiles.rows import by_rows, needed_sums, refine, row_gradient, shared_gradients
from flash_jax.tiles.sums import sum_to
from flash_jax.triton.dbias import bias_pass
from flash_jax.triton.diagonals import diagonal_pass
from flash_jax.triton.dkv import key_value_pass
from flash_jax.triton.dq import query_pass
from flash_jax.triton.entries import Residuals
from flash_jax.triton.stored import query_and_bias_pass


def backward(
    primals: tuple[jax.Array, jax.Array, jax.Array, Operands],
    out: jax.Array,
    lse: jax.Array,
    out_ct: jax.Array,
    lse_ct: jax.Array | None,
    wanted: dict[str, tuple[int, ...]],
    spec: AttentionSpec,
) -> dict[str, jax.Array]:
    """Gradients of the inputs named in `wanted`, with the leading dims given there; launches only what they need."""
    q, k, v, operands = primals
    bias: Any = operands.bias
    count = q.ndim - 3
    mod: Any = spec.score_mod or spec.mask_mod
    lead = np.broadcast_shapes(*(x.shape[:count] for x in (q, k, v, out_ct, lse)), *leads(operands, count))
    dead = softmax.dead_rows(out, lse, operands.sinks)
    delta = softmax.delta(out, out_ct, dead, lse_ct)
    p_sink = None if operands.sinks is None else rows.sink_probability(operands.sinks, lse)
    # Rows that only the bias or a score_mod makes dead may hold NaN; other reasons the tiles know.
    if operands.bias is not None or spec.score_mod is not None:
        q, out_ct = (softmax.without_dead(x, dead) for x in (q, out_ct))
    residuals = Residuals(q, k, v, out_ct.astype(q.dtype), softmax.dead_to_inf(lse, dead), delta)
    if q.dtype == jnp.float32:
        _, sums, _ = query_pass(residuals, operands, lead, ("ds", "p"), None, spec)
        delta, norm = refine(sums["p_sums"][0], sums["ds_sums"][0], delta, lse_ct, p_sink)
        p_sink = None if p_sink is None else p_sink * norm
        out_ct = out_ct * jnp.swapaxes(norm, -1, -2)[..., None]
        residuals = residuals._replace(out_ct=out_ct, delta=delta * norm)

    reads = {f"read.{n}": x for n, x in wanted_reads(spec.score_mod, wanted).items()}
    of = lambda kind: tuple(name for name, x in reads.items() if x.kind == kind)  # noqa: E731
    found, sums, entries = {}, {}, {}
    names = needed_sums(operands, wanted, k.shape[-3], of("rows"))
    kind = _kind_of_bias(operands, wanted, k.shape[-3])
    target: Any = jax.ShapeDtypeStruct((*wanted["bias"], *bias.shape[-3:]), bias.dtype) if kind == "dense" else None
    dtype = _dtype(q, wanted.get("query"), lead) if "query" in wanted else None
    found["query"], sums, stored = query_and_bias_pass(residuals, operands, lead, names, dtype, spec, target)
    columns = (("bias",) if kind == "columns" else ()) + of("columns")
    if "key" in wanted or "value" in wanted or columns:
        dtypes = _dtype(k, wanted.get("key"), lead), _dtype(v, wanted.get("value"), lead)
        found["key"], found["value"], entries = key_value_pass(residuals, operands, lead, dtypes, columns, spec)
        if kind == "columns":
            column = entries.pop("bias")[..., None, :]
            found["bias"] = sum_to(column, (*wanted["bias"], bias.shape[-3], 1, k.shape[-3]))
    if kind == "dense":
        found["bias"] = bias_pass(residuals, operands, lead, target, spec) if stored is None else stored
    entries |= {name: diagonal_pass(residuals, operands, lead, spec, name) for name in of("diagonals")}
    for name in of("dense"):
        shape = dense_shape(reads[name], wanted, operands, mod, (q.shape[-2], q.shape[-3], k.shape[-3]))
        target = jax.ShapeDtypeStruct(shape, jnp.float32)
        entries[name] = bias_pass(residuals, operands, lead, target, spec, name)

    total = jnp.where(dead, 0, rows.row_total(delta, lse_ct, p_sink))
    row = delta, total, p_sink, dead
    shared = {name: own for name, own in wanted.items() if name not in found}
    found |= shared_gradients(operands, shared, sums, row, lse_ct)
    entries |= {name: row_gradient(sums, name, row) for name in of("rows")}
    if mod is not None:
        pairs = {name: (reads[name], x) for name, x in entries.items()}
        found |= gradients(pairs, operands, wanted, mod, (q.shape[-3], k.shape[-3]))
    inputs = dict(operands.items(), query=q, key=k, value=v)
    return {
        name: sum_to(found[name], own + found[name].shape[len(own) :]).astype(inputs[name].dtype)
        for name, own in wanted.items()
    }


def _kind_of_bias(operands: Operands, wanted: dict, S: int) -> str | None:
    """How a wanted gradient of bias is found: from "rows" or "columns" where it is one number for each, or "dense"."""
    if "bias" not in wanted:
        return None
    if by_rows(operands, wanted, S):
        return "rows"
    return "columns" if operands.bias.shape[-2] == 1 else "dense"


def _dtype(x: jax.Array, own: tuple[int, ...] | None, lead: tuple[int, ...]):
    """The dtype in which a kernel writes the gradient of x: float32 where it is summed over leading dims afterwards."""
    return x.dtype if own is None or own == lead else jnp.float32
