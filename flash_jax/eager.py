"""Calls outside `jit`, compiled as a whole: Python looks at the arguments of the first of a kind alone."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer

from flash_jax.spec import interpreting

_FIXED = (type(None), bool, int, float, str)


def compiled(function: Callable, given: dict[str, Any]) -> Callable[[], Any] | None:
    """`function(**given)` to be called, under `jit`; None where that would not do the same.

    What is traced already, NumPy's arrays, whose numbers may be known while tracing, and functions do not go this way,
    nor do integers of other than 32 bits, whose values are checked where they are known; nor does the reference, which
    runs as it is written.
    """
    disabled = jax.config.jax_disable_jit  # pyright: ignore[reportAttributeAccessIssue]
    if disabled or given["implementation"] == "reference":
        return None
    arrays, fixed = {}, []
    for name, x in given.items():
        if isinstance(x, _FIXED):
            fixed.append((name, type(x), x))
        elif isinstance(x, jax.Array) and not isinstance(x, Tracer) and _is_of_no_concern(x.dtype):
            arrays[name] = x
        elif isinstance(x, tuple) and all(isinstance(y, _FIXED) for y in x):
            fixed.append((name, tuple(map(type, x)), x))
        else:
            return None
    run = _jitted(function, tuple(arrays), tuple(fixed), interpreting())
    return lambda: run(*arrays.values())


def _is_of_no_concern(dtype: Any) -> bool:
    return dtype == jnp.int32 or not jnp.issubdtype(dtype, jnp.integer)


@functools.lru_cache(maxsize=4096)
def _jitted(function: Callable, names: tuple[str, ...], fixed: tuple, interpret: bool) -> Callable:
    """By types, too, as 1 and True are equal; and by whether kernels are interpreted, which is no argument."""

    def flash_attention(*arrays):
        return function(**dict(zip(names, arrays, strict=True)), **{name: x for name, _, x in fixed})

    return jax.jit(flash_attention)
