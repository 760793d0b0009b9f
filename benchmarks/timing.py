"""Compiling ahead in threads, and timing compiled functions side by side: on the host's clock, or by CUPTI."""

import functools
import statistics
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import jax


class Timing(NamedTuple):
    """Milliseconds of one call: the median of the samples, and the smallest and the largest."""

    median: float
    low: float
    high: float

    @property
    def spread(self) -> float:
        """(largest - smallest) / median."""
        return (self.high - self.low) / self.median


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
    """Times each call, interleaved: in each round every call has its turn, so that all see the same clocks and heat.

    A sample is as many back-to-back calls as fill `sample_ms`, then one wait; a call that takes a second or more has
    three samples at most. A call that fails gets the error's first line in the place of its timing, and the others go
    on. With the timer "cupti" calls are `functools.partial`s of compiled functions, and a sample is the time that their
    kernels ran on the GPU.
    """
    repeats, found, results = {}, {}, {}
    for key, call in calls.items():
        try:
            ms = _first_estimate(call)
            repeats[key] = max(1, min(2000, round(sample_ms / max(ms, 1e-3))))
            found[key] = [] if ms < 1000 else [None] * max(0, samples - 3)
        except Exception as error:  # noqa: BLE001  (whatever a contender raises is its result)
            results[key] = first_line(error)
    for _ in range(samples):
        for key in [key for key in found if key not in results and len(found[key]) < samples]:
            try:
                found[key].append(_TIMERS[timer](calls[key], repeats[key]))
            except Exception as error:  # noqa: BLE001
                results[key] = first_line(error)
    for key in (key for key in found if key not in results):
        taken = [ms for ms in found[key] if ms is not None]
        results[key] = Timing(statistics.median(taken), min(taken), max(taken))
    return results


def why_no_cupti() -> str | None:
    """Why there is no timing by CUPTI here, or None."""
    compiled = jax.jit(lambda x: x + 1).lower(jax.ShapeDtypeStruct((128,), "float32")).compile()
    t = measure({0: functools.partial(compiled, jax.numpy.zeros(128))}, 1, 0.0, "cupti")[0]
    return t if isinstance(t, str) else None


def first_line(error: BaseException) -> str:
    """The kind of an error and the first line of what it says."""
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0][:160] if text else ''}"


def _first_estimate(call) -> float:
    """Milliseconds of a call after one that warms up, or two of them where they are short."""
    _on_host(call, 1)
    ms = _on_host(call, 1)
    return ms if ms > 20 else _on_host(call, 2)


def _on_host(call, repeats: int) -> float:
    start = time.perf_counter()
    result = None
    for _ in range(repeats):
        result = call()
    jax.block_until_ready(result)
    return (time.perf_counter() - start) / repeats * 1e3


def _by_cupti(call, repeats: int) -> float:
    """JAX has no public way to this; where it is, calls it, and fails with the reason where it is not."""
    from jax.experimental.mosaic.gpu import profiler

    n = min(repeats, 10)
    _, ms = profiler.measure(call.func, iterations=n)(*call.args)
    if ms is None:
        raise RuntimeError("CUPTI saw no kernel")
    return sum(ms) / n if isinstance(ms, list) else ms


_TIMERS = {"host": _on_host, "cupti": _by_cupti}
