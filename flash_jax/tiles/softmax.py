"""Online softmax: one step over a tile of scores, the finish of a row, and what the backward pass needs of it."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from flash_jax.tiles.scores import LN_2


def step(
    raw: jax.Array,
    row_max: jax.Array,
    row_sum: jax.Array,
    multiplier: float | jax.Array,
    *,
    masked: bool,
    exp2: Callable[[jax.Array], jax.Array] = jnp.exp2,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """One tile of the recurrence (FlashAttention-2, algorithm 1, lines 8-10, with the division left to `finish`).

    Args:
      raw: [..., block_q, block_kv] raw scores (see tiles/scores.py), -inf where masked.
      row_max, row_sum: [..., block_q] of the tiles so far: largest raw score, and sum of the probabilities relative to
        it.
      multiplier: raw * multiplier is the score in base 2; broadcasts against `raw`.
      masked: whether a row may so far be without keys, so that its maximum is -inf.
      exp2: 2 to the power of an array.

    Returns:
      p [..., block_q, block_kv], the factor [..., block_q] by which earlier sums shrink, and the new row_max and
      row_sum.
    """
    new_max = jnp.maximum(row_max, raw.max(axis=-1))
    # A row without keys so far: measured from 0 instead, exp2(-inf - 0) is the 0 that it should be, and not NaN.
    base = jnp.where(new_max == -jnp.inf, 0, new_max) if masked else new_max
    row_multiplier = _of_row(multiplier)
    shrink = exp2((row_max - base) * row_multiplier)
    p = exp2((raw - base[..., None]) * multiplier)
    return p, shrink, new_max, row_sum * shrink + p.sum(axis=-1)


def finish(
    row_max: float | jax.Array,
    row_sum: jax.Array,
    multiplier: float | jax.Array,
    alive: jax.Array,
    sink: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(alive, divisor, lse), each [..., block_q], of rows whose tiles are all seen.

    The output of a row that is alive is its accumulator over its divisor; that of a dead row is 0, and its lse -inf, or
    the sink. `row_max` may be any raw score that the probabilities are relative to. The argument `alive` is False for
    rows that attend nothing whatever their sums say (those past the query length).
    """
    alive &= row_sum != 0  # a NaN is not a dead row: whoever gave it should see it
    divisor = jnp.where(alive, row_sum, 1)
    lse = row_max * (_of_row(multiplier) * LN_2) + jnp.log(divisor)
    if sink is None:
        return alive, divisor, jnp.where(alive, lse, -jnp.inf)
    keys = jnp.where(alive, lse, 0)
    total = jnp.maximum(keys, sink) + jnp.log(1 + jnp.exp(-jnp.abs(keys - sink)))
    return alive, divisor * jnp.exp(total - keys), jnp.where(alive, total, sink)


def _of_row(multiplier: float | jax.Array) -> float | jax.Array:
    """The multiplier without the dim along which a row's scores lie."""
    return multiplier[..., 0] if isinstance(multiplier, jax.Array) and multiplier.ndim else multiplier


def dead_rows(out: jax.Array, lse: jax.Array, sinks: jax.Array | None) -> jax.Array:
    """bool [..., H, T]: the rows that attend no key; with a sink, also those of which the sink leaves nothing."""
    if sinks is None:
        return lse == -jnp.inf
    empty = jnp.swapaxes((out == 0).all(axis=-1), -1, -2)
    return empty & (lse == sinks[..., None])


def without_dead(x: jax.Array, dead: jax.Array) -> jax.Array:
    """x [..., T, H, D] with 0 in the rows that are dead, which may hold NaN."""
    return jnp.where(jnp.swapaxes(dead, -1, -2)[..., None], 0, x)


def delta(out: jax.Array, out_ct: jax.Array, dead: jax.Array, lse_ct: jax.Array | None) -> jax.Array:
    """[..., H, T]: what each row subtracts from dp, so that ds = p * (dp - delta); 0 on dead rows.

    The row's sum of out * out_ct (FlashAttention-2, algorithm 2, line 4), less the cotangent of lse, since
    d lse_i / d s_ij = p_ij.
    """
    dtype = np.promote_types(out.dtype, np.float32)
    total = jnp.einsum("...thd,...thd->...ht", out.astype(dtype), out_ct.astype(dtype), precision="highest")
    if lse_ct is not None:
        total -= lse_ct
    return jnp.where(dead, 0, total)


def dead_to_inf(lse: jax.Array, dead: jax.Array) -> jax.Array:
    """lse with +inf on dead rows, so that exp(s - lse) is 0 there and not NaN."""
    return jnp.where(dead, jnp.inf, lse)
