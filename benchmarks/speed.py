"""Speed of attention, ours beside others', in one process: forward, and forward with backward.

    python3 -m benchmarks.speed                                      the whole table, about three minutes on an H200
    python3 -m benchmarks.speed --shapes d128-T16k --passes forward
    python3 -m benchmarks.speed --blocks forward=128x64w4s2,dq=64x64w4s2,dkv=64x64w4s3

TFLOP/s count 4*B*H*T*T*D (half if causal) for a forward pass and 3.5 times that with the backward pass. Every number is
the median of interleaved samples of several back-to-back calls, timed on the host's clock. The error of each result is
||x - r|| / ||r|| on the first head of the first example, r being the reference in float64.
"""

import argparse
import functools
import json
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import flash_jax
from benchmarks import timing, workloads
from benchmarks.workloads import Shape

PASSES = ("forward", "forward+backward")
PRODUCT = 8192  # side of the matrix product that is taken for the ceiling


class Row(NamedTuple):
    """One line of the table: a shape, masked or not, one kind of pass."""

    shape: Shape
    causal: bool
    kind: str


def contenders(row: Row, implementation: str, blocks: flash_jax.BlockSizes | None) -> dict[str, Callable]:
    """The functions that compute a row, by name, all of the same arguments."""
    attends = {
        "flash_jax": workloads.ours(implementation, blocks, row.causal),
        "jax.nn cudnn": workloads.cudnn(row.causal),
        "jax pallas b64": workloads.jax_pallas(row.causal, 64),
    }
    if row.kind == "forward":
        return attends
    attends["jax pallas b32"] = workloads.jax_pallas(row.causal, 32)
    return {name: workloads.forward_and_backward(attend) for name, attend in attends.items()}


def reference_of_one_head(causal: bool) -> Callable:
    """f(query, key, value, dout) -> (out, (dq, dk, dv)) in float64, of arrays [1, T, 1, D] in float64."""
    attend = functools.partial(flash_jax.flash_attention, causal=causal, implementation="reference")
    return workloads.forward_and_backward(attend)


def one_head(x: jax.Array) -> np.ndarray:
    """The first example's first head, [1, T, 1, D], as float64."""
    return np.asarray(x[:1, :, :1]).astype(np.float64)


def relative_error(found: jax.Array, expected: np.ndarray) -> float:
    """||found - expected|| / ||expected|| on the first head."""
    return float(np.linalg.norm(one_head(found) - expected) / np.linalg.norm(expected))


def errors(result: Any, expected: Any, kind: str) -> list[float]:
    """Relative errors of out, or of out, dq, dk and dv."""
    if kind == "forward":
        return [relative_error(result, expected[0])]
    return [relative_error(x, r) for x, r in zip(jax.tree.leaves(result), jax.tree.leaves(expected), strict=True)]


def references(shapes: list[Shape], causals: list[bool]) -> dict[tuple[str, bool], Any]:
    """What the float64 reference gives for each shape's first head."""
    found = {}
    for shape in shapes:
        arrays = [one_head(x) for x in shape.inputs()]
        for causal in causals:
            with jax.enable_x64(True):
                result = jax.jit(reference_of_one_head(causal))(*arrays)
            found[shape.name, causal] = jax.tree.map(np.asarray, result)
    return found


def measure_row(row: Row, compiled: dict[str, Any], expected: Any, options: argparse.Namespace) -> dict[str, Any]:
    """Timings and errors of one row."""
    q, k, v, dout = row.shape.inputs()
    arguments = (q, k, v) if row.kind == "forward" else (q, k, v, dout)
    calls, found = {}, {}
    for name, future in compiled.items():
        try:
            calls[name] = functools.partial(future.result(), *arguments)
            found[name] = {"errors": errors(calls[name](), expected, row.kind)}
        except Exception as error:  # noqa: BLE001  (a contender that cannot do it leaves a gap in the table)
            calls.pop(name, None)
            found[name] = {"failed": timing.first_line(error)}
    flops = row.shape.flops(row.causal, row.kind != "forward")
    for name, t in timing.measure(calls, options.samples, options.sample_ms).items():
        if isinstance(t, str):
            found[name] = {"failed": t}
        else:
            found[name] |= {"ms": t.median, "low_ms": t.low, "high_ms": t.high, "tflops": flops / t.median / 1e9}
    return found


