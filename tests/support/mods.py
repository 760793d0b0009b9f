"""Score and mask functions that several tests use, and the arrays that they read."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tests.support.cases import Case

REACH = 6  # of a table of relative positions


@dataclasses.dataclass(frozen=True)
class ScoreMod:
    """A score_mod and, for a case, the shapes of the tables that it reads and that have a gradient."""

    function: Callable[..., Any]
    tables: Callable[[Case], tuple[tuple[int, ...], ...]]


def by_head(s, b, h, i, j, t):
    """And by constants."""
    return s * t[h] + t[-1] * t[1]


def by_row(s, b, h, i, j, t):
    return s * t[b, i] - t[b, i + 1]


def by_column(s, b, h, i, j, t):
    """The same operand twice, once at a fixed entry of one dim."""
    return s + t[j, h] * t[j - 1, 1]


def by_difference(s, b, h, i, j, t, *_):
    """As relative position encodings are written; far differences meet the ends of the table."""
    return s + t[h, i - j + REACH]


def by_clipped_difference(s, b, h, i, j, t):
    return s * jnp.tanh(t[jnp.clip(j - i, 1 - REACH, REACH) + REACH, h, b])


def by_entry(s, b, h, i, j, t):
    return jnp.sin(s) + t[h, i, j]


def by_turned_entry(s, b, h, i, j, t):
    return s + t[j, b, i]


def several(s, b, h, i, j, t, r, u):
    return jax.nn.relu(s) + t[h, i - j + 5] * r[b, i] + u[j, h]


def relative_tables(c: Case):
    return ((c.H, 2 * REACH + 1),)


def examples(c: Case) -> int:
    """How many there are, over all leading dims."""
    return int(np.prod(c.batch, dtype=int))


READS = {
    "head": ScoreMod(by_head, lambda c: ((c.H,),)),
    "row": ScoreMod(by_row, lambda c: ((examples(c), c.T),)),
    "column": ScoreMod(by_column, lambda c: ((c.S, c.H),)),
    "difference": ScoreMod(by_difference, relative_tables),
    "clipped-difference": ScoreMod(by_clipped_difference, lambda c: ((2 * REACH + 1, c.H, examples(c)),)),
    "entry": ScoreMod(by_entry, lambda c: ((c.H, c.T, c.S),)),
    "turned-entry": ScoreMod(by_turned_entry, lambda c: ((c.S, examples(c), c.T),)),
    "several": ScoreMod(several, lambda c: ((c.H, 41), (examples(c), c.T), (c.S, c.H))),
}
"""One for each kind of sum that gradients of what is read are made of, by rows, columns, diagonals or entries."""


def same_document(b, h, i, j, ids):
    return ids[b, i] == ids[b, j]


def same_document_nearby(b, h, i, j, ids):
    """Documents whose ids are in an operand, and a band, wider for later heads."""
    return same_document(b, h, i, j, ids) & (jnp.abs(i - j) <= 7 * (h + 1))


def checkered(b, h, i, j):
    """Squares of 128 that are allowed as a whole, or not at all."""
    return (i // 128 - j // 128) % 2 == 0


def documents(c: Case, seed: int = 0) -> np.ndarray:
    """Ids [examples, the longer length], growing."""
    rng = np.random.default_rng(seed)
    return np.sort(rng.integers(0, 4, (examples(c), max(c.T, c.S)))).astype(np.int32)
