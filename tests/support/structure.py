"""What a traced or compiled program consists of: equations, sizes of values, memory."""

import math
from collections.abc import Iterator

import jax
from jax.extend import core


def equations(function, *arguments) -> Iterator[core.JaxprEqn]:
    """Every equation of `function` traced, those of inner functions included (a loop's body once)."""
    yield from _walk(jax.make_jaxpr(function)(*arguments).jaxpr)


def named(name: str, function, *arguments) -> list[core.JaxprEqn]:
    """The equations of `function` traced whose primitive is called `name`."""
    return [e for e in equations(function, *arguments) if e.primitive.name == name]


def temporary_bytes(function, *arguments) -> int:
    """The temporary memory that the compiled function needs, as its own memory analysis says."""
    return jax.jit(function).lower(*arguments).compile().memory_analysis().temp_size_in_bytes


def lowered_sizes(function, *arguments) -> set[int]:
    """The numbers of elements of all tensors in the lowered program, where every implementation is spelled out."""
    text = jax.jit(function).lower(*arguments).as_text()
    return {math.prod(map(int, dims.split("x")[:-1])) for dims in _tensors(text)}


def _tensors(text: str) -> Iterator[str]:
    for part in text.split("tensor<")[1:]:
        yield part.split(">")[0].split(",")[0]


def _walk(jaxpr: core.Jaxpr) -> Iterator[core.JaxprEqn]:
    for equation in jaxpr.eqns:
        yield equation
        for inner in jax.tree.leaves(list(equation.params.values()), is_leaf=_is_jaxpr):
            if isinstance(inner, core.ClosedJaxpr):
                yield from _walk(inner.jaxpr)
            elif isinstance(inner, core.Jaxpr):
                yield from _walk(inner)


def _is_jaxpr(x) -> bool:
    return isinstance(x, core.Jaxpr | core.ClosedJaxpr)
