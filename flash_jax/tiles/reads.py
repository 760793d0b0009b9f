"""Gradients of what a score_mod reads: which entries of an operand each read meets, and the sums that this needs.

A read whose indices are batch, head, q index, k index or the difference of the last two (shifted, clipped) meets each
entry of its operand in whole rows, columns or diagonals of the scores. So a kernel sums those up in a fixed order, and
what remains is static slicing.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal

from flash_jax.spec import Mod, Operands
from flash_jax.tiles.mods import walk
from flash_jax.tiles.sums import sum_to


class Index(NamedTuple):
    """An integer that is clamp(sign * variable + offset, low, high), the variable one of "b", "h", "i", "j", "i-j".

    A constant has the variable None.
    """

    variable: str | None
    sign: int
    offset: int
    low: float = -np.inf
    high: float = np.inf

    def __neg__(self) -> "Index":
        return Index(self.variable, -self.sign, -self.offset, -self.high, -self.low)

    def plus(self, n: int) -> "Index":
        """n added."""
        return Index(self.variable, self.sign, self.offset + n, self.low + n, self.high + n)

    def at_least(self, n: int) -> "Index":
        """The greater of it and n."""
        return self._replace(low=max(self.low, n), high=max(self.high, n))

    def at_most(self, n: int) -> "Index":
        """The lesser of it and n."""
        return self._replace(low=min(self.low, n), high=min(self.high, n))

    def targets(self, values: np.ndarray, size: int) -> np.ndarray:
        """Which entries of a dim of `size` the `values` of the variable meet; what lies outside meets the ends."""
        reached = np.clip(self.sign * values + self.offset, self.low, self.high)
        return np.clip(reached, 0, size - 1).astype(np.int64)


class Read(NamedTuple):
    """One read of an operand: its number, and the index of each dim, None where that is of no known form."""

    operand: int
    indices: tuple[Index | None, ...]

    @property
    def kind(self) -> str | None:
        """Over what its gradient is summed up in tiles: "rows", "columns", "diagonals", "dense"; None if not served."""
        variables = [x.variable for x in self.indices if x is not None and x.variable is not None]
        if None in self.indices or len(set(variables)) < len(variables):
            return None
        found = frozenset(variables) - {"b", "h"}
        kinds = {frozenset(): "rows", frozenset("i"): "rows", frozenset("j"): "columns"}
        return {**kinds, frozenset(["i-j"]): "diagonals", frozenset("ij"): "dense"}.get(found)


SCORE = "score"
"""In the place of an index: a number that depends on the score."""


def reads_of(mod: Mod) -> tuple[Read, ...]:
    """The reads of a mod in their order. Raises NotImplementedError where an index depends on the score."""
    found = []

    def read(eqn, index):
        if SCORE in index:
            raise NotImplementedError("An index into `mod_operands` may not depend on the score.")
        found.append(Read(eqn.params["operand"], tuple(x if isinstance(x, Index) else None for x in index)))

    indices = [Index(name, 1, 0) for name in "bhij"]
    args = [SCORE, *indices] if len(mod.jaxpr.invars) == 5 else indices
    walk(mod.jaxpr, args, read, _apply_to_indices, _constant)
    return tuple(found)


def _constant(literal: Literal) -> Index | None:
    is_int = np.issubdtype(jnp.result_type(literal.val), np.integer)
    return Index(None, 0, int(literal.val)) if is_int else None


def _apply_to_indices(eqn, values):
    """What an operation makes of indices: an index, None, or SCORE."""
    if SCORE in values:
        return SCORE
    if None in values:
        return None
    is_int = np.issubdtype(eqn.outvars[0].aval.dtype, np.integer)
    rule = _RULES.get(eqn.primitive.name) if is_int else None
    return None if rule is None else rule(*values)


def _sum(a: Index, b: Index) -> Index | None:
    if a.variable is None:
        a, b = b, a
    if b.variable is None:
        return a.plus(b.offset)
    bounds = (a.low, a.high, b.low, b.high)
    if {a.variable, b.variable} != {"i", "j"} or a.sign == b.sign or any(np.isfinite(bounds)):
        return None
    return Index("i-j", a.sign if a.variable == "i" else b.sign, a.offset + b.offset)


def wanted_reads(mod: Mod | None, leads: dict) -> dict[int, Read]:
    """The reads, by number, of which gradients are needed where the operands named in `leads` have one.

    Raises NotImplementedError for a read whose index is of no known form.
    """
    found = {} if mod is None else {n: x for n, x in enumerate(reads_of(mod)) if f"mods.{x.operand}" in leads}
    for x in found.values():
        if x.kind is None:
            raise NotImplementedError(
                f"The gradient of `mod_operands[{x.operand}]` needs each index to be batch, head, q index or k index, "
                "or the difference of the last two, plus or minus a constant (each used once), and this `score_mod` "
                "reads it otherwise. Use implementation='reference', or `jax.lax.stop_gradient` on the operand."
            )
    return found


def dense_shape(read: Read, leads: dict, operands: Operands, mod: Mod, sizes: tuple[int, int, int]) -> tuple[int, ...]:
    """The shape [..., H or 1, T, S] in which the sums of a "dense" read are needed; sizes are (H, T, S)."""
    used = {x.variable for x in read.indices if x is not None}
    own, count = leads[f"mods.{read.operand}"], len(mod.batch)
    batch = operands.mod_examples.shape[len(own) - count :] if "b" in used else (1,) * count
    return *own[: len(own) - count], *batch, sizes[0] if "h" in used else 1, *sizes[1:]


def gradients(
    found: dict[Any, tuple[Read, jax.Array]], operands: Operands, leads: dict, mod: Mod, sizes: tuple[int, int]
) -> dict[str, jax.Array]:
    """{"mods.n": gradient} of the operands named in `leads`, from the sums of each read (see `operand_gradient`).

    `sizes` are (T, S) of the whole call, in which the sums of a part of it have been placed by `in_whole`.
    """
    out = {}
    for n, x in enumerate(operands.mods):
        if (name := f"mods.{n}") not in leads:
            continue
        own = x.shape[len(leads[name]) :]
        total = jnp.zeros(leads[name] + own, jnp.result_type(jnp.float32, *(sums for _, sums in found.values())))
        for read, sums in found.values():
            if read.operand == n:
                part = operand_gradient(read, sums, operands, mod, own, sizes)
                lead = part.shape[: part.ndim - len(own)]
                total = total + sum_to(part.reshape(*lead, *(1,) * len(mod.batch), *own), total.shape)
        out[name] = total
    return out


def in_whole(
    read: Read, sums: jax.Array, operands: Operands, sizes: tuple[int, int], whole: tuple[int, int] | None
) -> jax.Array:
    """The sums of `read` over a part of a call, of `sizes` (T, S), as those of the whole, 0 elsewhere."""
    if whole is None or operands.row_start is None:
        return sums
    row, col, last, (T, S) = operands.row_start, operands.col_start, sums.ndim - 1, whole
    if read.kind == "rows":
        return embed(sums, last, row, T)
    if read.kind == "columns":
        return embed(sums, last, col, S)
    if read.kind == "diagonals":  # the least i - j of the part is row - col - (its keys - 1); of the whole, 1 - S
        return embed(sums, last, row - col + (S - sizes[1]), T + S - 1)
    return embed(embed(sums, last, col, S), last - 1, row, T)


def embed(x: jax.Array, axis: int, start: jax.Array, size: int) -> jax.Array:
    """x as the entries from `start` of an axis of `size`, the others 0; as it is where it has that size."""
    if x.shape[axis] == size:
        return x
    zeros = jnp.zeros((*x.shape[:axis], size, *x.shape[axis + 1 :]), x.dtype)
    return jax.lax.dynamic_update_slice_in_dim(zeros, x, start.reshape(()), axis)


def _bounded(a: Index, b: Index, method) -> Index | None:
    """The lesser or greater of two indices, by the method of that name, where one is a constant."""
    if a.variable is None:
        a, b = b, a
    return method(a, b.offset) if b.variable is None else None


def _clamped(low: Index, x: Index, high: Index) -> Index | None:
    return x.at_least(low.offset).at_most(high.offset) if low.variable is high.variable is None else None


_RULES = {
    "convert_element_type": lambda x: x,
    "neg": lambda x: -x,
    "add": _sum,
    "sub": lambda a, b: _sum(a, -b),
    "max": lambda a, b: _bounded(a, b, Index.at_least),
    "min": lambda a, b: _bounded(a, b, Index.at_most),
    "clamp": _clamped,
}
"""What operations on integers make of indices."""


def operand_gradient(
    read: Read, sums: jax.Array, operands: Operands, mod: Mod, own: tuple[int, ...], sizes: tuple[int, int]
) -> jax.Array:
    """What one read adds to the gradient of its operand [..., *own], in a fixed order and float32.

    Args:
      read: of which this is the gradient.
      sums: [..., *batch, H, n] for rows (n = T), columns (S) and diagonals (T + S - 1, in the order of i - j), and for
        "dense" [..., *batch, H, T, S]; a dim that the read does not need may be summed up already, to size 1. Examples
        and heads may be those of one device; `operands` says which they are.
      operands: of the call.
      mod: whose read it is.
      own: the operand's shape.
      sizes: (T, S).
    """
    kind, count = read.kind, len(mod.batch)
    tail = 3 if kind == "dense" else 2
    lead = sums.shape[: sums.ndim - tail - count]
    axes = {"rows": "bhi", "columns": "bhj", "diagonals": "bhd", "dense": "bhij"}[kind or ""]
    used = ["d" if x.variable == "i-j" else x.variable for x in read.indices if x is not None]
    examples = int(np.prod(sums.shape[len(lead) : len(lead) + count], dtype=np.int64))
    x = sums.reshape(*lead, examples, *sums.shape[len(lead) + count :])
    if "b" in used:
        x = _among(x, len(lead), operands.mod_examples, int(np.prod(mod.batch, dtype=np.int64)))
    if "h" in used:
        x = _among(x, len(lead) + 1, operands.mod_heads, mod.heads)
    first = {"i": 0, "j": 0, "b": 0, "h": 0, "d": 1 - sizes[1]}
    for n, axis in enumerate(axes):
        if axis not in used:
            x = x.sum(len(lead) + n, keepdims=True)
    # One dim for each of the operand's, in its order: those of the variables, and of size 1 for constants.
    order = [len(lead) + axes.index(name) for name in used if name is not None]
    rest = [len(lead) + n for n, axis in enumerate(axes) if axis not in used]
    x = x.transpose(*range(len(lead)), *order, *rest).reshape(*lead, *(x.shape[n] for n in order))
    for n, (name, index, size) in enumerate(zip(used, read.indices, own, strict=True)):
        at = len(lead) + n
        if name is None:
            x = jnp.expand_dims(x, at)
        values = np.arange(x.shape[at]) + (0 if name is None else first[name])
        x = _place(x, at, index.targets(values, size) if index is not None else values, size)
    return x


def _among(x: jax.Array, axis: int, numbers: jax.Array, count: int) -> jax.Array:
    """x with entry n of `axis` as entry numbers[n] of `count`, the others 0; as it is where it has them all."""
    if x.shape[axis] == count:
        return x
    zeros = jnp.zeros((*x.shape[:axis], count, *x.shape[axis + 1 :]), x.dtype)
    return zeros.at[(slice(None),) * axis + (numbers.reshape(-1),)].set(x, unique_indices=True)


def _place(x: jax.Array, axis: int, targets: np.ndarray, size: int) -> jax.Array:
    """x with entry n of `axis` added to entry targets[n] of a dim of `size`; targets move by steps of one, or stay."""
    if len(targets) and targets[0] > targets[-1]:
        x, targets = jnp.flip(x, axis), targets[::-1]
    first, last = int(targets[0]), int(targets[-1])
    if first == last:
        parts = [x.sum(axis, keepdims=True)]
    else:  # several may meet at either end
        low, high = int((targets == first).sum()), int((targets == last).sum())
        ends = jax.lax.slice_in_dim(x, 0, low, axis=axis), jax.lax.slice_in_dim(x, len(targets) - high, None, axis=axis)
        middle = jax.lax.slice_in_dim(x, low, len(targets) - high, axis=axis)
        parts = [ends[0].sum(axis, keepdims=True), middle, ends[1].sum(axis, keepdims=True)]
    x = jnp.concatenate(parts, axis)
    return jnp.pad(x, [(first, size - 1 - last) if d == axis else (0, 0) for d in range(x.ndim)])
