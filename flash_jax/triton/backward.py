"""Backward pass: which kernels the wanted gradients need, and how their results make the gradients; no atomics."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from flash_jax.spec import AttentionSpec, Operands, leads
from flash_jax.tiles import rows, softmax
from flash_jax.tiles.reads import Read, dense_shape, embed, gradients, in_whole, wanted_reads
from flash_jax.tiles.rows import by_rows, needed_sums, refine, row_gradient, shared_gradients
from flash_jax.tiles.sums import sum_to
from flash_jax.triton.dbias import bias_pass
from flash_jax.triton.diagonals import diagonal_pass
from flash_jax.triton.dkv import key_value_pass
from flash_jax.triton.dq import query_pass
from flash_jax.triton.entries import Residuals
from flash_jax.triton.stored import query_and_bias_pass


class Wanted(NamedTuple):
    """What the kernels are to find."""

    leads: dict[str, tuple[int, ...]]  # leading dims of the gradient of each input
    names: tuple[str, ...]  # of sums over rows, see `needed_sums`
    reads: dict[str, Read]  # of a score_mod
    bias: str | None  # see `_kind_of_bias`
    wide: bool  # whether gradients are to be left in float32

    def of_kind(self, kind: str) -> tuple[str, ...]:
        """The names of the reads of a kind."""
        return tuple(name for name, x in self.reads.items() if x.kind == kind)


def backward(
    primals: tuple[jax.Array, jax.Array, jax.Array, Operands],
    out: jax.Array,
    lse: jax.Array,
    out_ct: jax.Array,
    lse_ct: jax.Array | None,
    wanted: dict[str, tuple[int, ...]],
    spec: AttentionSpec,
    over_keys: Callable | None = None,
) -> dict[str, jax.Array]:
    """Gradients of the inputs named in `wanted`, with the leading dims given there; launches only what they need.

    `over_keys(f)` adds up the dicts f(k, v, operands, spec) of the parts of the keys, where `key` and `value` are but
    one part; what it returns under "key" and "value" belongs to that one.
    """
    q, k, v, operands = primals
    count = q.ndim - 3
    mod: Any = spec.score_mod or spec.mask_mod
    T, S = spec.whole or (q.shape[-3], k.shape[-3])
    lead = np.broadcast_shapes(*(x.shape[:count] for x in (q, k, v, out_ct, lse)), *leads(operands, count))
    dead = softmax.dead_rows(out, lse, operands.sinks)
    delta = softmax.delta(out, out_ct, dead, lse_ct)
    p_sink = None if operands.sinks is None else rows.sink_probability(operands.sinks, lse)
    # Rows that only the bias or a score_mod makes dead may hold NaN; other reasons the tiles know.
    if operands.bias is not None or spec.score_mod is not None:
        q, out_ct = (softmax.without_dead(x, dead) for x in (q, out_ct))
    residuals = Residuals(q, k, v, out_ct.astype(q.dtype), softmax.dead_to_inf(lse, dead), delta)
    add_up = over_keys or (lambda f: f(k, v, operands, spec))
    if q.dtype == jnp.float32:
        sums = add_up(functools.partial(_row_sums, residuals, lead))
        delta, norm = refine(sums["p_sums"][0], sums["ds_sums"][0], delta, lse_ct, p_sink)
        p_sink = None if p_sink is None else p_sink * norm
        out_ct = out_ct * jnp.swapaxes(norm, -1, -2)[..., None]
        residuals = residuals._replace(out_ct=out_ct, delta=delta * norm)

    reads = {f"read.{n}": x for n, x in wanted_reads(spec.score_mod, wanted).items()}
    by_row = tuple(name for name, x in reads.items() if x.kind == "rows")
    names = needed_sums(operands, wanted, S, by_row)
    everything = Wanted(wanted, names, reads, _kind_of_bias(operands, wanted, S), over_keys is not None)
    found = add_up(functools.partial(_launched, residuals, lead, everything))

    sums = {name: found.pop(name) for name in list(found) if name.endswith("_sums")}
    entries = {name: found.pop(name) for name in list(found) if name in reads}
    total = jnp.where(dead, 0, rows.row_total(delta, lse_ct, p_sink))
    row = delta, total, p_sink, dead
    shared = {name: own for name, own in wanted.items() if name not in found}
    found |= shared_gradients(operands, shared, sums, row, lse_ct)
    if mod is not None:
        sizes = q.shape[-3], k.shape[-3]
        for name in by_row:
            entries[name] = in_whole(reads[name], row_gradient(sums, name, row), operands, sizes, spec.whole)
        pairs = {name: (reads[name], x) for name, x in entries.items()}
        found |= gradients(pairs, operands, wanted, mod, (T, S))
    inputs = dict(operands.items(), query=q, key=k, value=v)
    return {
        name: sum_to(found[name], own + found[name].shape[len(own) :]).astype(inputs[name].dtype)
        for name, own in wanted.items()
    }


def _row_sums(residuals: Residuals, lead, k, v, operands: Operands, spec: AttentionSpec) -> dict[str, jax.Array]:
    """Sums of ds and of p over each row."""
    return query_pass(residuals._replace(k=k, v=v), operands, lead, ("ds", "p"), None, spec)[1]


def _launched(
    residuals: Residuals, lead, wanted: Wanted, k, v, operands: Operands, spec: AttentionSpec
) -> dict[str, jax.Array]:
    """What the kernels find: gradients, sums over rows, and what the reads of a score_mod meet."""
    residuals, q, found = residuals._replace(k=k, v=v), residuals.q, {}
    own, sizes = wanted.leads, (q.shape[-3], k.shape[-3])
    dtype = lambda x, name: jnp.float32 if wanted.wide else _dtype(x, own.get(name), lead)  # noqa: E731
    target: Any = None
    if wanted.bias == "dense":
        target = jax.ShapeDtypeStruct((*own["bias"], *operands.bias.shape[-3:]), operands.bias.dtype)
    of_query = dtype(q, "query") if "query" in own else None
    dq, sums, stored = query_and_bias_pass(residuals, operands, lead, wanted.names, of_query, spec, target)
    found |= sums if dq is None else {"query": dq, **sums}
    columns = (("bias",) if wanted.bias == "columns" else ()) + wanted.of_kind("columns")
    if "key" in own or "value" in own or columns:
        dtypes = dtype(k, "key"), dtype(v, "value")
        found |= key_value_pass(residuals, operands, lead, dtypes, own, columns, spec)
    if wanted.bias == "columns":
        column = found["bias"][..., None, :]
        found["bias"] = sum_to(column, (*own["bias"], operands.bias.shape[-3], 1, k.shape[-3]))
    if target is not None:
        found["bias"] = bias_pass(residuals, operands, lead, target, spec) if stored is None else stored
    if "bias" in found and spec.whole is not None and operands.bias.shape[-1] == k.shape[-3]:
        found["bias"] = embed(found["bias"], found["bias"].ndim - 1, operands.col_start, spec.whole[1])
    for name in wanted.of_kind("diagonals"):
        found[name] = diagonal_pass(residuals, operands, lead, spec, name)
    for name in wanted.of_kind("dense"):
        mod: Any = spec.score_mod
        shape = dense_shape(wanted.reads[name], own, operands, mod, (q.shape[-2], *sizes))
        found[name] = bias_pass(residuals, operands, lead, jax.ShapeDtypeStruct(shape, jnp.float32), spec, name)
    for name in wanted.reads.keys() & found.keys():
        found[name] = in_whole(wanted.reads[name], found[name], operands, sizes, spec.whole)
    return found


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
