"""Errors of every option, measured: largest error of a result over its largest value, and over what rule R20 allows.

    python3 -m benchmarks.accuracy --implementation xla                  anywhere
    python3 -m benchmarks.accuracy --implementation triton               on an NVIDIA GPU
    python3 -m benchmarks.accuracy --implementation triton --interpret   its kernels in interpret mode, slowly

The true values are those of the reference in float64 on the same rounded inputs. Standard-normal inputs, 2 examples,
T = 190, S = 210, 4 query heads, 2 key/value heads, head dim 64. "others" are the gradients of scale, bias, slopes and
sinks.
"""

import argparse
import contextlib
import functools
import itertools
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np

import flash_jax
from benchmarks import workloads
from tests.gpu.test_features import FEATURES
from tests.support.accuracy import error_bound, judges
from tests.support.cases import Case, case
from tests.support.programs import values_and_gradients

SIZES = "B2-T190-S210-H4-K2-D64"
COLUMNS = ("out", "lse", "dq", "dk", "dv", "others")


def errors(c: Case, drawn: tuple[dict, dict], implementation: str) -> dict[str, tuple[float, float, str]]:
    """{column: (relative error, share of what is allowed, array)} of one option: what is static, and shapes."""
    options, shapes = drawn
    program, arrays = values_and_gradients(**options), (c.inputs(**shapes), c.cotangents())
    attend = functools.partial(flash_jax.flash_attention, implementation=implementation)
    found = jax.jit(functools.partial(program, attend))(*arrays)
    names = [jax.tree_util.keystr(path[-1:], simple=True) for path, _ in jax.tree_util.tree_leaves_with_path(found)]
    leaves = [
        [np.asarray(x).astype(np.float64) for x in jax.tree.leaves(t)] for t in (found, *judges(program, *arrays))
    ]
    row: dict[str, tuple[float, float, str]] = {}
    for n, (name, x, r, plain) in enumerate(zip(names, *leaves, strict=True)):
        seen, column = np.isfinite(r), COLUMNS[min(n, 5)]
        error, largest = np.abs(x[seen] - r[seen]).max(), np.abs(r[seen]).max()
        own = np.float32 if column == "lse" else jnp.dtype(c.dtype)
        allowed = error_bound(r[seen], plain[seen], own, derivative=n > 1)
        most, share, worst = row.get(column, (0.0, 0.0, ""))
        share, worst = max((share, worst), (float(error / allowed), name))
        row[column] = max(most, float(error / largest)), share, worst
    return row


def cell(error: float, share: float, name: str) -> str:
    """Both numbers, and where the second is too large the array that it is of."""
    return f"{error:.1e} ({100 * share:.0f}%{f' of {name}' if share > 1 else ''})"


def main() -> None:
    """Prints the table, in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--implementation", default="xla")
    parser.add_argument("--interpret", action="store_true")
    parser.add_argument("--dtypes", nargs="+", default=["bf16", "f32"])
    args = parser.parse_args()
    print(f"{args.implementation} on {jax.devices()[0].device_kind}, jax {jax.__version__}\n")
    print(f"| option | dtype | {' | '.join(COLUMNS)} |\n|---|---|{'---|' * len(COLUMNS)}")

    def line(feature, dtype, c, drawn):
        with flash_jax.interpret_mode() if args.interpret else contextlib.nullcontext():
            found = errors(c, drawn, args.implementation)
        cells = [cell(*found[name]) if name in found else "" for name in COLUMNS]
        return f"| {feature} | {dtype} | {' | '.join(cells)} |"

    options = {"none": lambda _: ({}, {}), **FEATURES}
    lines = []
    with ThreadPoolExecutor(workloads.threads()) as pool:  # compiling takes most of the time
        for feature, dtype in itertools.product(options, args.dtypes):
            c = case(f"{SIZES}-{dtype}")
            lines.append(pool.submit(line, feature, dtype, c, options[feature](c)))  # drawn here, in this order
        for found in lines:
            print(found.result(), flush=True)


if __name__ == "__main__":
    main()
