"""The score of a tile, in the units in which the softmax works.

Online softmax takes `raw` scores and a `multiplier` >= 0 such that raw * multiplier is the score in base 2, and
evaluates exp2((raw - max) * multiplier). Subtracting before multiplying keeps the largest entry of a row at exactly
exp2(0), however large the scores: with the product first, a compiler may fuse multiply and subtract, so that the score
and the row's maximum round differently and a score of 1e11 overflows.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from flash_jax.spec import AttentionSpec, Operands

LOG2_E = math.log2(math.e)
LN_2 = math.log(2)

# In place of a scale of 0, so that a masked raw score of -inf stays -inf when multiplied; exp2 of any other times it is
# 1.
_TINY = 1e-37


class Scale(NamedTuple):
    """A scale split for the softmax: raw = sign * (q . k), score in base 2 = raw * multiplier."""

    value: float | jax.Array  # the scale itself, for derivatives
    sign: float | jax.Array
    multiplier: float | jax.Array


def split_scale(spec: AttentionSpec, operands: Operands) -> Scale:
    """The scale of `spec` (a float) or of `operands` (an array, or a scalar read from a kernel's ref)."""
    if spec.scale is not None:
        return Scale(spec.scale, math.copysign(1.0, spec.scale), max(abs(spec.scale) * LOG2_E, _TINY))
    scale = jnp.asarray(operands.scale)
    # By arithmetic: Pallas' Triton lowering takes a choice between two literal numbers for one between booleans.
    sign = 1 - 2 * (scale < 0).astype(scale.dtype)
    return Scale(scale, sign, jnp.maximum(jnp.abs(scale) * LOG2_E, _TINY))


def probability(
    product: jax.Array, lse: jax.Array, scale: Scale, allowed: jax.Array | None, dtype: jnp.dtype
) -> jax.Array:
    """p = exp(scale * product - lse) where allowed and 0 elsewhere, recomputed from what the forward pass kept.

    Args:
      product: [..., block_q, block_kv] (or transposed), q . k without the scale.
      lse: broadcasts against `product`; natural logarithm, +inf on dead rows (`softmax.dead_to_inf`).
      scale: of the call.
      allowed: bool like `product`; None where every entry is allowed.
      dtype: of the inputs. For 16-bit ones both terms are brought to base 2 beforehand, which leaves a multiply-add for
        each entry and rounds them once more, which matters only for scores in the thousands; wider ones subtract first.
    """
    if jnp.dtype(dtype).itemsize < 4:
        score = product * (scale.value * LOG2_E) - lse * LOG2_E
    else:
        score = (product * scale.value - lse) * LOG2_E
    score = _at_most_0(score)
    return jnp.exp2(score if allowed is None else jnp.where(allowed, score, -jnp.inf))


@jax.custom_jvp
def _at_most_0(score: jax.Array) -> jax.Array:
    """The score relative to lse, which rounding can carry above 0: far above, where scores are huge. Its slope is 1."""
    return jnp.minimum(score, 0)


_at_most_0.defjvp(lambda primals, tangents: (_at_most_0(*primals), tangents[0]))


def scale_gradient(
    ds_qk: jax.Array, ds: jax.Array, p_qk: jax.Array, lse: jax.Array, lse_ct: jax.Array | None
) -> jax.Array:
    """[..., H, T]: each row's part of the scale's gradient, sum_j ds_ij (q_i . k_j), from three sums over the row.

    The sum of ds over a row is the cotangent of its lse (0 without one). What it falls short by comes from delta, which
    is computed from an output that was rounded to 16 bits, and would enter here times the mean of q . k; so that much
    is taken off.

    Args:
      ds_qk, ds, p_qk: [..., H, T], sums over j of ds_ij (q_i . k_j), ds_ij and p_ij (q_i . k_j).
      lse: [..., H, T]; rows where it is -inf are dead, and all their sums 0.
      lse_ct: [..., H, T], None where it is zero.
    """
    excess = ds if lse_ct is None else ds - jnp.where(lse == -jnp.inf, 0, lse_ct)
    return ds_qk - excess * p_qk
