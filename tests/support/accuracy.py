"""The accuracy rule (R20), the one place where a tolerance is computed.

An error is measured against the reference in float64 on the already rounded inputs (the oracle), and is bounded by the
error of plain attention in the inputs' own dtype:

    max|x - oracle| <= 2 max|plain - oracle| + eps(dtype) max|oracle|        (3 for gradients and tangents)

The dtype is that of the result, with one exception: a bias, slopes, sinks or what a score_mod reads, float32 beside a
query of 16 bits, have float32 gradients, made of products and outputs that are rounded to 16 bits; for these alone eps
is that of the query's dtype, the "same dtype" of the rule.

Where both sides are in float64, `assert_same_in_float64` and `assert_slope` allow for the rounding of float64 alone.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from tests.support.cases import FEWER_QUERIES, MORE_QUERIES, case
from tests.support.oracle import reference_attention
from tests.support.plain import plain_attention
from tests.support.programs import Program

_judged = {}
_SHARED = [case(name).arrays()[0].shape for name in (FEWER_QUERIES, MORE_QUERIES)]


def check(program: Program, attend, *arrays, given=None):
    """Runs `program(attend, *arrays)` under `jit` and holds every result to the rule; returns the results.

    given: what `attend` gets in the place of `arrays`, where the two should make no difference (poisoned padding).
    """
    results = jax.jit(functools.partial(program, attend))(*(arrays if given is None else given))
    assert_agrees(results, program, *arrays)
    return results


def assert_agrees(results, program: Program, *arrays):
    """Holds `results`, however they were obtained, to what `program` should give for `arrays`."""
    oracle, plain = judges(program, *arrays)
    named = jax.tree_util.tree_leaves_with_path(results)
    derivative = jax.tree.leaves(jax.tree.broadcast(program.derivative, results))
    leaves = zip(named, jax.tree.leaves(oracle), jax.tree.leaves(plain), derivative, strict=True)
    for (path, x), r, p, is_derivative in leaves:
        name = jax.tree_util.keystr(path)
        inputs = jax.tree.leaves(arrays)[0].dtype if is_derivative and _is_riding_along(path) else None
        assert_accurate(x, r, p, derivative=is_derivative, name=name, inputs=inputs)


def _is_riding_along(path):
    """Whether this result is the gradient of a bias, of slopes, sinks or what a mod reads (see `programs`)."""
    return any(getattr(part, "key", None) in ("bias", "alibi_slopes", "sinks", "mod_operands") for part in path)


def judges(program: Program, *arrays):
    """What `program` gives with the reference in float64, and with plain attention in the dtype of `arrays`.

    Kept for the next implementation that is asked for the same.
    """
    key = program.fingerprint(arrays)
    if key not in _judged:
        whole = (lambda f: f) if jax.tree.leaves(arrays)[0].shape in _SHARED else jax.jit
        plain = whole(functools.partial(program, plain_attention))(*arrays)
        with jax.enable_x64(True):
            oracle = whole(functools.partial(program, reference_attention))(*jax.tree.map(_widened, arrays))
        _judged[key] = jax.tree.map(np.asarray, (oracle, plain))
    return _judged[key]


def _widened(array):
    """Floating-point numbers as float64, anything else unchanged."""
    return np.asarray(array, np.float64) if jnp.issubdtype(jnp.result_type(array), jnp.floating) else array


class Inaccurate(AssertionError):
    """A result that is further from the oracle than R20 allows, `times` as far."""

    def __init__(self, message, times):
        super().__init__(message)
        self.times = times


def assert_accurate(actual, oracle, plain, *, derivative=False, name="", inputs=None):
    """Raises AssertionError unless `actual` is as near to `oracle` as R20 asks, measured by `plain`.

    If that alone is what is wrong, it is `Inaccurate`.

    inputs: the dtype of query, key and value, where a result of another dtype is to be judged by it.
    """
    assert actual.shape == oracle.shape, f"{name}: shape {actual.shape} instead of {oracle.shape}"
    assert actual.dtype == plain.dtype, f"{name}: dtype {actual.dtype} instead of {plain.dtype}"
    x, r, p = (np.asarray(a).astype(np.float64) for a in (actual, oracle, plain))
    assert not np.isnan(r).any(), f"{name}: the oracle has NaN"
    assert not np.isnan(x).any(), f"{name}: NaN at {_first(np.isnan(x))}"
    for found, what in ((x, "the result"), (p, "plain attention")):
        wrong = (np.isinf(found) | np.isinf(r)) & (found != r)
        assert not wrong.any(), f"{name}: {what} and the oracle differ in infinities at {_first(wrong)}"
    finite = np.isfinite(r)
    error = np.zeros_like(r)
    error[finite] = np.abs(x[finite] - r[finite])
    dtype = plain.dtype if inputs is None else max(plain.dtype, inputs, key=lambda d: float(jnp.finfo(d).eps))
    bound = error_bound(r[finite], p[finite], dtype, derivative=derivative)
    if _largest(error) > bound:
        message = (
            f"{name}: error {_largest(error):.3e} at {_first(error == _largest(error))} exceeds {bound:.3e} "
            f"(largest value {_largest(r[finite]):.3e})"
        )
        raise Inaccurate(message, _largest(error) / bound if bound else float("inf"))


def error_bound(oracle, plain, dtype, *, derivative):
    """The largest error that R20 allows."""
    factor = 3 if derivative else 2
    return factor * _largest(plain - oracle) + float(jnp.finfo(dtype).eps) * _largest(oracle)


def assert_same_in_float64(actual, expected):
    """Raises AssertionError unless two float64 results are the same function's, summed in whatever order."""
    actual, expected = np.asarray(actual), np.asarray(expected)
    assert actual.dtype == expected.dtype == np.float64, f"dtypes {actual.dtype} and {expected.dtype}"
    finite = expected[np.isfinite(expected)]
    np.testing.assert_allclose(actual, expected, rtol=1e-9, atol=1e-11 * (1 + _largest(finite)))


def assert_slope(gradient, function, arrays, argument, index):
    """Raises AssertionError unless `gradient[index]` is the slope of a float64 `function(*arrays)` in that entry."""
    step = np.zeros_like(arrays[argument])
    step[index] = 1e-5
    below, above = (
        function(*(x + sign * step if n == argument else x for n, x in enumerate(arrays))) for sign in (-1, 1)
    )
    np.testing.assert_allclose(gradient[index], (above - below) / (2 * step[index]), rtol=1e-6, atol=1e-8)


def _largest(x):
    return float(np.max(np.abs(x), initial=0.0))


def _first(where):
    return tuple(int(i) for i in np.argwhere(where)[0])
