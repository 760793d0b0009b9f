"""The score of a tile, in the units in which the softmax works, and what its derivatives need.

Online softmax takes `raw` scores and a `multiplier` >= 0 such that raw * multiplier is the score in base 2, and
evaluates exp2((raw - max) * multiplier). Subtracting before multiplying keeps the largest entry of a row at exactly
exp2(0), however large the scores: with the product first, a compiler may fuse multiply and subtract, so that the score
and the row's maximum round differently and a score of 1e11 overflows.

A plain score is scale * (q . k): raw is then the product itself, up to the sign. With softcap, bias or alibi, raw is
the score in natural units: softcap * tanh(scale * (q . k) / softcap) + bias - slope * distance.
"""

import dataclasses
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from flash_jax.spec import AttentionSpec, Operands
from flash_jax.tiles.mods import TileMod

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


@dataclasses.dataclass(frozen=True)
class Scoring:
    """How a call makes scores of products q . k.

    `plain` is whether the score is scale * (q . k) and no more. `biased` is whether a bias is among what is added:
    where that is -inf the score is, also of a NaN in a row that the bias so excludes. `quick` asks for a tanh of a few
    instructions, relative error 5e-7, which is enough for 16-bit inputs; it is not for differentiating. `modified` is
    whether there is a score_mod, which may make any score -inf.
    """

    scale: Scale
    softcap: float | None
    plain: bool
    biased: bool = False
    quick: bool = False
    modified: bool = False

    @classmethod
    def of(cls, spec: AttentionSpec, operands: Operands, quick: bool = False) -> "Scoring":
        """The scoring that `spec` and `operands` (arrays, scalars or refs) ask for."""
        modified = spec.score_mod is not None
        plain = spec.softcap is None and operands.bias is None and operands.alibi_slopes is None and not modified
        return cls(split_scale(spec, operands), spec.softcap, plain, operands.bias is not None, quick, modified)

    @property
    def multiplier(self) -> float | jax.Array:
        """What brings raw scores to base 2."""
        return self.scale.multiplier if self.plain else LOG2_E

    def capped(self, product: jax.Array) -> jax.Array:
        """The score of products q . k after the softcap, as a score_mod gets it."""
        score = product * self.scale.value
        if self.softcap is not None:
            score = self.softcap * self._tanh(score * (1 / self.softcap))
        return score

    def natural(self, product: jax.Array, addend: jax.Array | None, mod: TileMod | None) -> jax.Array:
        """The score of products q . k; `addend` is bias and alibi of the tile, None without both."""
        score = self.capped(product)
        if mod is not None:
            score = mod.score(score)
        if addend is None:
            return score
        return jnp.where(addend == -jnp.inf, -jnp.inf, score + addend) if self.biased else score + addend

    def slope(self, product: jax.Array, mod: TileMod | None) -> jax.Array | None:
        """d score / d (scale * product): 1 - tanh^2, times what a score_mod makes of it; None where it is 1."""
        slope = None
        if self.softcap is not None:
            t = self._tanh(product * self.scale.value * (1 / self.softcap))
            slope = 1 - t * t
        if mod is not None:
            own = mod.slope(self.capped(product))
            slope = own if slope is None else slope * own
        return slope

    def _tanh(self, x: jax.Array) -> jax.Array:
        if not self.quick:
            return jnp.tanh(x)
        # The first form errs by 1e-7, so near 0, where that would be felt, the series of tanh takes over.
        square = x * x
        series = x * (1 + square * (-1 / 3 + square * (2 / 15 - square * (17 / 315))))
        return jnp.where(square < 0.04, series, 1 - 2 / (jnp.exp2(x * (2 * LOG2_E)) + 1))

    def probability(
        self,
        product: jax.Array,
        lse: jax.Array,
        addend: jax.Array | None,
        mod: TileMod | None,
        allowed: jax.Array | None,
        dtype: jnp.dtype,
    ) -> jax.Array:
        """p = exp(score - lse) where allowed and 0 elsewhere, recomputed from what the forward pass kept.

        Args:
          product: [..., block_q, block_kv] (or transposed), q . k without the scale.
          lse: broadcasts against `product`; natural logarithm, +inf on dead rows (`softmax.dead_to_inf`).
          addend, mod: see `natural`.
          allowed: bool like `product`; None where every entry is allowed.
          dtype: of the inputs. For 16-bit ones everything is in base 2, and a plain score is brought there beforehand,
            which leaves a multiply-add for each entry and rounds it once more: that matters only for scores in the
            thousands. Wider ones subtract first and stay with e, since each change of base would round what it changes.
        """
        if jnp.dtype(dtype).itemsize >= 4:
            score, exp = self.natural(product, addend, mod) - lse, jnp.exp
        elif self.plain:
            score, exp = product * (self.scale.value * LOG2_E) - lse * LOG2_E, jnp.exp2
        else:
            score, exp = (self.natural(product, addend, mod) - lse) * LOG2_E, jnp.exp2
        score = _at_most_0(score)
        return exp(score if allowed is None else jnp.where(allowed, score, -jnp.inf))


@jax.custom_jvp
def _at_most_0(score: jax.Array) -> jax.Array:
    """The score relative to lse, which rounding can carry above 0: far above, where scores are huge. Its slope is 1."""
    return jnp.minimum(score, 0)


_at_most_0.defjvp(lambda primals, tangents: (_at_most_0(*primals), tangents[0]))
