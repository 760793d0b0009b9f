"""Score and mask functions of the user's (`score_mod`, `mask_mod`) at the entries of a tile.

A mod is traced once, with scalars, to a jaxpr of elementwise operations (see flash_jax/mods.py). Here it is evaluated
on whole tiles: indices are arrays [block_q, 1] and [1, block_kv], and an operation broadcasts what it takes, so that
what depends on the row alone is computed once a row. Reads of operands go through a function of the implementation's.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray
from jax.extend.core import Literal, Primitive

from flash_jax.compat import vary_like
from flash_jax.spec import Mod

ELEMENTWISE = frozenset(
    """abs acos acosh add and asin asinh atan atan2 atanh bitcast_convert_type cbrt ceil clamp convert_element_type cos
    cosh div eq exp exp2 expm1 floor ge gt integer_pow is_finite le log log1p log2 logistic lt max min
    mul ne neg not or population_count pow rem rsqrt select_n shift_left shift_right_arithmetic
    shift_right_logical sign sin sinh sqrt square sub tan tanh xor""".split()
)
SAME = frozenset(("broadcast_in_dim", "copy", "copy_p", "pvary", "reshape", "squeeze", "stop_gradient"))
"""What does nothing to a scalar."""

read_p = Primitive("mod_read")
"""The entry of operand number `operand`, of `dtype`, at one integer for each of its dims."""
read_p.def_abstract_eval(lambda *index, operand, dtype: ShapedArray((), dtype))


def read_dtype(dtype: Any) -> Any:
    """The dtype in which an entry is read: 16-bit numbers as float32, for which every operation exists on a GPU."""
    dtype = jnp.dtype(dtype)
    return jnp.dtype(jnp.float32) if jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize < 4 else dtype


def _wide(x: jax.Array) -> jax.Array:
    return x.astype(read_dtype(x.dtype))


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
            out = [read(eqn, values)]
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
    values = vary_like([jnp.broadcast_to(x, shape) for x in values], values)
    return eqn.primitive.bind(*values, **eqn.params)


def evaluate(mod: Mod, args: list, read: Reader) -> jax.Array:
    """The mod of arrays that broadcast against each other."""

    def read_as(eqn, index):
        return read(eqn.params["operand"], index).astype(eqn.params["dtype"])

    literal = lambda x: jnp.full((), x.val, x.aval.dtype)  # noqa: E731
    (out,) = walk(mod.jaxpr, args, read_as, _apply, literal)
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
            values.append(_wide(read(operand, index)))
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
        # Under vmap what is read may have leading dims that the score has not.
        return jnp.broadcast_to(out, np.broadcast_shapes(out.shape, score.shape))
