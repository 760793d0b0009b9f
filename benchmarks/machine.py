"""What the machine itself does, in the same process: a matrix product, a copy, and what a small call costs the host."""

import functools
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks import timing
from benchmarks.cases import Case
from benchmarks.contenders import Contender

PRODUCT = 8192  # side of the matrix product that is taken for the ceiling
COPIED = 2**30  # bytes


def ceilings(shrink: int, timer: tuple[int, float, str]) -> dict[str, float]:
    """TFLOP/s of a square bfloat16 product, and GB/s of a pass that reads and writes an array once."""
    n, size = max(8, PRODUCT // shrink), COPIED // shrink**2 // 2
    a, b = (jax.random.normal(jax.random.key(i), (n, n), jnp.bfloat16) for i in range(2))
    x = jnp.zeros((size,), jnp.bfloat16)
    calls = {
        "product_tflops": functools.partial(jax.jit(jnp.matmul).lower(a, b).compile(), a, b),
        "copy_gb_per_s": functools.partial(jax.jit(jnp.negative).lower(x).compile(), x),
    }
    work = {"product_tflops": 2.0 * n**3 / 1e9, "copy_gb_per_s": 4.0 * size / 1e6}
    found = timing.measure(calls, *timer)
    for t in found.values():
        if isinstance(t, str):
            raise SystemExit(t)
    return {name: work[name] / t.median for name, t in found.items() if isinstance(t, timing.Timing)}


SMALL = Case("small", "overhead", 1, 128, 128, 2, 2, 64, 64)


def overhead(contenders: list[Contender], samples: int = 5, calls: int = 50) -> dict[str, dict[str, Any]]:
    """Microseconds that the host spends on a call of 128 tokens, 2 heads of 64: outside jit, and under it.

    The clock stops when the last of the calls has been issued: what the device still does is not waited for.
    """
    arrays, extras = SMALL.inputs()
    found: dict[str, dict[str, Any]] = {}
    for contender in contenders:
        if contender.left_out(SMALL, "forward"):
            continue
        try:
            attend = contender.build(SMALL)
            found[contender.name] = {
                key: _issue(lambda f=f: f(*arrays[:3], extras), samples, calls)
                for key, f in {"eager_us": attend, "jit_us": jax.jit(attend)}.items()
            }
        except Exception as error:  # noqa: BLE001  (its result)
            found[contender.name] = {"failed": timing.first_line(error)}
    return found


def _issue(call: Callable, samples: int, calls: int) -> float:
    """Median microseconds of issuing a call."""
    jax.block_until_ready(call())
    taken = []
    for _ in range(samples):
        start = time.perf_counter()
        results = [call() for _ in range(calls)]
        taken.append((time.perf_counter() - start) / calls * 1e6)
        jax.block_until_ready(results)
    return statistics.median(taken)
