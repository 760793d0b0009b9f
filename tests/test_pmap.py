"""The Flax modules under `pmap`, one example on each of eight devices, against their definition on the whole batch."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from flash_jax.flax.linen import SelfAttention as LinenSelfAttention
from flash_jax.flax.nnx import SelfAttention as NnxSelfAttention
from tests.support.accuracy import assert_accurate, judges
from tests.support.programs import Program
from tests.support.self_attention import CASES, FEATURES, LENGTH, definition, flat, inputs, normal

NAME = "every-option"
DEVICES = 8

pytestmark = pytest.mark.multi_device


def linen_apply(params, x):
    return LinenSelfAttention(**CASES[NAME]).apply({"params": params}, x)


def nnx_apply(params, x):
    graph, _ = nnx.split(
        nnx.eval_shape(lambda: NnxSelfAttention(in_features=FEATURES, **CASES[NAME], rngs=nnx.Rngs(0)))
    )
    state = nnx.State(jax.tree.map(nnx.Param, params))
    return nnx.merge(graph, state)(x)


def whole_batch(attend, x, params):
    def loss(params):
        out = definition(attend, x, params, **CASES[NAME])
        return jnp.sum(jnp.square(out)), out

    gradients, out = jax.grad(loss, has_aux=True)(params)
    return out, gradients


@pytest.mark.parametrize("apply", [linen_apply, nnx_apply], ids=["linen", "nnx"])
def test_output_and_summed_gradients(apply):
    x, params = normal(40, DEVICES, 1, LENGTH, FEATURES), inputs(NAME)[1]
    assert jax.device_count() == DEVICES

    @functools.partial(jax.pmap, axis_name="batch", in_axes=(0, None), out_axes=(0, None))
    def step(x, params):
        def loss(params):
            out = apply(params, x)
            return jnp.sum(jnp.square(out)), out

        gradients, out = jax.grad(loss, has_aux=True)(params)
        return out, jax.lax.psum(gradients, "batch")

    out, gradients = step(x, params)
    oracle, plain = judges(Program(whole_batch, {}), x, params)
    assert_accurate(out, oracle[0], plain[0])
    assert jax.tree.map(np.shape, gradients) == jax.tree.map(np.shape, params)
    assert_accurate(*map(flat, (gradients, oracle[1], plain[1])), derivative=True)
    assert {shard.device for shard in out.addressable_shards} == set(jax.devices())
