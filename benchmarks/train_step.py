"""One training step of a GPT with attention swapped: TFLOP/s, tokens per second, and the losses of the first steps.

    python3 -m benchmarks.train_step                        1.3B weights at T = 2048 and 8192, on an H200
    python3 -m benchmarks.train_step --contenders flash_jax cudnn --lengths 2048
    python3 -m benchmarks.train_step --layers 2 --dim 64 --heads 2 --lengths 64 --tokens 256 --vocabulary 512 \\
        --implementation xla                                on a CPU, to try the script

The model is gpt.py's: 16384 tokens a step, AdamW, parameters in float32, computation in bfloat16, no rematerialisation;
it is the same for all, but for the function that attends. FLOPs are the FlashAttention-2 paper's: 6 * T * weights +
12 * layers * hidden * T^2 a sequence. Two whole models do not fit beside each other, so contenders take turns, each of
some rounds beginning with the same parameters; a time is the median over the steps of all rounds, on the host's clock.
The losses before the first step and before the last are printed, on one random batch that is trained on again and
again; contenders any of whose losses is off by more than 1% of the median of all contenders' are marked.
"""

import argparse
import functools
import statistics
import sys
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks import contenders, gpt, machine, programs, report, timing, workloads
from benchmarks.cases import BOTH, Case
from benchmarks.gpt import GPT

WARM = 2  # first steps of a round, which are not timed
OFF = 0.01  # of a loss
KEPT_GIB = 16  # of softmax weights, over all layers; with 24 GiB (T = 2048) a step has been seen to run out of memory
SKIPPED = ("flash_jax tf32", "jax pallas b32")  # other precision, other tiles: no contenders of a whole step


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--dim", type=int, default=2048)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--vocabulary", type=int, default=gpt.VOCABULARY)
    parser.add_argument("--lengths", type=int, nargs="+", default=[2048, 8192])
    parser.add_argument("--tokens", type=int, default=16384, help="of a step")
    parser.add_argument("--steps", type=int, default=8, help="of a round")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--contenders", nargs="+", metavar="TEXT", help="only those with one of these in their names")
    parser.add_argument("--implementation", default="triton", help="of ours")
    parser.add_argument("--seconds", type=float, default=3600.0, help="rounds that would begin later are left out")
    parser.add_argument("--json", type=Path, default=Path("out/step.json"))
    options = parser.parse_args(arguments)
    if options.steps <= WARM:
        parser.error(f"--steps counts {WARM} that are not timed")
    return options


def case_of(model: GPT) -> Case:
    """The attention of one layer."""
    sizes: dict[str, Any] = {"B": model.batch, "T": model.length, "S": model.length, "H": model.heads, "K": model.heads}
    return Case(f"layer-T{model.length}", "step", **sizes, D=model.head_dim, Dv=model.head_dim, causal=True)


def left_out(contender: contenders.Contender, model: GPT) -> str | None:
    """Why a contender is left out of a model, or None."""
    case = case_of(model)
    kept = case.score_bytes() / 2 * model.layers / 2**30  # in bfloat16, for the backward pass
    if contender.name == "jax.nn xla" and kept > KEPT_GIB:
        return f"softmax weights of all layers, {kept:.0f} GiB"
    return contender.left_out(case, BOTH)


def build(contender: contenders.Contender, model: GPT) -> programs.Built:
    """A step with this attention, compiled; the state is donated."""
    begin = time.perf_counter()
    one = functools.partial(gpt.step, attend=contender.build(case_of(model)))
    state, data = jax.eval_shape(functools.partial(gpt.start, model)), jax.eval_shape(model.data)
    lowered = jax.jit(one, donate_argnums=0).lower(state, data)
    traced = time.perf_counter()
    compiled = lowered.compile()
    return programs.Built(compiled, traced - begin, time.perf_counter() - traced, *programs.memory(compiled))


def one_round(call: Any, start: Any, data: jax.Array, steps: int) -> tuple[list[float], list[float]]:
    """(seconds of each timed step, loss of each step); every step is waited for."""
    state, seconds, losses = start(), [], []
    jax.block_until_ready(state)
    for number in range(steps):
        begin = time.perf_counter()
        state, loss = call(state, data)
        losses.append(float(loss))
        jax.block_until_ready(state)
        if number >= WARM:
            seconds.append(time.perf_counter() - begin)
    return seconds, losses


