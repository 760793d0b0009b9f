"""Score and mask functions of the user's (`score_mod`, `mask_mod`) at the entries of a tile.

A mod is traced once, with scalars, to a jaxpr of elementwise operations (see flash_jax/mods.py). Here it is evaluated on
whole tiles: indices are arrays [block_q, 1] and [1, block_kv], and an operation broadcasts what it takes, so that what
depends on the row alone is computed once a row. Reads of operands go through a function of the implementation's.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal, Primitive

from flash_jax.spec import Mod
from flash_jax.tiles.sums import sum_to

ELEMENTWISE = frozenset(
    """abs acos acosh add and asin asinh atan atan2 atanh bitcast_convert_type cbrt ceil clamp convert_element_type cos
    cosh div eq erf erf_inv erfc exp exp2 expm1 floor ge gt integer_pow is_finite le log log1p logistic lt max min mul
    ne neg nextafter not or population_count pow rem round rsqrt select_n shift_left shift_right_arithmetic
    shift_right_logical sign sin sinh sqrt square sub tan tanh xor""".split()
)
SAME = frozenset(("broadcast_in_dim", "copy", "copy_p", "pvary", "reshape", "squeeze", "stop_gradient"))
"""What does nothing to a scalar."""

read_p = Primitive("mod_read")
"""The entry of operand number `operand`, of `dtype`, at one integer for each of its dims."""
read_p.def_abstract_eval(lambda *index, operand, dtype: jax.core.ShapedArray((), dtype))

Reader: TypeAlias = Callable[[int, list], jax.Array]  # (operand's number, indices) -> what is there


def inner_jaxpr(eqn: Any) -> Any | None:
    """The jaxpr that an equation calls (jit, a custom derivative), None where it calls none."""
    if eqn.primitive.name in ("cond", "while", "scan"):
        return None
    inner = next((eqn.params[name] for name in ("jaxpr", "call_jaxpr", "fun_jaxpr") if name in eqn.params), None)
    return getattr(inner, "jaxpr", inner)


def walk(jaxpr: Any, args: list, read: Callable, apply: Callable, literal: Callable) -> list:
    """The results of a mod's jaxpr in any domain of values: `apply(eqn, values)` is what one operation does there."""
    env = dict(zip(jaxpr.invars, args, strict=True))
    for eqn in jaxpr.eqns:
        values = [literal(x) if isinstance(x, Literal) else env[x] for x in eqn.invars]
        if eqn.primitive is read_p:
            out = [read(eqn.params["operand"], values)]
        elif (inner := inner_jaxpr(eqn)) is not None:
            out = walk(inner, values, read, apply, literal)
        elif eqn.primitive.name in SAME:
            out = values[:1]
        else:
            out = [apply(eqn, values)]
        env |= zip(eqn.outvars, out, strict=True)
    return [literal(x) if isinstance(x, Literal) else env[x] for x in jaxpr.outvars]


def _apply(eqn, values):
    shape = np.broadcast_shapes(*(x.shape for x in values))
    return eqn.primitive.bind(*(jnp.broadcast_to(x, shape) for x in values), **eqn.params)


def evaluate(mod: Mod, args: list, read: Reader) -> jax.Array:
    """The mod of arrays that broadcast against each other."""
    literal = lambda x: jnp.full((), x.val, x.aval.dtype)  # noqa: E731
    (out,) = walk(mod.jaxpr, args, read, _apply, literal)
    return out


