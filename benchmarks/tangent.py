"""What forward mode costs: times of a forward pass and of `jax.jvp` of it, and a loss that contains a tangent.

    python3 -m benchmarks.tangent               on an H200 about two minutes
    python3 -m benchmarks.tangent --shrink 32 --implementation xla       to try the script on a CPU

First, for each shape (bfloat16, 16384 tokens, heads times head dim 2048): the forward pass, the value and tangent along
query, key and value at once, and the same of attention by a matrix of scores, which runs where it fits the memory.
Then the gradient of a MeanFlow loss (Geng et al., 2025) at 16384 tokens in one sequence: mean |u - (v - du)|^2, with du
the tangent of a layer's output u along its input. Its target is a constant to the gradient, so that this needs forward,
tangent and backward passes; "through the tangent" is the same without that, a derivative of second order.

Memory is a compiled program's peak by its own analysis, arguments and results included.
"""

import argparse
import functools
import json
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

import flash_jax
from benchmarks import timing, workloads
from benchmarks.workloads import Shape

SHAPES = ("d64-T2k", "d64-T8k", "d64-T16k", "d128-T2k", "d128-T8k", "d128-T16k")
ASKED = 3.5  # times the forward pass, at most
LOSS = "d128-T16k"


def quadratic(q: jax.Array, k: jax.Array, v: jax.Array, causal: bool) -> jax.Array:
    """Attention by a matrix of float32 scores."""
    T = q.shape[-3]
    scores = jnp.einsum("...thd,...shd->...hts", q, k, preferred_element_type=jnp.float32) * q.shape[-1] ** -0.5
    if causal:
        scores = jnp.where(jnp.arange(T)[:, None] >= jnp.arange(T), scores, -jnp.inf)
    return jnp.einsum("...hts,...shd->...thd", jax.nn.softmax(scores).astype(v.dtype), v)


def pushed(attend: Callable) -> Callable:
    """f(q, k, v, dq, dk, dv) -> (out, its tangent)."""
    return lambda *x: jax.jvp(attend, x[:3], x[3:])


def meanflow(attend: Callable, through: bool) -> Callable:
    """f(weights, x, v) -> the gradient of the loss to the weights [3, width, width] of one layer."""

    def loss(weights, x, v):
        def layer(x):
            q, k, value = (jnp.einsum("bthd,hde->bthe", x, w) for w in weights)
            return x + attend(q, k, value)

        u, du = jax.jvp(layer, (x,), (v,))
        target = v - du if through else jax.lax.stop_gradient(v - du)
        return jnp.mean((u - target).astype(jnp.float32) ** 2)

    return jax.grad(loss)


def programs(args: argparse.Namespace) -> tuple[dict[tuple, Callable], dict[tuple, tuple]]:
    """Functions and arguments by (shape, causal, what)."""
    functions: dict[tuple, Callable] = {}
    arguments: dict[tuple, tuple] = {}
    for name in args.shapes:
        q, k, v, dq = Shape.of(name, args.shrink).inputs()
        for causal in (False, True):
            ours = workloads.ours(args.implementation, workloads.parse_blocks(args.blocks), causal)
            plain = functools.partial(quadratic, causal=causal)
            for what, function in (("forward", ours), ("jvp", pushed(ours)), ("quadratic", pushed(plain))):
                if what == "quadratic" and 3 * 4 * q.shape[0] * q.shape[2] * q.shape[1] ** 2 > memory_limit():
                    continue  # three matrices of scores: not worth compiling
                functions[name, causal, what] = function
                arguments[name, causal, what] = (q, k, v) if what == "forward" else (q, k, v, dq, v, k)
    x, v, *_ = Shape.of(args.loss, args.shrink).inputs()
    weights = jax.random.normal(jax.random.key(1), (3, *x.shape[2:], x.shape[-1]), x.dtype) * x.shape[-1] ** -0.5
    ours = functools.partial(flash_jax.flash_attention, implementation=args.implementation)
    for what, through in (("loss", False), ("loss, through the tangent", True)):
        functions[args.loss, False, what] = meanflow(ours, through)
        arguments[args.loss, False, what] = (weights, x, v)
    return functions, arguments


