"""Online softmax of 16-bit inputs with few instructions an entry, and when that is not good enough.

The recurrence (tiles/softmax.py) measures the exponentials of a row from its largest score so far. Here

- they are measured from a base that is at most `_SLACK` below it, and moves only when it would be more: so the
  accumulator, which has more numbers in it than a tile of scores, is multiplied in the first tiles and then hardly ever
  (FlashAttention-4 does so on Blackwell);
- p = exp2(raw * multiplier - base * multiplier) is a fused multiply-add and an exponential. What the last product is
  rounded by is common to p and to both sums of the row, and cancels in their quotient.

With scores in the millions that rounding is no longer small beside 1, and p may overflow: see `beyond`. Such tiles are
computed again, by `exact_step`.

Up to head dim 64 the instructions of the softmax bound the loop. Wider ones wait for tensor cores and for each other,
and are no faster with fewer (benchmarks/NOTES.md, version 8). With a score_mod the loop with care would spill.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from flash_jax.tiles import softmax
from flash_jax.tiles.scores import Scoring, far
from flash_jax.triton.columns import Columns

_WIDEST = 64  # head dim
_SLACK = 8.0  # in base 2: p is up to 2^8, which float16 holds with room to spare


def suits(scoring: Scoring, head_dim: int) -> bool:
    """Whether `step` is the faster way for a call, and good enough: float32 has the better rounding."""
    return scoring.quick and scoring.base is None and not scoring.modified and head_dim <= _WIDEST


class Sums(NamedTuple):
    """Of the tiles so far, for each row: sum of p V, the score that p is relative to, sum of p."""

    accumulator: Columns  # [block_q, Dv]
    base: jax.Array  # [block_q]
    total: jax.Array  # [block_q]


def step(raw: jax.Array, sums: Sums, scoring: Scoring, masked: bool) -> tuple[jax.Array, jax.Array, Sums]:
    """(p, the factor by which the accumulator is to shrink before p V comes to it, the sums with those of p).

    raw, masked: as in `softmax.step`. The base of `sums` is in base 2 here, and rounded.
    """
    multiplier, exp2 = scoring.multiplier, scoring.arithmetic.exp2
    largest = raw.max(axis=1) * multiplier
    base = jnp.where(largest > sums.base + _SLACK, largest, sums.base)
    # As in `softmax.step`: a row without keys so far is measured from 0.
    start = jnp.where(base == -jnp.inf, 0, base) if masked else base
    p = exp2(scoring.arithmetic.fms(raw, multiplier, start[:, None]))
    shrink = exp2(sums.base - start)  # exactly 1 where the base has not moved
    return p, shrink, sums._replace(base=base, total=sums.total * shrink + p.sum(axis=1))


def exact_step(raw: jax.Array, sums: Sums, scoring: Scoring, masked: bool) -> tuple[jax.Array, jax.Array, Sums]:
    """The same by the recurrence as it is written, which any scores may have."""
    p, shrink, base, total = softmax.step(
        raw, sums.base, sums.total, scoring.multiplier, masked=masked, exp2=scoring.arithmetic.exp2
    )
    return p, shrink, sums._replace(base=base, total=total)


def beyond(sums: Sums) -> jax.Array:
    """Whether any row has had scores that `step` is not good enough for, or a NaN."""
    broken = ~(sums.total < jnp.inf)
    return far(sums.base) | (broken.astype(jnp.int32).max() > 0)
