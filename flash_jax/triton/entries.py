"""What the backward kernels share: the arrays they read, and the entries of a tile that they recompute.

The tangent kernel recomputes probabilities here, too.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from flash_jax.spec import AttentionSpec
from flash_jax.tiles.scores import Scoring
from flash_jax.triton.launch import flat
from flash_jax.triton.operands import View


class Residuals(NamedTuple):
    """Arrays, refs or specs: q, k, v, out_ct [..., T, H, Dv]; of each row [..., H, T]: lse (+inf if dead), delta."""

    q: Any
    k: Any
    v: Any
    out_ct: Any
    lse: Any
    delta: Any

    def flattened(self) -> "Residuals":
        """The arrays with their leading dims flattened into one."""
        return Residuals(*(flat(x, 3) for x in self[:4]), *(flat(x, 2) for x in self[4:]))


def probabilities(qk: jax.Array, lse: jax.Array, view: View, scoring: Scoring) -> tuple[jax.Array, jax.Array]:
    """P = exp(S - L) of a tile, and what dropout keeps of it, not yet divided; `lse` broadcasts against the tile."""
    p = scoring.probability(qk, lse, view.addend, view.mod, view.allowed)
    return p, p if view.kept is None else jnp.where(view.kept, p, 0)


def score_gradient(
    p: tuple[jax.Array, jax.Array], dp: jax.Array, delta: jax.Array, view: View, scoring: Scoring, spec: AttentionSpec
) -> jax.Array:
    """dS = P * (dP - delta), with dP the cotangent of P after dropout; `p` as `probabilities` gives it.

    What dropout has taken from P need not be taken from dP once more.
    """
    if view.kept is None:
        ds = p[0] * (dp - delta)
    else:
        ds = scoring.arithmetic.fma(p[1], dp * (1 / (1 - spec.dropout_rate)), p[0] * -delta)
    return ds if view.forbidden is None else jnp.where(view.forbidden, 0, ds)


def to_product(ds: jax.Array, qk: jax.Array, view: View, scoring: Scoring) -> jax.Array:
    """The gradient of scale * (q . k) from that of the score: what the softcap and the score_mod make of it."""
    slope = scoring.slope(qk, view.mod)
    if slope is None:
        return ds
    # Selected once more: where q . k is NaN the slope is, too.
    return ds * slope if view.forbidden is None else jnp.where(view.forbidden, 0, ds * slope)


def weight_of_read(name: str, qk: jax.Array, view: View, scoring: Scoring) -> jax.Array:
    """d score / d (what a read of the score_mod gives), by its name, "read.0" or the like."""
    weight = view.mod.weight(scoring.capped(qk), int(name.removeprefix("read.")))
    return weight if view.forbidden is None else jnp.where(view.forbidden, 0, weight)