def matrix_product(options: argparse.Namespace) -> float:
    """TFLOP/s of a square bfloat16 matrix product."""
    n = PRODUCT // options.shrink
    a, b = (jax.random.normal(jax.random.key(i), (n, n), jnp.bfloat16) for i in range(2))
    product = jax.jit(jnp.matmul).lower(a, b).compile()
    t = timing.measure({"product": lambda: product(a, b)}, options.samples, options.sample_ms)["product"]
    if isinstance(t, str):
        raise SystemExit(t)
    return 2.0 * n**3 / t.median / 1e9


def line(row: Row, found: dict[str, Any]) -> str:
    """A row as text: TFLOP/s (spread), largest error."""
    cells = []
    for name, x in found.items():
        if "failed" in x:
            cells.append(f"{name}: -")
        else:
            spread = 100 * (x["high_ms"] - x["low_ms"]) / x["ms"]
            cells.append(f"{name}: {x['tflops']:5.0f} (+-{spread:.0f}%) err {max(x['errors']):.1e}")
    return f"{row.shape.name:10} {'causal' if row.causal else 'full':6} {row.kind:17} " + "  ".join(cells)


def ratios(found: dict[str, Any]) -> str:
    """Ours against the faster of JAX's Pallas variants and against cuDNN, as times slower (below 1: faster)."""
    ms = {name: x["ms"] for name, x in found.items() if "ms" in x}
    pallas = [t for name, t in ms.items() if name.startswith("jax pallas")]
    if "flash_jax" not in ms:
        return "flash_jax failed"
    parts = [f"{ms['flash_jax'] / min(pallas):.2f}x pallas's time"] if pallas else []
    parts += [f"{ms['flash_jax'] / ms['jax.nn cudnn']:.2f}x cuDNN's time"] if "jax.nn cudnn" in ms else []
    return ", ".join(parts)


def write(report: dict[str, Any], path: Path) -> None:
    """The report as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=1) + "\n")


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=list(workloads.SHAPES))
    parser.add_argument("--passes", nargs="+", choices=PASSES, default=list(PASSES))
    parser.add_argument("--mask", nargs="+", choices=["full", "causal"], default=["full", "causal"])
    parser.add_argument("--blocks", help="our tiles, for example forward=128x64w4s2,dq=64x64w4s2,dkv=64x64w4s3")
    parser.add_argument("--implementation", default="triton")
    parser.add_argument("--samples", type=int, default=7)
    parser.add_argument("--sample-ms", type=float, default=40.0)
    parser.add_argument("--json", type=Path, default=Path("out/speed.json"))
    parser.add_argument("--shrink", type=int, default=1, help="divides all lengths, to try the script on a CPU")
    return parser.parse_args()


def main() -> None:
    """Compiles everything in threads, then measures row by row."""
    options = parse()
    workloads.quiet()
    start = time.perf_counter()
    causals = [mask == "causal" for mask in options.mask]
    shapes = [Shape.of(name, options.shrink) for name in options.shapes]
    rows = [Row(shape, causal, kind) for shape in shapes for causal in causals for kind in options.passes]
    blocks = workloads.parse_blocks(options.blocks)
    report: dict[str, Any] = {"device": jax.devices()[0].device_kind, "jax": jax.__version__, "blocks": options.blocks}
    with ThreadPoolExecutor(workloads.threads()) as pool:
        compiled = {}
        for row in rows:
            functions = contenders(row, options.implementation, blocks)
            struct = jax.ShapeDtypeStruct((row.shape.B, row.shape.T, row.shape.H, row.shape.D), jnp.bfloat16)
            arguments = (struct,) * (3 if row.kind == "forward" else 4)
            compiled[row] = timing.compile_ahead(pool, functions, dict.fromkeys(functions, arguments))
        expected = references(shapes, causals)
    print(f"compiled after {time.perf_counter() - start:.0f} s on {report['device']}", flush=True)
    report["product_tflops_before"] = matrix_product(options)
    report["rows"] = []
    for row in rows:
        found = measure_row(row, compiled[row], expected[row.shape.name, row.causal], options)
        report["rows"].append({"shape": row.shape.name, "causal": row.causal, "pass": row.kind, "found": found})
        print(line(row, found), "|", ratios(found), flush=True)
        for name, x in found.items():
            if "failed" in x:
                print(f"    {name}: {x['failed']}", flush=True)
        write(report, options.json)  # after each row, so that a run that is cut short leaves what it has
    report["product_tflops_after"] = matrix_product(options)
    report["seconds"] = time.perf_counter() - start
    write(report, options.json)
    before, after = report["product_tflops_before"], report["product_tflops_after"]
    print(
        f"{PRODUCT // options.shrink}^3 bf16 product: {before:.0f} and {after:.0f} TFLOP/s; {report['seconds']:.0f} s"
    )


if __name__ == "__main__":
    main()
