"""Compilation: its time, that it does not grow with the length, and that one signature compiles once (case G10)."""

import functools
import time

import jax
import jax.monitoring
import jax.numpy as jnp
import pytest

from tests.support.programs import values_and_gradients

pytestmark = pytest.mark.gpu

KERNELS = 3
SECONDS = 10.0  # the most that one kernel may take


def arguments(T, D=64, dtype=jnp.bfloat16):
    x = jax.ShapeDtypeStruct((1, T, 2, D), dtype)
    return (x, x, x), (x, jax.ShapeDtypeStruct((1, 2, T), jnp.float32))


def seconds_to_compile(attend, *shape):
    f = functools.partial(values_and_gradients(causal=True), attend)
    start = time.perf_counter()
    jax.jit(f).lower(*arguments(*shape)).compile()
    return time.perf_counter() - start


@pytest.mark.parametrize(("D", "dtype"), [(64, "bfloat16"), (128, "bfloat16"), (256, "bfloat16"), (128, "float32")])
def test_takes_seconds(attend, record_property, D, dtype):
    taken = seconds_to_compile(attend, 1024, D, jnp.dtype(dtype))
    record_property("seconds", taken)
    assert taken < KERNELS * SECONDS


def test_does_not_grow_with_the_length(attend):
    """The lowered programs of T = 1k and of 64k are of one size but for the digits of their numbers; so is the time."""
    f = functools.partial(values_and_gradients(causal=True), attend)
    short, long = (len(jax.jit(f).lower(*arguments(T)).as_text()) for T in (2**10, 2**16))
    assert long < 1.05 * short
    times = {T: min(seconds_to_compile(attend, T + n) for n in (0, 128, 256)) for T in (2**10, 2**16)}
    assert times[2**16] < 1.2 * times[2**10] + 0.2


def test_one_signature_compiles_once(attend):
    compiled = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, _, **__: compiled.append(event) if event.endswith("backend_compile_duration") else None
    )
    x = jax.random.normal(jax.random.key(0), (1, 70, 2, 32), jnp.bfloat16)
    jax.block_until_ready(attend(x, x, x, causal=True))
    first = len(compiled)
    assert first >= 1
    for _ in range(3):
        jax.block_until_ready(attend(x, x, x, causal=True))
    assert len(compiled) == first
