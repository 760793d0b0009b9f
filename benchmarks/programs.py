"""From a case and a contender to a result: compiled, judged, timed. Whatever a contender raises is its result."""

import functools
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import jax

from benchmarks import judge, timing
from benchmarks.cases import BACKWARD, BOTH, FORWARD, Case
from benchmarks.contenders import SAME_FORWARD, Contender


class Built(NamedTuple):
    """A compiled program, the seconds that tracing and compiling took, and its memory by the compiler's analysis."""

    call: Any
    trace_s: float
    compile_s: float
    temporary_mib: float
    peak_mib: float  # arguments, results and temporary


def program(attend: Callable, kind: str) -> Callable:
    """f((query, key, value, dout), extras) -> out, or (out, (dq, dk, dv))."""

    def forward(arrays, extras):
        return attend(*arrays[:3], extras)

    def both(arrays, extras):
        out, pull = jax.vjp(lambda q, k, v: attend(q, k, v, extras), *arrays[:3])
        return out, pull(arrays[3])

    return forward if kind == FORWARD else both


def build(contender: Contender, case: Case, kind: str) -> Built:
    """Builds a contender for a case and compiles one pass."""
    start = time.perf_counter()
    lowered = jax.jit(program(contender.build(case), kind)).lower(*case.structs())
    traced = time.perf_counter()
    compiled = lowered.compile()
    compiled_s = time.perf_counter() - traced
    return Built(compiled, traced - start, compiled_s, *memory(compiled))


def memory(compiled: Any) -> tuple[float, float]:
    """MiB of (temporary buffers; those with arguments and results) of a compiled program."""
    m = compiled.memory_analysis()
    held = m.argument_size_in_bytes + m.output_size_in_bytes - m.alias_size_in_bytes
    return m.temp_size_in_bytes / 2**20, (held + m.temp_size_in_bytes) / 2**20


Futures = dict[tuple[Case, str], dict[str, Future | str]]


def compile_all(
    pool: ThreadPoolExecutor, cases: list[Case], contenders: list[Contender], passes: tuple[str, ...] = (FORWARD, BOTH)
) -> Futures:
    """For each case and each of these passes what each contender will have compiled, or why it is left out."""
    return {
        (case, kind): {c.name: c.left_out(case, kind) or pool.submit(build, c, case, kind) for c in contenders}
        for case in cases
        for kind in case.passes
        if kind in passes
    }


def wait(futures: Futures, deadline: float) -> None:
    """Waits for all to be compiled; what has not begun at the deadline is given up."""
    waiting = [f for row in futures.values() for f in row.values() if isinstance(f, Future)]
    for future in waiting:
        while not future.done() and time.perf_counter() < deadline:
            time.sleep(0.02)
        if time.perf_counter() >= deadline:
            future.cancel()


Cells = dict[str, dict[str, Any]]


def measure(
    case: Case, futures: Futures, inputs: tuple, exact: judge.Truth, timer: tuple[int, float, str]
) -> dict[str, Cells]:
    """Results of one case, by pass and contender: all calls are judged first, then timed side by side.

    Both passes are in the same rounds, since the backward pass by itself is the difference of the two.
    """
    cells: dict[str, Cells] = {}
    calls: dict[tuple[str, str], Any] = {}
    for kind in (kind for kind in case.passes if (case, kind) in futures):
        cells[kind] = {}
        for name, future in futures[case, kind].items():
            try:
                cells[kind][name], call = judged(case, future, inputs, exact)
                calls |= {(kind, name): call} if call else {}
            except Exception as error:  # noqa: BLE001  (a contender that cannot do it leaves a gap in the table)
                cells[kind][name] = {"failed": timing.first_line(error)}
    for (kind, name), t in timing.measure(calls, *timer).items():
        if isinstance(t, str):
            cells[kind][name] = {"failed": t}
        else:
            cells[kind][name] |= speed(case, kind, t)
    return cells


def judged(case: Case, future: Future | str, inputs: tuple, exact: judge.Truth) -> tuple[dict[str, Any], Any]:
    """(What is known of a contender before it is timed, its call), or (why it is left out, None)."""
    if isinstance(future, str):
        return {"left_out": future}, None
    if future.cancelled():
        return {"left_out": "not compiled in the time that was given"}, None
    built: Built = future.result()
    call = functools.partial(built.call, *inputs)
    error = judge.errors(case, call(), exact)
    cell: dict[str, Any] = {"errors": error, "wrong": judge.wrong(case, error)}
    return cell | {key: round(x, 3) for key, x in built._asdict().items() if key != "call"}, call


def speed(case: Case, kind: str, t: timing.Timing) -> dict[str, float]:
    """Milliseconds with their spread, and what they make of the case's FLOPs and least traffic."""
    found = {"ms": t.median, "low_ms": t.low, "high_ms": t.high, "tflops": case.flops(kind) / t.median / 1e9}
    return found | ({"gb_per_s": case.traffic() / t.median / 1e6} if kind == FORWARD else {})


def backward_of(case: Case, rows: dict[str, Cells]) -> Cells:
    """The backward pass by itself: forward+backward less forward, of each contender that has both."""
    cells: Cells = {}
    for name, both in rows.get(BOTH, {}).items():
        forward = rows[FORWARD].get(SAME_FORWARD.get(name, name), {})
        if "ms" not in both or "ms" not in forward:
            cells[name] = forward if "left_out" in both or "ms" in both else both
            continue
        if both["ms"] <= forward["ms"]:
            cells[name] = {"left_out": "no slower with the backward pass than without: timed too coarsely"}
            continue
        low = max(both["low_ms"] - forward["high_ms"], 1e-6)
        t = timing.Timing(both["ms"] - forward["ms"], low, both["high_ms"] - forward["low_ms"])
        cells[name] = {"wrong": both["wrong"], **speed(case, BACKWARD, t)}
    return cells
