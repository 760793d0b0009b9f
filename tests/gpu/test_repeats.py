"""The same bits on every run, forward and gradients, also after compiling again (R14; cases B14, E05, G01)."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from tests.support.cases import case
from tests.support.programs import values_and_gradients

pytestmark = pytest.mark.gpu

RUNS = 50
SHAPES = [
    "B4-T1024-S1024-H8-D64-bf16",
    "B2-T1000-S777-H8-K2-D128-bf16",
    "B1-T512-S512-H16-D72-f16",
    "B1-T1020-S1020-H8-D32-f32",
    "B2-T300-S500-H6-K1-D192-Dv128-bf16",
]


@jax.jit
def same_bits(one, other):
    """Whether two trees of arrays agree bit by bit."""

    def same(x, y):
        bits = jnp.uint16 if x.dtype.itemsize == 2 else jnp.uint32
        return jnp.array_equal(lax.bitcast_convert_type(x, bits), lax.bitcast_convert_type(y, bits))

    return jnp.stack(jax.tree.leaves(jax.tree.map(same, one, other)))


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("name", SHAPES)
def test_fifty_runs(attend, name, causal):
    c = case(name)
    arrays = jax.device_put((c.arrays(), c.cotangents()))
    program = functools.partial(values_and_gradients(causal=causal), attend)
    run = jax.jit(program)
    first = run(*arrays)
    verdicts = [same_bits(first, run(*arrays)) for _ in range(RUNS)]
    assert jnp.stack(verdicts).all()
    again = jax.jit(lambda *x: program(*x))
    assert same_bits(first, again(*arrays)).all()