@dataclasses.dataclass(frozen=True)
class TileMod:
    """A `score_mod` at one tile: a function of the scores alone, what it reads being known."""

    mod: Mod
    coordinates: tuple  # batch, head, q index, k index; they broadcast against the tile
    values: tuple  # what it reads, in the order of its reads

    @classmethod
    def of(cls, mod: Mod, coordinates: tuple, read: Reader, dtype: Any) -> "TileMod":
        """The mod at `coordinates`, for scores of `dtype`."""
        values = []

        def keep(operand, index):
            values.append(read(operand, index))
            return values[-1]

        evaluate(mod, [jnp.zeros((), dtype), *coordinates], keep)
        return cls(mod, coordinates, tuple(values))

    def score(self, score: jax.Array) -> jax.Array:
        """What it makes of scores."""
        return self._of(score, *self.values)

    def slope(self, score: jax.Array) -> jax.Array:
        """d (what it makes) / d score."""
        return jax.jvp(lambda x: self._of(x, *self.values), (score,), (jnp.ones_like(score),))[1]

    def weight(self, score: jax.Array, number: int) -> jax.Array:
        """d (what it makes) / d (what read `number` gives)."""

        def f(x):
            return self._of(score, *self.values[:number], x, *self.values[number + 1 :])

        value = self.values[number]
        return jax.jvp(f, (value,), (jnp.ones_like(value),))[1]

    def along(self, score: jax.Array, read: Reader, dots: Reader, moving: Callable[[int], bool]) -> list[jax.Array]:
        """What the tangents of operands add to that of the score: of those `moving`, which `dots` reads."""
        found = []

        def keep(operand, index):
            if moving(operand):
                found.append((number[0], dots(operand, index)))
            number[0] += 1
            return read(operand, index)

        number = [0]
        evaluate(self.mod, [jnp.zeros((), score.dtype), *self.coordinates], keep)
        return [self.weight(score, n) * dot.astype(score.dtype) for n, dot in found]

    def _of(self, score, *values):
        given = iter(values)
        out = evaluate(self.mod, [score, *self.coordinates], lambda operand, index: next(given))
        return jnp.broadcast_to(out, score.shape)


# Gradients of what is read: which entries of an operand a read meets.


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
    index: tuple[Index | None, ...]

    @property
    def kind(self) -> str | None:
        """Over what its gradient is summed up in tiles: "rows", "columns", "diagonals", "dense"; None if not served."""
        variables = [x.variable for x in self.index if x is not None and x.variable is not None]
        if None in self.index or len(set(variables)) < len(variables):
            return None
        found = frozenset(variables) - {"b", "h"}
        kinds = {frozenset(): "rows", frozenset("i"): "rows", frozenset("j"): "columns"}
        return {**kinds, frozenset(["i-j"]): "diagonals", frozenset("ij"): "dense"}.get(found)


SCORE = "score"
"""In the place of an index: a number that depends on the score."""


def reads(mod: Mod) -> tuple[Read, ...]:
    """The reads of a mod in their order. Raises NotImplementedError where an index depends on the score."""
    found = []

    def read(operand, index):
        if SCORE in index:
            raise NotImplementedError("An index into `mod_operands` may not depend on the score.")
        found.append(Read(operand, tuple(x if isinstance(x, Index) else None for x in index)))

    indices = [Index(name, 1, 0) for name in "bhij"]
    args = [SCORE, *indices] if len(mod.jaxpr.invars) == 5 else indices
    walk(mod.jaxpr, args, read, _apply_to_indices, _constant)
    return tuple(found)


def _constant(literal: Literal) -> Index | None:
    is_int = np.issubdtype(literal.aval.dtype, np.integer)
    return Index(None, 0, int(literal.val)) if is_int else None


def _apply_to_indices(eqn, values):
    """What an operation makes of indices: an index, None, or SCORE."""
    if SCORE in values:
        return SCORE
    if None in values:
        return None
    if len(values) == 1:
        (x,) = values
        is_int = np.issubdtype(eqn.outvars[0].aval.dtype, np.integer)
        return {"neg": -x, "convert_element_type": x if is_int else None}.get(eqn.primitive.name)
    if eqn.primitive.name == "clamp":
        low, x, high = values
        return x.at_least(low.offset).at_most(high.offset) if low.variable is high.variable is None else None
    a, b = values[:2]
    if eqn.primitive.name == "sub":
        b = -b
    if eqn.primitive.name in ("add", "sub"):
        return _sum(a, b)
    if a.variable is None:
        a, b = b, a
    if b.variable is not None or len(values) > 2:
        return None
    return {"max": a.at_least(b.offset), "min": a.at_most(b.offset)}.get(eqn.primitive.name)


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
    found = {} if mod is None else {n: x for n, x in enumerate(reads(mod)) if f"mods.{x.operand}" in leads}
    for x in found.values():
        if x.kind is None:
            raise NotImplementedError(
                f"The gradient of `mod_operands[{x.operand}]` needs each index to be batch, head, q index or k index, or "
                "the difference of the last two, plus or minus a constant (each used once), and this `score_mod` reads "
                "it otherwise. Use implementation='reference', or `jax.lax.stop_gradient` on the operand."
            )
    return found


