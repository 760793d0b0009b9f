"""Compiling ahead in threads, and timing compiled functions side by side: on the host's clock, or by CUPTI."""

import functools
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax

from flash_jax.tuning import timing
from flash_jax.tuning.timing import Timing, first_line

__all__ = ["Timing", "compile_ahead", "first_line", "measure", "why_no_cupti"]


def compile_ahead(
    pool: ThreadPoolExecutor, functions: dict[Any, Callable], arguments: dict[Any, tuple]
) -> dict[Any, Future]:
    """A future of `jit(function)` compiled for its arguments, for each key; XLA compiles outside Python's lock."""

    def build(key):
        return jax.jit(functions[key]).lower(*arguments[key]).compile()

    return {key: pool.submit(build, key) for key in functions}


def measure(
    calls: dict[Any, Callable[[], Any]], samples: int = 7, sample_ms: float = 40.0, timer: str = "host"
) -> dict[Any, Timing | str]:
    """Times each call, interleaved, as `tune` does (see `flash_jax.tuning.timing.measure`).

    With the timer "cupti" calls are `functools.partial`s of compiled functions, and a sample is the time that their
    kernels ran on the GPU.
    """
    return timing.measure(calls, samples, sample_ms, sampler=_TIMERS[timer])


def why_no_cupti() -> str | None:
    """Why there is no timing by CUPTI here, or None."""
    compiled = jax.jit(lambda x: x + 1).lower(jax.ShapeDtypeStruct((128,), "float32")).compile()
    t = measure({0: functools.partial(compiled, jax.numpy.zeros(128))}, 1, 0.0, "cupti")[0]
    return t if isinstance(t, str) else None


def _by_cupti(call, repeats: int) -> float:
    """JAX has no public way to this; where it is, calls it, and fails with the reason where it is not."""
    from jax.experimental.mosaic.gpu import profiler

    n = min(repeats, 10)
    _, ms = profiler.measure(call.func, iterations=n)(*call.args)
    if ms is None:
        raise RuntimeError("CUPTI saw no kernel")
    return sum(ms) / n if isinstance(ms, list) else ms


_TIMERS = {"host": timing.on_host, "cupti": _by_cupti}
