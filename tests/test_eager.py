"""Calls outside `jit`: quick when they are repeated, and the same as step by step."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import flash_jax
from flash_jax import arguments
from tests.support.cases import case

C = case("B2-T12-S15-H4-K2-D8-f32")


@pytest.fixture
def attend():
    return functools.partial(flash_jax.flash_attention, implementation="xla")


@pytest.fixture
def qkv():
    return [jnp.asarray(x) for x in C.arrays()]


@pytest.fixture
def looks(monkeypatch):
    """How often Python has looked at arguments."""
    counted = []
    look = arguments.normalise
    monkeypatch.setattr(arguments, "normalise", lambda *args, **given: counted.append(1) or look(*args, **given))
    return counted


def test_arguments_of_a_kind_are_looked_at_once(attend, qkv, looks):
    bias = jnp.ones((4, 12, 15))
    compiled = jax.jit(functools.partial(attend, window=(5, None), softcap=7.5))
    for n in range(3):
        out = attend(*qkv, bias + n, window=(5, None), q_offset=jnp.int32(n), softcap=7.5)
        np.testing.assert_array_equal(out, compiled(*qkv, bias + n, q_offset=jnp.int32(n)))
    assert len(looks) == 2  # by the first of ours, and by `jit`
    attend(*qkv, bias, window=(6, None), q_offset=jnp.int32(0), softcap=7.5)
    attend(*(x[:1] for x in qkv), bias, window=(6, None), q_offset=jnp.int32(0), softcap=7.5)
    assert len(looks) == 4


def test_what_is_equal_is_not_the_same(attend, qkv):
    attend(*qkv, causal=True, window=(1, 0), chunk_size=1)
    for wrong in ({"causal": 1}, {"causal": True, "window": (True, 0)}, {"causal": True, "chunk_size": True}):
        with pytest.raises((TypeError, ValueError)):
            attend(*qkv, **wrong)


def test_values_are_checked_where_they_are_known(attend, qkv):
    with jax.enable_x64(True):
        ids = jnp.zeros(12, jnp.int64).at[3].set(2**40)
        with pytest.raises(ValueError, match="must fit int32"):
            attend(*qkv, q_segment_ids=ids, kv_segment_ids=jnp.zeros(15, jnp.int64))


def test_interpret_mode_is_a_kind_of_its_own(qkv):
    attend = functools.partial(flash_jax.flash_attention, implementation="triton")
    for _ in range(2):
        with pytest.raises(NotImplementedError, match="needs an NVIDIA GPU"):
            attend(*qkv)
        with flash_jax.interpret_mode():
            out = attend(*qkv)
        np.testing.assert_allclose(out, flash_jax.flash_attention(*qkv), rtol=1e-5, atol=1e-5)


def test_without_jit(attend, qkv):
    with jax.disable_jit():
        out = attend(*qkv, causal=True)
    np.testing.assert_allclose(out, attend(*qkv, causal=True), rtol=1e-5, atol=1e-5)


def test_a_nan_is_looked_for(attend, qkv):
    with jax.debug_nans(True):
        attend(*qkv, kv_lengths=0)
        with pytest.raises(FloatingPointError):
            attend(qkv[0].at[0, 3].set(jnp.nan), *qkv[1:])


def test_gradients_and_maps(attend, qkv):
    def loss(*x):
        return (attend(*x, causal=True) ** 2).sum()

    found, expected = (f(*qkv) for f in (jax.grad(loss), jax.jit(jax.grad(loss))))
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(jax.vmap(attend)(*qkv), attend(*qkv), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("q_lengths", [9, np.array([9, 3]), [9, 3]], ids=["int", "numpy", "list"])
def test_numbers_that_are_known(attend, qkv, q_lengths):
    if isinstance(q_lengths, list):
        with pytest.raises(TypeError, match="must be an int or an integer array"):
            attend(*qkv, q_lengths=q_lengths)
        return
    expected = attend(*qkv, q_lengths=jnp.asarray(q_lengths, jnp.int32))
    np.testing.assert_allclose(attend(*qkv, q_lengths=q_lengths), expected, rtol=1e-6, atol=1e-6)