def measure(model: GPT, futures: dict[str, Future | str], options: argparse.Namespace, end: float) -> dict[str, Any]:
    """{contender: result} of one length: in each round every contender has its turn."""
    start, data = jax.jit(functools.partial(gpt.start, model)), model.data()
    cells: dict[str, Any] = {n: {"left_out": f} for n, f in futures.items() if isinstance(f, str)}
    seconds: dict[str, list[float]] = {}
    for _ in range(options.rounds):
        for name, future in futures.items():
            if isinstance(future, str) or "failed" in cells.get(name, {}) or time.perf_counter() > end:
                continue
            try:
                built = future.result()
                taken, losses = one_round(built.call, start, data, options.steps)
            except Exception as error:  # noqa: BLE001  (its result)
                cells[name] = {"failed": timing.first_line(error)}
                continue
            seconds.setdefault(name, []).extend(taken)
            figures = {key: round(x, 3) for key, x in built._asdict().items() if key != "call"}
            cells[name] = {"losses": losses, **figures, **speed(model, seconds[name])}
    for name in futures:
        cells.setdefault(name, {"left_out": "not reached in time"})
    mark(cells)
    return {name: cells[name] for name in futures}


def speed(model: GPT, seconds: list[float]) -> dict[str, float]:
    """What the times of its steps make of a model."""
    middle = statistics.median(seconds)
    found = {"ms": middle * 1e3, "low_ms": min(seconds) * 1e3, "high_ms": max(seconds) * 1e3}
    tokens = model.batch * model.length
    return found | {"tflops": model.flops() / middle / 1e12, "tokens_per_second": tokens / middle}


def mark(cells: dict[str, Any]) -> None:
    """Marks as wrong what has other losses than the median of all that have any; NaN is wrong."""
    losses = [cell["losses"] for cell in cells.values() if "losses" in cell]
    expected = np.nanmedian(losses, axis=0) if losses else []
    for cell in (x for x in cells.values() if "losses" in x):
        near = [abs(a - b) <= OFF * abs(b) for a, b in zip(cell["losses"], expected, strict=True)]
        cell["wrong"] = not all(near)


def line(name: str, cell: dict[str, Any], ceiling: float) -> str:
    """A contender's result as text."""
    if "ms" not in cell:
        return (
            f"    {name:20} {'left out' if 'left_out' in cell else 'failed'} ({cell.get('left_out') or cell['failed']})"
        )
    spread = 100 * (cell["high_ms"] - cell["low_ms"]) / cell["ms"]
    return (
        f"    {name:20} {cell['ms']:9.2f} ms (spread {spread:2.0f}%) {cell['tflops']:7.4g} TFLOP/s "
        f"({100 * cell['tflops'] / ceiling:3.0f}% of the product) {cell['tokens_per_second']:11,.0f} tokens/s   "
        f"loss {cell['losses'][0]:.4f} -> {cell['losses'][-1]:.4f}{'  ANOTHER LOSS' if cell['wrong'] else ''}   "
        f"peak {cell['peak_mib'] / 1024:.1f} GiB   traced {cell['trace_s']:.0f} s, compiled {cell['compile_s']:.0f} s"
    )


def main(arguments: list[str] | None = None) -> int:
    """Compiles every step in threads, then measures length by length; 1 if ours fails or has another loss."""
    options = parse(arguments)
    workloads.quiet()
    begin = time.perf_counter()
    who = [c for c in contenders.registry(options.implementation) if c.name not in SKIPPED]
    who = [c for c in who if not options.contenders or any(text in c.name for text in options.contenders)]
    sizes = (options.layers, options.dim, options.heads)
    models = [GPT(*sizes, T, max(1, options.tokens // T), options.vocabulary) for T in options.lengths]
    found: dict[str, Any] = {
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "timer": "host",
        "rows": [],
    }
    found["versions"] = {c.name: c.version() for c in who if not left_out(c, models[0])}
    with ThreadPoolExecutor(workloads.threads()) as pool:
        futures = {m: {c.name: left_out(c, m) or pool.submit(build, c, m) for c in who} for m in models}
    print(f"compiled after {time.perf_counter() - begin:.0f} s on {found['device']}", flush=True)
    found["ceilings_before"] = machine.ceilings(1 if jax.default_backend() == "gpu" else 64, (5, 40.0, "host"))
    ceiling = found["ceilings_before"]["product_tflops"]
    for model in models:
        cells = measure(model, futures[model], options, begin + options.seconds)
        shape = {"layers": model.layers, "dim": model.dim, "heads": model.heads, "length": model.length}
        shape |= {"batch": model.batch, "vocabulary": model.vocabulary, "weights": model.weights()}
        name = f"gpt-{model.weights()}-T{model.length}"
        found["rows"].append({"case": name, "suite": "step", "pass": "step", "shape": shape, "cells": cells})
        print(f"{model.weights():,} weights, {model.batch} x {model.length} tokens", flush=True)
        print("\n".join(line(name, cell, ceiling) for name, cell in cells.items()), flush=True)
        report.write(found, options.json)
    print(f"bf16 product {ceiling:.3g} TFLOP/s; {time.perf_counter() - begin:.0f} s; {options.json}")
    return int(bool(report.faults(found["rows"])))


if __name__ == "__main__":
    sys.exit(main())
