"""Compiling ahead in threads, and timing compiled functions side by side on the host's clock, as `tune` does."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax

from flash_jax.tuning.timing import Timing, first_line, measure

__all__ = ["Timing", "compile_ahead", "first_line", "measure"]


def compile_ahead(
    pool: ThreadPoolExecutor, functions: dict[Any, Callable], arguments: dict[Any, tuple]
) -> dict[Any, Future]:
    """A future of `jit(function)` compiled for its arguments, for each key; XLA compiles outside Python's lock."""

    def build(key):
        return jax.jit(functions[key]).lower(*arguments[key]).compile()

    return {key: pool.submit(build, key) for key in functions}