def peak_bytes(compiled: jax.stages.Compiled) -> int:
    """Arguments, results and what is needed besides."""
    found: Any = compiled.memory_analysis()
    return found.argument_size_in_bytes + found.output_size_in_bytes + found.temp_size_in_bytes


def fitting(built: dict[tuple, Future], arguments: dict[tuple, tuple], limit: float) -> tuple[dict, dict, dict]:
    """(calls that need at most `limit` bytes, peak bytes of all that compile, {key: why it does not run})."""
    calls, peaks, refused = {}, {}, {}
    for key, future in built.items():
        try:
            compiled = future.result()
        except Exception as error:  # noqa: BLE001  (whatever a contender raises is its result)
            refused[key] = timing.first_line(error)
            continue
        peaks[key] = peak_bytes(compiled)
        if peaks[key] <= limit:
            calls[key] = functools.partial(compiled, *arguments[key])
        else:
            refused[key] = "does not fit"
    return calls, peaks, refused


def memory_limit() -> float:
    """Bytes that a program may need here."""
    stats = jax.devices()[0].memory_stats() or {}
    return 0.8 * stats.get("bytes_limit", 16 << 30)


def print_table(found: dict[tuple, Any], peaks: dict[tuple, int], args: argparse.Namespace) -> None:
    """A line for each shape, and for each loss."""

    def cell(key):
        t = found.get(key, "does not fit")
        time = f"{t.median:9.3f} ms" if isinstance(t, timing.Timing) else f"{str(t)[:40]:>12}"
        return f"{time} {peaks.get(key, 0) / 2**20:8.0f} MiB"

    for name in args.shapes:
        for causal in (False, True):
            forward, jvp = (found.get((name, causal, what)) for what in ("forward", "jvp"))
            both = isinstance(forward, timing.Timing) and isinstance(jvp, timing.Timing)
            ratio = f"{jvp.median / forward.median:5.2f}x" if both else ""  # pyright: ignore
            cells = "   ".join(f"{what} {cell((name, causal, what))}" for what in ("forward", "jvp", "quadratic"))
            print(f"{name:10} {'causal' if causal else 'full':6} {cells}   jvp / forward {ratio} (asked: {ASKED})")
    for what in ("loss", "loss, through the tangent"):
        print(f"{args.loss:10} gradient of the {what}: {cell((args.loss, False, what))}", flush=True)


def main() -> None:
    """Prints the table and writes it as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--implementation", default="triton")
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES))
    parser.add_argument("--loss", default=LOSS, help="the shape of the loss's layer")
    parser.add_argument("--blocks", help="tiles, such as tangent=64x64w4s3; what is left out is the table's")
    parser.add_argument("--samples", type=int, default=5)
    parser.add_argument("--sample-ms", type=float, default=30.0)
    parser.add_argument("--shrink", type=int, default=1)
    parser.add_argument("--json", type=Path, default=Path("out/tangent.json"))
    args = parser.parse_args()
    workloads.quiet()
    functions, arguments = programs(args)
    with ThreadPoolExecutor(workloads.threads()) as pool:
        built = timing.compile_ahead(pool, functions, arguments)
        calls, peaks, found = fitting(built, arguments, memory_limit())
    found |= timing.measure(calls, args.samples, args.sample_ms)
    print_table(found, peaks, args)
    report: dict = {"device": jax.devices()[0].device_kind, "jax": jax.__version__, "calls": []}
    for (name, causal, what), t in found.items():
        given = t._asdict() if isinstance(t, timing.Timing) else {"error": t}
        peak = peaks.get((name, causal, what))
        report["calls"].append({"shape": name, "causal": causal, "what": what, "peak_bytes": peak, **given})
    args.json.parent.mkdir(parents=True, exist_ok=True)
    args.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
