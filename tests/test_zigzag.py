"""The order of tokens in which devices share causal work equally, and attention in it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from flash_jax import unzigzag, zigzag
from tests.support.accuracy import assert_accurate, judges
from tests.support.cases import case
from tests.support.programs import values_and_gradients

pytestmark = pytest.mark.thorough


@pytest.mark.parametrize("devices", [1, 2, 3, 4])
@pytest.mark.parametrize("axis", [0, 1, -1])
def test_it_is_a_permutation_that_is_undone(devices, axis):
    x = jnp.arange(24 * 24 * 24).reshape(24, 24, 24)
    order = zigzag(x, devices, axis)
    np.testing.assert_array_equal(unzigzag(order, devices, axis), x)
    np.testing.assert_array_equal(np.sort(order, axis), x)


@pytest.mark.parametrize("devices", [2, 3, 4])
def test_each_part_has_the_same_causal_work(devices):
    work = zigzag(jnp.arange(1, 24 * devices + 1), devices).reshape(devices, -1).sum(-1)
    np.testing.assert_array_equal(work, work[0])


def test_what_is_wrong_is_said():
    with pytest.raises(ValueError, match=r"multiple of 2 \* devices = 6; got 8"):
        zigzag(jnp.arange(8), 3)
    with pytest.raises(ValueError, match="`devices` must be a positive int; got 0"):
        unzigzag(jnp.arange(8), 0)


@pytest.mark.multi_device
@pytest.mark.parametrize("strategy", ["ring", "all_gather", "heads"])
def test_attention_in_that_order(attend, strategy):
    c, n = case("B1-T32-S32-H4-K4-D16-f32"), 4
    program, inputs, cotangents = values_and_gradients(causal=True), c.inputs()[:3], c.cotangents()
    mesh = jax.make_mesh((n,), ("seq",), axis_types=(AxisType.Auto,), devices=jax.devices()[:n])
    on_part = functools.partial(attend, causal=True, context_axis="seq", context_strategy=strategy, return_lse=True)
    tokens = P(None, "seq")
    on_devices = jax.shard_map(
        lambda q, k, v, at: on_part(q, k, v, q_positions=at, kv_positions=at), mesh=mesh,
        in_specs=(tokens, tokens, tokens, P("seq")), out_specs=(tokens, P(None, None, "seq")),
        check_vma=attend.keywords["implementation"] != "triton",  # JAX's interpreter of kernels does not say
    )  # fmt: skip

    def in_order(q, k, v, **_):
        q, k, v = (zigzag(x, n, 1) for x in (q, k, v))
        out, lse = on_devices(q, k, v, zigzag(jnp.arange(32), n))
        return unzigzag(out, n, 1), unzigzag(lse, n, 2)

    found = jax.jit(functools.partial(program, in_order))(inputs, cotangents)
    for n, leaves in enumerate(zip(*map(jax.tree.leaves, (found, *judges(program, inputs, cotangents))), strict=True)):
        assert_accurate(*leaves, derivative=n > 1)