def dense_shape(read: Read, leads: dict, batch: tuple[int, ...], sizes: tuple[int, int, int]) -> tuple[int, ...]:
    """The shape [..., H or 1, T, S] in which the sums of a "dense" read are needed; sizes are (H, T, S)."""
    used = {x.variable for x in read.index if x is not None}
    own = leads[f"mods.{read.operand}"]
    lead = (*own[: len(own) - len(batch)], *(batch if "b" in used else (1,) * len(batch)))
    return *lead, sizes[0] if "h" in used else 1, *sizes[1:]


def gradients(
    found: dict[Any, tuple[Read, jax.Array]], mods: tuple, leads: dict, batch: tuple[int, ...], sizes: tuple[int, int]
) -> dict[str, jax.Array]:
    """{"mods.n": gradient} of the operands named in `leads`, from the sums of each read (see `operand_gradient`)."""
    out = {}
    for n, x in enumerate(mods):
        if (name := f"mods.{n}") not in leads:
            continue
        own = x.shape[len(leads[name]) :]
        total = jnp.zeros(leads[name] + own, jnp.result_type(jnp.float32, *(sums for _, sums in found.values())))
        for read, sums in found.values():
            if read.operand == n:
                part = operand_gradient(read, sums, batch, own, sizes)
                lead = part.shape[: part.ndim - len(own)]
                total = total + sum_to(part.reshape(*lead, *(1,) * len(batch), *own), total.shape)
        out[name] = total
    return out


def operand_gradient(
    read: Read, sums: jax.Array, batch: tuple[int, ...], own: tuple[int, ...], sizes: tuple[int, int]
) -> jax.Array:
    """What one read adds to the gradient of its operand [..., *own], in a fixed order and float32.

    Args:
      read: of which this is the gradient.
      sums: [..., *batch, H, n] for rows (n = T), columns (S) and diagonals (T + S - 1, in the order of i - j), and for
        "dense" [..., *batch, H, T, S]; a dim that the read does not need may be summed up already, to size 1.
      batch: the dims over which the batch index counts.
      own: the operand's shape.
      sizes: (T, S).
    """
    kind = read.kind
    tail = 3 if kind == "dense" else 2
    lead = sums.shape[: sums.ndim - tail - len(batch)]
    axes = {"rows": "bhi", "columns": "bhj", "diagonals": "bhd", "dense": "bhij"}[kind or ""]
    used = ["d" if x.variable == "i-j" else x.variable for x in read.index if x is not None]
    kept = tuple(sums.shape[len(lead) : len(lead) + len(batch)])
    if "b" in used:
        x = sums.reshape(*lead, int(np.prod(batch)), *sums.shape[len(lead) + len(batch) :])
    else:
        x = sums.sum(tuple(range(len(lead), len(lead) + len(kept))))[(slice(None),) * len(lead) + (None,)]
    first = {"i": 0, "j": 0, "b": 0, "h": 0, "d": 1 - sizes[1]}
    for n, axis in enumerate(axes):
        if axis not in used:
            x = x.sum(len(lead) + n, keepdims=True)
    # One dim for each of the operand's, in its order: those of the variables, and of size 1 for constants.
    order = [len(lead) + axes.index(name) for name in used if name is not None]
    rest = [len(lead) + n for n, axis in enumerate(axes) if axis not in used]
    x = x.transpose(*range(len(lead)), *order, *rest).reshape(*lead, *(x.shape[n] for n in order))
    for n, (name, index, size) in enumerate(zip(used, read.index, own, strict=True)):
        at = len(lead) + n
        if name is None:
            x = jnp.expand_dims(x, at)
        values = np.arange(x.shape[at]) + (0 if name is None else first[name])
        x = _place(x, at, index.targets(values, size) if index is not None else values, size)
    return x


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
