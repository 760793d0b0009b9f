"""The functions of an attention that the tests compare.

A `Program` is called as `program(attend, *arrays)`, where `attend` is called as `flash_attention` is, and gives a
pytree of results: so one program runs with the implementation under test, with the oracle and with plain attention.

`inputs` are (query, key, value), or these and a dict of arrays by their keyword (bias, scale, alibi_slopes, sinks) that
are differentiated as well; gradients have the same structure. There, `mod_operands` is a tuple of arrays: what a mod
reads besides, in the option of that name, comes after them and is not differentiated.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np


class Program:
    """A function of an attention, the options with which this is called, and which results are derivatives."""

    def __init__(self, function: Callable[..., Any], options: dict[str, Any] | None = None, derivative: Any = False):
        """`function(attend, *arrays)` is given an `attend` that has the `options` already.

        `derivative` is True where a result is a gradient or a tangent: one bool, or a pytree prefix of the results.
        """
        self.function = function
        self.options = options or {}
        self.derivative = derivative

    def __call__(self, attend, *arrays):
        """The results with this `attend`."""
        return self.function(functools.partial(attend, **self.options), *arrays)

    def fingerprint(self, arrays):
        """Equal for two calls only if they compute the same: the key under which the judges' results are kept."""
        leaves, tree = jax.tree.flatten(jax.tree.map(_words, (self.options, arrays)))
        return self.function, str(tree), tuple(map(_contents, leaves))


def _contents(x):
    """What makes a leaf what it is; a function, which is a mod, is kept alive, so that none other has its id."""
    return x if callable(x) else (np.asarray(x).dtype.name, np.shape(x), np.asarray(x).tobytes())


def _words(x):
    """A JAX key as its words, anything else unchanged."""
    return jax.random.key_data(x) if jax.numpy.issubdtype(getattr(x, "dtype", None), jax.dtypes.prng_key) else x


def forward(**options):
    """`program(attend, *inputs)`: output and log-sum-exp."""
    return Program(_forward, options)


def gradients(**options):
    """`program(attend, inputs, (dout, dlse))`: gradients of the inputs through both results.

    A cotangent that is None means that this result is not used at all.
    """
    return Program(_gradients, options, derivative=True)


def values_and_gradients(**options):
    """`program(attend, inputs, cotangents)`: what `forward` gives and what `gradients` gives."""
    return Program(_values_and_gradients, options, derivative=(False, True))


def tangents(**options):
    """`program(attend, inputs, input tangents)`: tangents of output and log-sum-exp."""
    return Program(_tangents, options, derivative=True)


def everything(**options):
    """`program(attend, inputs, cotangents, input tangents)`: what `forward`, `gradients` and `tangents` give."""
    return Program(_everything, options, derivative=(False, True, True))


def second_order(**options):
    """`program(attend, inputs, cotangents, directions)`: the derivative of the gradients along `directions`."""
    return Program(_second_order, options, derivative=True)


def _forward(attend, query, key, value, operands=None):
    return attend(query, key, value, **keywords(attend, operands), return_lse=True)


def keywords(attend, operands):
    """The differentiated arrays as keywords of `attend`, what mods read besides among them."""
    named = dict(operands or {})
    if "mod_operands" in named:
        named["mod_operands"] = (*named["mod_operands"], *attend.keywords.get("mod_operands", ()))
    return named


def _gradients(attend, inputs, cotangents):
    dout, dlse = cotangents

    def used(query, key, value, operands=None):
        if dlse is None:
            return attend(query, key, value, **keywords(attend, operands)), None
        out, lse = _forward(attend, query, key, value, operands)
        return (None if dout is None else out), lse

    return jax.vjp(used, *inputs)[1]((dout, dlse))


def _values_and_gradients(attend, inputs, cotangents):
    values, pull = jax.vjp(functools.partial(_forward, attend), *inputs)
    return values, pull(cotangents)


def _tangents(attend, inputs, directions):
    return jax.jvp(functools.partial(_forward, attend), inputs, directions)[1]


def _everything(attend, inputs, cotangents, directions):
    return *_values_and_gradients(attend, inputs, cotangents), _tangents(attend, inputs, directions)


def _second_order(attend, inputs, cotangents, directions):
    return jax.jvp(lambda *x: _gradients(attend, x, cotangents), inputs, directions)[1]
