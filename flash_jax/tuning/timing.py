"""Timing compiled functions side by side on the host's clock."""

import math
import random
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

_FEWEST = 3  # samples that are taken however late it is


class Timing(NamedTuple):
    """Milliseconds of one call: the median of the samples, the smallest and the largest, and how far they lie apart.

    `deviation` is the median of the samples' distances to their median, which single outliers do not change.
    """

    median: float
    low: float
    high: float
    deviation: float = 0.0

    @classmethod
    def of(cls, samples: list[float]) -> "Timing":
        """The timing that so many samples make."""
        median = statistics.median(samples)
        return cls(median, min(samples), max(samples), statistics.median(abs(x - median) for x in samples))

    @property
    def spread(self) -> float:
        """(largest - smallest) / median."""
        return (self.high - self.low) / self.median


def measure(
    calls: dict[Any, Callable[[], Any]],
    samples: int = 7,
    sample_ms: float = 40.0,
    until: float = math.inf,
    sampler: Callable[[Callable[[], Any], int], float] | None = None,
) -> dict[Any, Timing | str]:
    """Times each call, interleaved: in each round every call has its turn, so that all see the same clocks and heat.

    Rounds differ in their order: a GPU clocks lower for a while after what has drawn much power, so that what always
    came after one and the same call would be timed some percent too slow or too fast.

    A sample is as many back-to-back calls as fill `sample_ms`, then one wait; a call that takes a second or more has
    three samples at most. Past `until`, by `time.perf_counter`, there are only as many rounds as a median needs. A call
    that fails gets the error's first line in the place of its timing, and the others go on. `sampler(call, repeats)`
    gives the milliseconds of one of so many calls, by default on the host's clock.
    """
    sampler = sampler or on_host
    repeats, found, results = {}, {}, {}
    for key, call in calls.items():
        try:
            ms = _first_estimate(call)
            repeats[key] = max(1, min(2000, round(sample_ms / max(ms, 1e-3))))
            found[key] = [] if ms < 1000 else [None] * max(0, samples - _FEWEST)
        except Exception as error:  # noqa: BLE001  (whatever a contender raises is its result)
            results[key] = first_line(error)
    for taken in range(samples):
        if taken >= _FEWEST and time.perf_counter() > until:
            break
        turns = [key for key in found if key not in results and len(found[key]) < samples]
        random.Random(taken).shuffle(turns)
        for key in turns:
            try:
                found[key].append(sampler(calls[key], repeats[key]))
            except Exception as error:  # noqa: BLE001
                results[key] = first_line(error)
    done = {key: [ms for ms in found[key] if ms is not None] for key in found if key not in results}
    return results | {key: Timing.of(taken) for key, taken in done.items()}


def first_line(error: BaseException) -> str:
    """The kind of an error and the first line of what it says."""
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0][:160] if text else ''}"


def _first_estimate(call) -> float:
    """Milliseconds of a call after one that warms up, or of two of them where they are short."""
    on_host(call, 1)
    ms = on_host(call, 1)
    return ms if ms > 20 else on_host(call, 2)


def on_host(call: Callable[[], Any], repeats: int) -> float:
    """Milliseconds of one of `repeats` calls, on the host's clock."""
    start = time.perf_counter()
    result = None
    for _ in range(repeats):
        result = call()
    jax.block_until_ready(result)
    return (time.perf_counter() - start) / repeats * 1e3
