"""The user's `score_mod` and `mask_mod`: traced once with scalars, and checked."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from flash_jax import compat
from flash_jax.spec import Mod
from flash_jax.tiles import mods as tile_mods
from flash_jax.tiles import reads


class Operand:
    """What a mod gets in the place of an array of `mod_operands`: it can be indexed by integers, and nothing else.

    `operand[i, j]` is the entry at one integer for each dim, 16-bit numbers as float32. An integer outside the array is
    moved to the nearest end.
    """

    def __init__(self, name: str, number: int, shape: tuple[int, ...], dtype: Any):
        self._name, self._number, self.shape, self.ndim = name, number, shape, len(shape)
        self.dtype = tile_mods.read_dtype(dtype)  # in which it is read

    def __getitem__(self, index: Any) -> jax.Array:
        index = index if isinstance(index, tuple) else (index,)
        index = () if index == (...,) and not self.ndim else index
        if len(index) != self.ndim:
            raise TypeError(
                f"{self._name} has {self.ndim} dims and is read entry by entry, by as many integers; got {len(index)}."
            )
        return tile_mods.read_p.bind(*map(self._integer, index, self.shape), operand=self._number, dtype=self.dtype)

    def _integer(self, x: Any, size: int) -> jax.Array:
        if isinstance(x, (int, np.integer)) and not isinstance(x, bool):
            if not -size <= x < size:
                raise IndexError(f"{self._name}: index {x} is out of bounds for a dim of size {size}.")
            return jnp.asarray(x % size, jnp.int32)
        if not isinstance(x, jax.Array) or x.shape or not jnp.issubdtype(x.dtype, jnp.integer):
            got = f"{x.dtype}{list(x.shape)}" if isinstance(x, jax.Array) else repr(x)
            raise TypeError(f"{self._name} is indexed by scalar integers; got {got}.")
        return x.astype(jnp.int32)

    def _refuse(self, *_, **__):
        raise TypeError(f"{self._name} is no array inside a mod: index it, as in `operand[h, i - j]`.")

    __iter__ = __array__ = __bool__ = __eq__ = __ne__ = _refuse
    __jax_array__ = property(_refuse)  # JAX asks for it before it would call it, and words its own error otherwise


def operands(values: Sequence[ArrayLike], rank: int, wide: bool) -> tuple[jax.Array, ...]:
    """`mod_operands` with `rank` dims of size 1 before their own, one for each of the call's leading dims."""
    if not isinstance(values, (tuple, list)):
        raise TypeError(f"`mod_operands` must be a tuple of arrays; got {type(values).__name__}.")
    for n, x in enumerate(values):
        is_array = isinstance(x, (jax.Array, np.ndarray))
        kind = jnp.result_type(x) if is_array else type(x).__name__
        if (
            not is_array
            or not (jnp.issubdtype(kind, jnp.number) or kind == "bool")
            or kind in ("complex64", "complex128")
        ):
            raise TypeError(f"`mod_operands[{n}]` must be an array of real numbers or bools; got {kind}.")
        if kind == "float64" and not wide:
            raise TypeError(f"`mod_operands[{n}]` may be float64 only where `query` is; cast it.")
        if 0 in jnp.shape(x):
            raise ValueError(f"`mod_operands[{n}]` has nothing to read: its shape is {jnp.shape(x)}.")
    return tuple(jnp.asarray(x).reshape((1,) * rank + jnp.shape(x)) for x in values)


def score_mod(function: Callable | None, given: tuple, batch: tuple[int, ...], heads: int, dtype: Any) -> Mod | None:
    """The traced score_mod, for scores of `dtype`."""
    return None if function is None else _checked("score_mod", function, given, batch, heads, jnp.dtype(dtype))


def mask_mod(function: Callable | None, given: tuple, batch: tuple[int, ...], heads: int) -> Mod | None:
    """The traced mask_mod."""
    return None if function is None else _checked("mask_mod", function, given, batch, heads, None)


def _checked(name: str, function: Callable, given: tuple, batch: tuple[int, ...], heads: int, dtype: Any) -> Mod:
    if not callable(function):
        raise TypeError(f"`{name}` must be a function; got {type(function).__name__}.")
    shapes = tuple((x.shape[len(batch) :], x.dtype) for x in given)
    x64 = bool(jax.config.jax_enable_x64)  # pyright: ignore[reportAttributeAccessIssue]
    try:
        hash(function)
    except TypeError:
        return _trace(name, function, shapes, batch, heads, dtype)
    return _traced(name, function, shapes, batch, heads, dtype, x64)


@functools.lru_cache(maxsize=256)
def _traced(name, function, shapes, batch, heads, dtype, x64) -> Mod:
    """One and the same Mod for the same function and operands, so that a call is compiled once."""
    return _trace(name, function, shapes, batch, heads, dtype)


def _trace(name: str, function: Callable, shapes: tuple, batch: tuple[int, ...], heads: int, dtype: Any) -> Mod:
    handles = [Operand(f"`mod_operands[{n}]`", n, *x) for n, x in enumerate(shapes)]
    wanted = jnp.dtype(bool) if dtype is None else dtype

    def scalar(*args):
        out = function(*args, *handles)
        if not isinstance(out, (jax.Array, np.ndarray, np.generic, bool, int, float)) or jnp.shape(out) != ():
            got = f"shape {jnp.shape(out)}" if hasattr(out, "shape") else type(out).__name__
            raise TypeError(f"`{name}` must return one number for the entry it is given; got {got}.")
        kind = jnp.result_type(out)
        if (kind == "bool") != (dtype is None) or jnp.issubdtype(kind, jnp.complexfloating):
            needed = "a bool, True where attention is allowed" if dtype is None else "a score, a floating-point number"
            raise TypeError(f"`{name}` must return {needed}; got {kind}.")
        return jnp.asarray(out).astype(wanted)

    index = jax.ShapeDtypeStruct((), jnp.int32)
    first = [] if dtype is None else [jax.ShapeDtypeStruct((), dtype)]
    with compat.constants_in_place():
        closed = jax.make_jaxpr(scalar)(*first, index, index, index, index)
    _check(name, closed)
    mod = Mod(function, closed.jaxpr, batch, heads)
    reads.reads_of(mod)  # raises for an index that depends on the score
    return mod


def _check(name: str, closed: Any) -> None:
    """Raises for what is closed over, and for operations that are not elementwise."""
    for x in closed.consts:
        raise TypeError(
            f"`{name}` closes over an array of shape {jnp.shape(x)}; pass it in `mod_operands` and index it inside, as "
            "in `operand[h, i - j]`."
        )
    for eqn in closed.jaxpr.eqns:
        inner, op = tile_mods.inner_jaxpr(eqn), eqn.primitive.name
        scalar = all(x.aval.shape == () for x in (*eqn.invars, *eqn.outvars))
        if inner is not None:
            nested = next((eqn.params[n] for n in ("jaxpr", "call_jaxpr", "fun_jaxpr") if n in eqn.params), None)
            _check(name, nested if hasattr(nested, "consts") else _Open(inner))
        elif eqn.primitive is not tile_mods.read_p and not (
            scalar and (op in tile_mods.ELEMENTWISE or op in tile_mods.SAME)
        ):
            raise NotImplementedError(
                f"`{name}` uses `{op}`, which cannot run inside a tile: it must be made of elementwise operations on "
                "the scalars it is given (`jnp.where` for a choice), and arrays must come through `mod_operands`."
            )


class _Open:
    """A jaxpr without constants, as if it were closed."""

    def __init__(self, jaxpr: Any):
        self.jaxpr, self.consts = jaxpr, ()
