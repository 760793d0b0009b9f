"""`tune` on a GPU: what it finds is right, kept, and not slower than the table.

A tile that gives other results is a warning, and so fails the test.
"""

import functools
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import flash_jax
from flash_jax.triton import tiling
from flash_jax.tuning import search, timing
from tests.support.accuracy import check
from tests.support.cases import case
from tests.support.programs import everything

pytestmark = pytest.mark.gpu

SECONDS = 20.0
CALLS = {
    "B2-T1024-S1024-H8-K2-D64-bf16": {"causal": True},
    "B1-T1000-S777-H4-D128-bf16": {"softcap": 20.0, "kv_lengths": np.array([700])},
    "B2-T512-S512-H4-D128-f16": {"segment_ids": np.arange(512) // 200},
    "B1-T500-S500-H4-D64-f32": {"window": (100, 0)},
    "B1-T512-S512-H2-D256-bf16": {},
}


@pytest.mark.parametrize("name", CALLS)
def test_what_is_found_is_right_and_kept(name, tmp_path, monkeypatch):
    c = case(name)
    find = functools.partial(
        flash_jax.tune, *c.arrays(), **CALLS[name], passes=tiling.PASSES, cache=tmp_path, seconds=SECONDS
    )
    start = time.perf_counter()
    sizes = find()
    assert time.perf_counter() - start < 3 * SECONDS
    attend = functools.partial(flash_jax.flash_attention, implementation="triton", block_sizes=sizes)
    check(everything(**CALLS[name]), attend, c.arrays(), c.cotangents(), c.tangents())
    monkeypatch.setattr(search, "search", None)
    assert find() == sizes


def test_with_a_bias_its_gradient_takes_the_sizes(tmp_path):
    """[H, T, S], which examples share: the kernels that store it have the sizes of dq."""
    x, bias = jax.ShapeDtypeStruct((2, 1024, 8, 64), jnp.bfloat16), jax.ShapeDtypeStruct((8, 1024, 1024), jnp.float32)
    sizes = flash_jax.tune(x, x, x, bias, causal=True, passes=("dq",), cache=tmp_path, seconds=SECONDS)
    q, b = jnp.ones(x.shape, x.dtype), jnp.zeros(bias.shape)

    def total(q, b):
        return flash_jax.flash_attention(q, q, q, b, causal=True, block_sizes=sizes).astype(jnp.float32).sum()

    assert all(jnp.isfinite(g).all() for g in jax.jit(jax.grad(total, argnums=(0, 1)))(q, b))


def test_not_slower_than_the_table(record_property):
    """One of the table's own tiles may come back; whatever does is as fast, but for what noise does to a median."""
    x = jax.ShapeDtypeStruct((1, 8192, 16, 128), jnp.bfloat16)
    sizes = flash_jax.tune(x, x, x, causal=True, cache=None, seconds=2 * SECONDS)
    q, k, v = (jax.random.normal(key, x.shape, x.dtype) for key in jax.random.split(jax.random.key(0), 3))

    def step(sizes):
        def loss(q, k, v):
            out = flash_jax.flash_attention(q, k, v, causal=True, implementation="triton", block_sizes=sizes)
            return out.astype(jnp.float32).sum()

        return jax.jit(jax.grad(loss, argnums=(0, 1, 2)))

    calls = {name: functools.partial(step(which), q, k, v) for name, which in (("table", None), ("tuned", sizes))}
    times = timing.measure(calls)
    record_property("times", str(times))
    assert times["tuned"].median < 1.05 * times["table"].median


def test_machines_and_platforms(monkeypatch):
    """Arrays on the CPU of a machine with a GPU are not timed on either."""
    q = jax.device_put(jnp.ones((1, 64, 2, 64), jnp.bfloat16), jax.devices("cpu")[0])
    with pytest.raises(NotImplementedError, match="'cpu'"):
        flash_jax.tune(q, q, q, cache=None)
