"""Compiling ahead in threads, and timing compiled functions side by side on the host's clock."""

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


def measure(calls: dict[Any, Callable[[], Any]], samples: int = 7, sample_ms: float = 40.0) -> dict[Any, Timing | str]:
    """Times each call, interleaved: in each round every call has its turn, so that all see the same clocks and heat.

    A sample is as many back-to-back calls as fill `sample_ms`, then one wait. A call that fails gets the error's first
    line in the place of its timing, and the others go on.
    """
    repeats, found, results = {}, {}, {}
    for key, call in calls.items():
        try:
            repeats[key] = max(1, min(2000, round(sample_ms / max(_first_estimate(call), 1e-3))))
            found[key] = []
        except Exception as error:  # noqa: BLE001  (whatever a contender raises is its result)
            results[key] = first_line(error)
    for _ in range(samples):
        for key in found:
            found[key].append(_sample(calls[key], repeats[key]))
    results |= {key: Timing(statistics.median(x), min(x), max(x)) for key, x in found.items()}
    return results


def first_line(error: BaseException) -> str:
    """The kind of an error and the first line of what it says."""
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0][:160] if text else ''}"


def _first_estimate(call) -> float:
    """Milliseconds of a call after two that warm up."""
    _sample(call, 2)
    return _sample(call, 2)


def _sample(call, repeats: int) -> float:
    start = time.perf_counter()
    result = None
    for _ in range(repeats):
        result = call()
    jax.block_until_ready(result)
    return (time.perf_counter() - start) / repeats * 1e3
