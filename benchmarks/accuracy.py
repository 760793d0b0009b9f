"""Errors of every option over the largest value, ours / plain attention's, and what share of what R20 allows ours is.

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
from typing import NamedTuple

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


class Errors(NamedTuple):
    """The largest of one column: error over the largest value, ours and plain attention's; share of what is allowed."""

    ours: float = 0.0
    plain: float = 0.0
    share: float = 0.0
    worst: str = ""  # the array that the share is of

    def joined(self, other: "Errors") -> "Errors":
        """The larger of each."""
        share, worst = max(self[2:], other[2:])
        return Errors(max(self.ours, other.ours), max(self.plain, other.plain), share, worst)

    def __str__(self) -> str:
        beyond = f" of {self.worst}" if self.share > 1 else ""
        return f"{self.ours:.1e} / {self.plain:.1e} ({100 * self.share:.0f}%{beyond})"


def errors(c: Case, drawn: tuple[dict, dict], implementation: str) -> dict[str, Errors]:
    """{column: errors} of one option: what is static, and shapes."""
    options, shapes = drawn
    program, arrays = values_and_gradients(**options), (c.inputs(**shapes), c.cotangents())
    attend = functools.partial(flash_jax.flash_attention, implementation=implementation)
    found = jax.jit(functools.partial(program, attend))(*arrays)
    names = [jax.tree_util.keystr(path[-1:], simple=True) for path, _ in jax.tree_util.tree_leaves_with_path(found)]
    leaves = [
        [np.asarray(x).astype(np.float64) for x in jax.tree.leaves(t)] for t in (found, *judges(program, *arrays))
    ]
    row: dict[str, Errors] = {}
    for n, (name, x, r, plain) in enumerate(zip(names, *leaves, strict=True)):
        seen, column = np.isfinite(r), COLUMNS[min(n, 5)]
        ours, plains, largest = (float(np.abs(e[seen]).max()) for e in (x - r, plain - r, r))
        own = np.float32 if column == "lse" else jnp.dtype(c.dtype)
        allowed = error_bound(r[seen], plain[seen], own, derivative=n > 1)
        this = Errors(ours / largest, plains / largest, ours / allowed, name)
        row[column] = row.get(column, Errors()).joined(this)
    return row


def main() -> None:
    """Prints the table, in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--implementation", default="xla")
    parser.add_argument("--interpret", action="store_true")
    parser.add_argument("--dtypes", nargs="+", default=["bf16", "f16", "f32"])
    args = parser.parse_args()
    print(f"{args.implementation} on {jax.devices()[0].device_kind}, jax {jax.__version__}\n")
    print(f"| option | dtype | {' | '.join(COLUMNS)} |\n|---|---|{'---|' * len(COLUMNS)}")

    def line(feature, dtype, c, drawn):
        with flash_jax.interpret_mode() if args.interpret else contextlib.nullcontext():
            found = errors(c, drawn, args.implementation)
        cells = [str(found.get(name, "")) for name in COLUMNS]
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
