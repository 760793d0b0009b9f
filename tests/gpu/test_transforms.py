"""JAX's transformations on the GPU: they find the kernels and give the same values (R16; C06, F03, H01, H04, H17)."""

import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from tests.support.accuracy import assert_agrees, check
from tests.support.cases import case
from tests.support.programs import Program, forward, values_and_gradients

pytestmark = pytest.mark.gpu

NAME = "B2-T130-S150-H4-K2-D64-bf16"


def equal(one, other):
    """Asserts that two trees hold the same numbers."""
    jax.tree.map(np.testing.assert_array_equal, one, other)


@pytest.mark.parametrize("mapped", [(0, 0, 0), (0, None, None), (None, 0, 0), (None, None, 0)], ids=str)
def test_vmap(attend, mapped):
    """Of the gradients too, each example's own, also of an input that is not mapped."""
    c = case("B3-T130-S150-H4-K2-D64-bf16")
    arrays = [x if axis == 0 else x[0] for x, axis in zip(c.arrays(), mapped, strict=True)]

    def mapped_call(attend, arrays, cotangents):
        one = functools.partial(values_and_gradients(causal=True), attend)
        return jax.vmap(lambda q, k, v, *ct: one((q, k, v), ct), in_axes=(*mapped, 0, 0))(*arrays, *cotangents)

    check(Program(mapped_call, derivative=(False, True)), attend, arrays, c.cotangents())


def test_op_by_op_and_jit_and_implementation_none(attend):
    import flash_jax

    c = case(NAME)
    program = values_and_gradients(causal=True)
    one = functools.partial(program, attend)
    jitted = jax.jit(one)(c.arrays(), c.cotangents())
    assert_agrees(one(c.arrays(), c.cotangents()), program, c.arrays(), c.cotangents())
    chosen = functools.partial(values_and_gradients(causal=True), flash_jax.flash_attention)
    equal(jax.jit(chosen)(c.arrays(), c.cotangents()), jitted)


def test_pmap_and_shard_map_over_one_device(attend):
    c = case(NAME)
    program = values_and_gradients(causal=True)
    one = functools.partial(program, attend)
    stacked = jax.tree.map(lambda x: x[None], (c.arrays(), c.cotangents()))
    parallel = jax.pmap(one)(*stacked)
    assert_agrees(jax.tree.map(lambda x: x[0], parallel), program, c.arrays(), c.cotangents())
    mesh = jax.make_mesh((1,), ("data",), (AxisType.Auto,), devices=jax.devices()[:1])
    sharded = jax.jit(jax.shard_map(one, mesh=mesh, in_specs=P("data"), out_specs=P("data")))
    assert_agrees(sharded(c.arrays(), c.cotangents()), program, c.arrays(), c.cotangents())


def test_checkpoint_and_scan(attend):
    c = case("B2-T130-S130-H4-D64-bf16")

    def layers(attend, x, wrap):
        def layer(x, _):
            return x + attend(x, x, x), None

        return jax.lax.scan(wrap(layer), x, length=3)[0]

    def program(attend, x, dout, wrap=lambda f: f):
        out, pull = jax.vjp(lambda x: layers(attend, x, wrap), x)
        return out, pull(dout)

    x, dout = c.arrays()[0], c.cotangents()[0]
    found = jax.jit(functools.partial(program, functools.partial(attend, causal=True)))(x, dout)
    remat = functools.partial(program, functools.partial(attend, causal=True), wrap=jax.checkpoint)
    for results in (found, jax.jit(remat)(x, dout)):
        assert_agrees(results, Program(program, {"causal": True}, derivative=(False, True)), x, dout)


def test_inside_cond(attend):
    c = case("B2-T130-S130-H4-D64-f16")
    x = jax.device_put(c.arrays()[0])
    branch = jax.jit(lambda flag, x: jax.lax.cond(flag, lambda x: attend(x, x, x), lambda x: x, x))
    equal(branch(True, x), jax.jit(attend)(x, x, x))
    equal(branch(False, x), x)


@pytest.mark.parametrize("dtype", ["bf16", "f32"])
def test_with_x64_on(attend, dtype):
    """64-bit mode changes neither output and log-sum-exp nor any dtype, and gradients are as exact (case F03)."""
    c = case(NAME.replace("bf16", dtype))
    options = {"causal": True, "q_lengths": np.array([100, 130]), "kv_lengths": np.array([150, 31])}
    program = values_and_gradients(**options)
    one = functools.partial(program, attend)
    expected = jax.jit(one)(c.arrays(), c.cotangents())
    with jax.enable_x64(True):
        found = jax.jit(lambda *x: one(*x))(c.arrays(), c.cotangents())
    equal(found[0], expected[0])
    assert_agrees(found, program, c.arrays(), c.cotangents())
    assert [x.dtype for x in jax.tree.leaves(found)] == [x.dtype for x in jax.tree.leaves(expected)]


def test_no_warning_leaks(attend):
    c = case("B1-T50-S70-H2-D32-bf16")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        jax.block_until_ready(jax.jit(functools.partial(values_and_gradients(), attend))(c.arrays(), c.cotangents()))
    assert not caught


def test_implementation_none_chooses_the_kernels():
    """A gradient's compiled program holds the three kernels; that of head dim 300, too large for them, holds none."""
    import flash_jax

    def program(name):
        c = case(name)
        f = functools.partial(values_and_gradients(causal=True), flash_jax.flash_attention)
        return jax.jit(f).lower(c.arrays(), c.cotangents()).compile().as_text() or ""

    text = program(NAME)
    for kernel in ("forward", "dq", "dkv"):
        assert f"flash_attention_{kernel}_kernel" in text
    assert "flash_attention_forward_kernel" not in program("T40-S50-D300-bf16")
    check(forward(causal=True), flash_jax.flash_attention, *case("T40-S50-D300-bf16").arrays())


def test_gradient_memory_is_linear(attend):
    """Temporary memory at T = 32k: far below one matrix of scores (R15)."""
    x = jax.ShapeDtypeStruct((1, 2**15, 2, 64), jnp.bfloat16)

    def loss(q, k, v):
        return attend(q, k, v, causal=True).astype(jnp.float32).sum()

    compiled = jax.jit(jax.grad(loss, argnums=(0, 1, 2))).lower(x, x, x).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 16 * x.size * 2
