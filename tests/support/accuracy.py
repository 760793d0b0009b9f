"""The accuracy rule (R20), the one place where a tolerance is computed.

An error is measured against the reference in float64 on the already rounded inputs (the oracle), and is bounded by the
error of plain attention in the inputs' own dtype:

    max|x - oracle| <= 2 max|plain - oracle| + eps(dtype) max|oracle|        (3 for gradients and tangents)
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from tests.support.oracle import reference_attention
from tests.support.plain import plain_attention
from tests.support.programs import Program


_judged = {}


def check(program: Program, attend, *arrays, derivative=False, given=None):
    """Runs `program(attend, *arrays)` and holds every result to the rule; returns the results.

    derivative: whether the results are gradients or tangents.
    given: what `attend` gets in the place of `arrays`, where the two should make no difference (poisoned padding).
    """
    actual = jax.jit(functools.partial(program, attend))(*(arrays if given is None else given))
    oracle, plain = judges(program, *arrays)
    named = jax.tree_util.tree_leaves_with_path(actual)
    leaves = zip(named, jax.tree.leaves(oracle), jax.tree.leaves(plain), strict=True)
    for (path, x), r, p in leaves:
        assert_accurate(x, r, p, derivative=derivative, name=jax.tree_util.keystr(path))
    return actual


def judges(program: Program, *arrays):
    """What `program` gives with the reference in float64, and with plain attention in the dtype of `arrays`.

    Kept for the next implementation that is asked for the same.
    """
    key = program.fingerprint(arrays)
    if key not in _judged:
        _judged[key] = _judge(program, *arrays)
    return _judged[key]


def _judge(program, *arrays):
    plain = jax.jit(functools.partial(program, plain_attention))(*arrays)
    with jax.enable_x64(True):
        wide = jax.tree.map(_widened, arrays)
        oracle = jax.jit(functools.partial(program, reference_attention))(*wide)
        dense = jax.jit(functools.partial(program, plain_attention))(*wide)
        # If the yardstick computed another function, its "error" would widen the bound: the two must be one in float64.
        jax.tree.map(_assert_same_function, oracle, dense)
        return jax.tree.map(np.asarray, oracle), jax.tree.map(np.asarray, plain)


def assert_accurate(actual, oracle, plain, *, derivative=False, name=""):
    """Raises AssertionError unless `actual` is as near to `oracle` as R20 asks, measured by `plain`."""
    assert actual.shape == oracle.shape, f"{name}: shape {actual.shape} instead of {oracle.shape}"
    assert actual.dtype == plain.dtype, f"{name}: dtype {actual.dtype} instead of {plain.dtype}"
    x, r, p = (np.asarray(a).astype(np.float64) for a in (actual, oracle, plain))
    assert not np.isnan(r).any(), f"{name}: the oracle has NaN"
    assert not np.isnan(x).any(), f"{name}: NaN at {_first(np.isnan(x))}"
    for found, what in ((x, "the result"), (p, "plain attention")):
        wrong = np.isinf(found) & (found != r) | np.isinf(r) & (found != r)
        assert not wrong.any(), f"{name}: {what} and the oracle differ in infinities at {_first(wrong)}"
    finite = np.isfinite(r)
    error = np.zeros_like(r)
    error[finite] = np.abs(x[finite] - r[finite])
    bound = error_bound(r[finite], p[finite], plain.dtype, derivative=derivative)
    assert _largest(error) <= bound, (
        f"{name}: error {_largest(error):.3e} at {_first(error == _largest(error))} exceeds {bound:.3e} "
        f"(largest value {_largest(r[finite]):.3e})"
    )


def error_bound(oracle, plain, dtype, *, derivative):
    """The largest error that R20 allows."""
    factor = 3 if derivative else 2
    return factor * _largest(plain - oracle) + float(jnp.finfo(dtype).eps) * _largest(oracle)


def _widened(array):
    """Floating-point numbers as float64, anything else unchanged."""
    return np.asarray(array, np.float64) if jnp.issubdtype(jnp.result_type(array), jnp.floating) else array


def _assert_same_function(oracle, dense):
    np.testing.assert_allclose(dense, oracle, rtol=1e-9, atol=1e-9, err_msg="reference and plain attention differ")


def _largest(x):
    return float(np.max(np.abs(x), initial=0.0))


def _first(where):
    return tuple(int(i) for i in np.argwhere(where)[0])
