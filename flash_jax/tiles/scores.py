"""The score of a tile, in the units in which the softmax works, and what its derivatives need.

Online softmax takes `raw` scores and a `multiplier` >= 0 such that raw * multiplier is the score in base 2, and
evaluates exp2((raw - max) * multiplier). Subtracting before multiplying keeps the largest entry of a row at exactly
exp2(0), however large the scores: with the product first, a compiler may fuse multiply and subtract, so that the score
and the row's maximum round differently and a score of 1e11 overflows.

A plain score is scale * (q . k): raw is then the product itself, up to the sign. With a softcap alone raw is the
hyperbolic tangent. With bias or alibi it is the score in natural units: scale * (q . k), or softcap * tanh(scale *
(q . k) / softcap), + bias - slope * distance.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp

from flash_jax.spec import AttentionSpec, Operands
from flash_jax.tiles import tanh
from flash_jax.tiles.mods import TileMod

LOG2_E = math.log2(math.e)
LN_2 = math.log(2)

# In place of a scale of 0, so that a masked raw score of -inf stays -inf when multiplied; exp2 of any other times it is
# 1.
_TINY = 1e-37

# Up to this softcap exp(-softcap), measured from the `base` of a score, is a normal float32 number: e^-80.
_LOW_SOFTCAP = 55.0

# Scores in base 2 that are further from 0 are rounded by more than 2^-4.
FAR = 2.0**20

Number: TypeAlias = float | jax.Array


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


def _fma(a: Number, b: Number, c: Number) -> jax.Array:
    return jnp.multiply(a, b) + c


def _fms(a: Number, b: Number, c: Number) -> jax.Array:
    return jnp.multiply(a, b) - c


def _tanh_slope(t: jax.Array) -> jax.Array:
    return 1 - t * t


class Arithmetic(NamedTuple):
    """Functions of float32 arrays for which a backend may have better than JAX's own."""

    exp2: Callable[[jax.Array], jax.Array] = jnp.exp2
    fma: Callable[[Number, Number, Number], jax.Array] = _fma  # a * b + c; at least one of them is an array
    fms: Callable[[Number, Number, Number], jax.Array] = _fms  # a * b - c
    shrunk: Callable[[jax.Array, jax.Array], jax.Array] = jnp.multiply  # by factors in (0, 1], mostly 1
    bent: Callable[[jax.Array, tanh.Bend], jax.Array] = tanh.bent
    tanh_slope: Callable[[jax.Array], jax.Array] = _tanh_slope


PLAIN_ARITHMETIC = Arithmetic()


