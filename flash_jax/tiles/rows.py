"""What gradients need of whole rows of scores, whatever computed the tiles.

The gradients of numbers that many entries share (scale, slopes, sinks, a bias that is the same for all keys) are sums
over entries of x ds, for an x of the entry's own. A row's ds = p * (dp - delta) adds up to what the row as a whole
passes on: lse_ct + p_sink * delta. In practice it falls short, since delta comes from an output that was rounded to 16
bits; and times the mean of q . k that would be felt. So the excess, which is the error of delta, is taken off again.
"""

from collections.abc import Iterable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from flash_jax.spec import OWN_RANK, Operands
from flash_jax.tiles.sums import sum_to

ROW_SUMS = ("scale", "alibi_slopes")
"""Gradients that are sums over entries of ds times a number of the entry's own."""

_SHIFTING = ("scale", "bias", "alibi_slopes")


def may_shift(names: Iterable[str]) -> bool:
    """Whether tangents of these inputs may move all scores of a row together, by far more than apart."""
    return any(name in _SHIFTING or name.startswith("mods") for name in names)


class RowSums(NamedTuple):
    """Sums over the keys of each row, [..., H, T]: of ds, and of x ds and x p for an x of the entry's own."""

    ds: jax.Array
    weighted_ds: jax.Array
    weighted_p: jax.Array


def sink_probability(sinks: jax.Array, lse: jax.Array) -> jax.Array:
    """[..., H, T]: the share of each row that its sink [..., H] takes; 1 on rows that attend nothing else."""
    return jnp.where(lse == -jnp.inf, 0, jnp.exp(sinks[..., None] - lse))


def row_total(delta: jax.Array, lse_ct: jax.Array | None, p_sink: jax.Array | None) -> jax.Array:
    """[..., H, T]: the sum of ds over the keys of a row, which follows without any tile."""
    total = jnp.zeros_like(delta) if lse_ct is None else lse_ct
    return total if p_sink is None else total + p_sink * delta


def shared_gradient(sums: RowSums, total: jax.Array) -> jax.Array:
    """[..., H, T]: each row's part of sum_ij x_ij ds_ij, with `total` from `row_total`; 0 on dead rows."""
    return sums.weighted_ds - (sums.ds - total) * sums.weighted_p


def row_gradient(sums: dict[str, jax.Array], name: str, row: tuple) -> jax.Array:
    """`shared_gradient` of the sums called `name`, 0 on dead rows; `row` as in `shared_gradients`."""
    _, total, _, dead = row
    return jnp.where(dead, 0, shared_gradient(RowSums(sums["ds_sums"][0], *sums[f"{name}_sums"]), total))


def needed_sums(operands: Operands, leads: dict, S: int, reads: tuple[str, ...] = ()) -> tuple[str, ...]:
    """Which sums over each row the wanted gradients need: "ds" alone, or "scale" and "alibi_slopes", of two each.

    `reads` names further ones, of what a score_mod reads by row.
    """
    own = (*(name for name in ROW_SUMS if name in leads), *reads)
    rows_of_bias = by_rows(operands, leads, S) and operands.sinks is not None
    return ("ds", *own) if own or "sinks" in leads or rows_of_bias else ()


def by_rows(operands: Operands, leads: dict, S: int) -> bool:
    """Whether the bias's gradient is wanted and bias is one number for all keys, so that it follows from row totals."""
    return "bias" in leads and operands.bias.shape[-1] == 1 < S


def shared_gradients(operands: Operands, leads: dict, sums: dict[str, jax.Array], row: tuple, lse_ct) -> dict:
    """Gradients of scale, slopes, sinks, and of a bias that is the same for all keys, from what each row sums up to.

    sums: [n, ..., H, T] by name, see `needed_sums`. row: delta, total of ds, the sink's share (or None), and dead.
    """
    delta, total, p_sink, dead = row
    found = {}
    for name in ROW_SUMS:
        if name in leads:
            entries = row_gradient(sums, name, row)
            found[name] = entries.sum((-1, -2)) if name == "scale" else entries.sum(-1)
    if p_sink is not None and "ds_sums" in sums:
        delta = delta + jnp.where(dead, 0, sums["ds_sums"][0] - total)  # without the rounding of `out`
        total = jnp.where(dead, 0, row_total(delta, lse_ct, p_sink))
    if "sinks" in leads and p_sink is not None:
        alone = jnp.zeros_like(delta) if lse_ct is None else lse_ct
        found["sinks"] = jnp.where(dead, alone, -p_sink * delta).sum(-1)
    if "bias" in leads and "bias" not in found and operands.bias.shape[-1] == 1:
        found["bias"] = sum_to(total[..., None], (*total.shape[:-2], *operands.bias.shape[-3:]))
    return {name: sum_to(x, (*leads[name], *x.shape[x.ndim - OWN_RANK[name] :])) for name, x in found.items()}


def refine(p_sum, ds_sum, delta, lse_ct, p_sink) -> tuple[jax.Array, jax.Array]:
    """(delta, factor) from the sums over each row of p and of ds = p * (dp - delta); constants to a derivative."""
    norm = row_norm(p_sum, p_sink)
    exact = (ds_sum + delta * p_sum) * norm - (0 if lse_ct is None else lse_ct)
    change = jnp.where(p_sum == 0, 0, exact - delta)
    return delta + lax.stop_gradient(change), norm


def row_norm(p_sum: jax.Array, p_sink: jax.Array | None) -> jax.Array:
    """What the p of a row, the sink's share among them, must be multiplied by to add up to 1; 1 on rows without any."""
    total = p_sum if p_sink is None else p_sum + p_sink
    return lax.stop_gradient(jnp.where(total == 0, 1, 1 / jnp.where(total == 0, 1, total)))
