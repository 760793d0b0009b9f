"""What a traced or compiled program consists of: primitives, array shapes, memory."""

import collections

import jax
from jax.extend import core


def primitives(function, *arguments) -> collections.Counter:
    """How often each primitive occurs in `function` traced, inner functions (loop bodies once) included."""
    return _count(jax.make_jaxpr(function)(*arguments).jaxpr)


def temporary_bytes(function, *arguments) -> int:
    """The temporary memory that the compiled function needs, as its own memory analysis says."""
    analysis = jax.jit(function).lower(*arguments).compile().memory_analysis()
    return analysis.temp_size_in_bytes


def _count(jaxpr: core.Jaxpr) -> collections.Counter:
    counter = collections.Counter()
    for equation in jaxpr.eqns:
        counter[equation.primitive.name] += 1
        for inner in jax.tree.leaves(list(equation.params.values()), is_leaf=_is_jaxpr):
            if isinstance(inner, core.ClosedJaxpr):
                counter += _count(inner.jaxpr)
            elif isinstance(inner, core.Jaxpr):
                counter += _count(inner)
    return counter


def _is_jaxpr(x) -> bool:
    return isinstance(x, core.Jaxpr | core.ClosedJaxpr)