@dataclasses.dataclass(frozen=True)
class Scoring:
    """How a call makes scores of products q . k.

    `added` is whether anything is added to them, and `biased` whether a bias is among it: where that is -inf the score
    is, also of a NaN in a row that the bias so excludes. `modified` is whether there is a score_mod, which may make any
    score -inf. `quick` asks for fewer instructions, enough for 16-bit inputs and not for differentiating: of a tanh
    with a relative error of 5e-7, and in `probability`.
    """

    scale: Scale
    softcap: float | None
    added: bool
    biased: bool = False
    modified: bool = False
    quick: bool = False
    wide: bool = False
    arithmetic: Arithmetic = PLAIN_ARITHMETIC

    @classmethod
    def of(cls, spec: AttentionSpec, operands: Operands, **how: Any) -> "Scoring":
        """The scoring that `spec` and `operands` (arrays, scalars or refs) ask for; `how` are the last three fields."""
        biased, modified = operands.bias is not None, spec.score_mod is not None
        added = biased or operands.alibi_slopes is not None
        return cls(split_scale(spec, operands), spec.softcap, added, biased, modified, **how)

    @property
    def plain(self) -> bool:
        """Whether the score is scale * (q . k) and no more."""
        return self.softcap is None and not self._complete

    @property
    def multiplier(self) -> float | jax.Array:
        """What brings raw scores to base 2."""
        if self.plain:
            return self.scale.multiplier
        return LOG2_E if self._complete or self.softcap is None else self.softcap * LOG2_E

    @property
    def _complete(self) -> bool:
        """Whether raw scores are in natural units."""
        return self.added or self.modified

    def raw(self, product: jax.Array, addend: jax.Array | None, mod: TileMod | None) -> jax.Array:
        """The raw score of products q . k that have the sign of the scale already if the score is plain."""
        if self.plain:
            return product
        return self.natural(product, addend, mod) if self._complete else self._bent(product)

    def capped(self, product: jax.Array) -> jax.Array:
        """The score of products q . k after the softcap, as a score_mod gets it."""
        return product * self.scale.value if self.softcap is None else self._bent(product) * self.softcap

    def natural(self, product: jax.Array, addend: jax.Array | None, mod: TileMod | None) -> jax.Array:
        """The score of products q . k; `addend` is bias and alibi of the tile, None without both."""
        if mod is not None:
            product, factor = mod.score(self.capped(product)), 1.0
        elif self.softcap is None:
            factor = self.scale.value
        else:
            product, factor = self._bent(product), self.softcap
        if addend is None:
            return product * factor
        score = self.arithmetic.fma(product, factor, addend)
        return jnp.where(addend == -jnp.inf, -jnp.inf, score) if self.biased else score

    def slope(self, product: jax.Array, mod: TileMod | None) -> jax.Array | None:
        """d score / d (scale * product): 1 - tanh^2, times what a score_mod makes of it; None where it is 1."""
        slope = None
        if self.softcap is not None:
            t = self._bent(product)
            slope = self.arithmetic.tanh_slope(t)
        if mod is not None:
            own = mod.slope(self.capped(product))
            slope = own if slope is None else slope * own
        return slope

    @property
    def base(self) -> float | None:
        """What every score is measured from where that need not be the row's maximum; natural units, None if it must.

        With a low softcap the exponentials of all scores, and their sums times values up to 1e20, are float32 numbers
        as they are: no maximum is sought and nothing computed so far must shrink. The base is 0, or above 0 by as much
        as the softcap is above 30.
        """
        if self.softcap is None or not (self._low and self.quick and self.wide):
            return None
        return max(self.softcap - 30.0, 0.0)

    @property
    def _low(self) -> bool:
        """Whether no score is far from 0."""
        return self.softcap is not None and self.softcap <= _LOW_SOFTCAP and not self._complete

    def relative(self, product: jax.Array, allowed: jax.Array | None) -> jax.Array:
        """exp(score - base) of products q . k where allowed and 0 elsewhere; where there is a `base`."""
        score = self._bent(product, (self.softcap or 1.0) * LOG2_E, -(self.base or 0.0) * LOG2_E)
        return self.arithmetic.exp2(score if allowed is None else jnp.where(allowed, score, -jnp.inf))

    def _bent(self, product: jax.Array, outer: float = 1.0, offset: float = 0.0) -> jax.Array:
        """outer * tanh(scale * product / softcap) + offset, where there is a softcap; without `quick` the bare tanh."""
        inner = self.scale.value / (self.softcap or 1.0)
        if not self.quick:
            return jnp.tanh(product * inner)
        if isinstance(inner, float) and (bend := tanh.Bend(inner, outer, offset)).folds:
            return self.arithmetic.bent(product, bend)
        return self.arithmetic.bent(product * inner, tanh.Bend(1.0, outer, offset))

    def probability(
        self,
        product: jax.Array,
        lse: jax.Array,
        addend: jax.Array | None,
        mod: TileMod | None,
        allowed: jax.Array | None,
    ) -> jax.Array:
        """p = exp(score - lse) where allowed and 0 elsewhere, recomputed from what the forward pass kept.

        Args:
          product: [..., block_q, block_kv] (or transposed), q . k without the scale.
          lse: broadcasts against `product`; natural logarithm, +inf on dead rows (`softmax.dead_to_inf`).
          addend, mod: see `natural`.
          allowed: bool like `product`; None where every entry is allowed.

        If `quick` everything is in base 2, and score and lse are brought there beforehand, which leaves a multiply-add
        for each entry and rounds it once more: that matters only for scores in the thousands. Otherwise lse is
        subtracted first, and the base stays e, since each change of base would round what it changes.
        """
        if not self.quick:
            score, exp = self.natural(product, addend, mod) - lse, jnp.exp
        else:
            exp = self.arithmetic.exp2
            raw, multiplier = self.raw(product, addend, mod), self.multiplier
            if self.plain:  # where raw is the product, without the sign
                multiplier = self.scale.value * LOG2_E
            score = self.arithmetic.fma(raw, multiplier, lse * -LOG2_E)
        if not (self.quick and self._low):
            score = _at_most_0(score)
        return exp(score if allowed is None else jnp.where(allowed, score, -jnp.inf))


def far(score: jax.Array) -> jax.Array:
    """Whether any of these scores, in base 2, is so far from 0 that what rounding adds to it shows beside 1."""
    return ((jnp.abs(score) > FAR) & (jnp.abs(score) != jnp.inf)).astype(jnp.int32).max(initial=0) > 0


@jax.custom_jvp
def _at_most_0(score: jax.Array) -> jax.Array:
    """The score relative to lse, which rounding can carry above 0: far above, where scores are huge. Its slope is 1."""
    return jnp.minimum(score, 0)


_at_most_0.defjvp(lambda primals, tangents: (_at_most_0(*primals), tangents[0]))
