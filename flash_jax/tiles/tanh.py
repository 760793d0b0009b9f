"""A hyperbolic tangent of a few instructions, for scores of 16-bit inputs: relative error 2e-7. Not to be derived.

Two formulas. Near 0 tanh(x) is x times a polynomial: no division and no exponential, which GPUs are slow at. Scores
are meant to lie there, well within their softcap. Beyond it is 1 - 2 / (1 + e^2x), which is exactly -1 or 1 in the end
but of x close to 0 leaves nothing.

The polynomial is one in w = x^2 - NEAR^2, which costs no more than x^2 and whose sign says whether it serves. It is a
least-squares fit, weights raised where the relative error is large: 7e-8, the rest is rounding.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

NEAR = 0.6
_POLYNOMIAL = 0.895082677, -0.254858819, 0.0888658302, -0.0298168649, 0.0154754276  # of the lowest degree first


class Bend(NamedTuple):
    """outer * tanh(inner * x) + offset, as a function of x; numbers that are known when a program is traced."""

    inner: float
    outer: float = 1.0
    offset: float = 0.0

    @property
    def folds(self) -> bool:
        """Whether `polynomial` has coefficients that float32 can hold."""
        return 1e-4 <= abs(self.inner) <= 1e3 and 0.1 <= self.outer <= 1e3

    @property
    def near(self) -> float:
        """The square of x up to which `polynomial` serves."""
        return (NEAR / self.inner) ** 2

    @property
    def polynomial(self) -> list[float]:
        """Coefficients c with outer * tanh(inner * x) = x * sum_n c[n] (x^2 - near)^n."""
        return [c * self.inner ** (2 * n + 1) * self.outer for n, c in enumerate(_POLYNOMIAL)]

    @property
    def exponent(self) -> float:
        """What x is multiplied by to make e^(2 inner x) a power of 2."""
        return 2 * math.log2(math.e) * self.inner


def bent(x: jax.Array, bend: Bend) -> jax.Array:
    """outer * tanh(inner * x) + offset."""
    w = x * x - bend.near
    *rest, near = bend.polynomial
    for c in reversed(rest):
        near = near * w + c
    far = (bend.outer + bend.offset) - 2 * bend.outer / (1 + jnp.exp2(x * bend.exponent))
    return jnp.where(w < 0, x * near + bend.offset, far)
