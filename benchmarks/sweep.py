"""Which tiles are fast: times candidates for the forward, dq, dk/dv, tangent and dbias kernels, each alone.

    python3 -m benchmarks.sweep --seconds 330                          everything, the likeliest first
    python3 -m benchmarks.sweep --passes dkv --shapes d128-T16k --stages 2 3
    python3 -m benchmarks.sweep --option none softcap --shapes d128-T8k --mask full --short    few tiles, with options

Candidates compile in threads while others are timed; one that does not compile or launch is counted and passed over. At
the end the five fastest of each group and the table's own tile are timed again, interleaved, and printed fastest first.
A tile is written 128x64w8s3: 128 query rows, 64 keys, 8 warps, 3 stages.
"""

import argparse
import dataclasses
import functools
import itertools
import json
import re
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import timing, workloads
from benchmarks.cases import packed
from benchmarks.workloads import Shape
from flash_jax import BlockSizes, triton
from flash_jax.spec import AttentionSpec, Operands
from flash_jax.tiles import dropout
from flash_jax.triton import tiling
from flash_jax.triton.tiling import Tile
from flash_jax.tuning.candidates import distance, name_of, registers

FINALISTS = 5
OPTIONS = ("none", "softcap", "dropout", "bias", "row bias", "mask", "alibi", "scale", "segments")
PASSES = (*tiling.PASSES, "dbias")

# What `--short` tries besides the table's own: a tile with fewer registers a thread, a wider one, more stages.
_SHORT = {
    "forward": "128x64w4s2 128x64w8s2 128x64w8s3 64x64w4s2 64x64w4s3 64x128w4s2 128x128w8s2 128x128w8s3 128x32w4s3",
    "dq": "64x64w4s2 64x64w4s3 128x64w8s2 64x128w8s2 128x32w8s2 64x32w4s2 128x64w8s1",
    "dkv": "64x64w4s2 64x64w8s2 64x64w8s3 64x128w8s2 32x64w4s2 32x128w8s2 32x64w4s3",
    "tangent": "64x64w4s2 64x64w4s3 128x64w4s2 128x64w8s2 128x32w4s3 64x32w4s2 128x32w8s2 64x64w4s1 128x128w8s2",
    "dbias": "64x64w4s2 64x64w4s1 128x64w8s1 128x64w8s2 128x128w8s1 64x64w8s1 64x128w8s1",
}


class Group(NamedTuple):
    """Candidates that compete with each other: one pass on one shape."""

    shape: Shape
    causal: bool
    kind: str  # one of PASSES
    option: str = "none"

    def __str__(self) -> str:
        option = "" if self.option == "none" else f" {self.option}"
        return f"{self.shape.name} {'causal' if self.causal else 'full'}{option} {self.kind}"


class Screened(NamedTuple):
    """Milliseconds of each candidate of a group, and why others failed."""

    ms: dict[Tile, float]
    failed: dict[str, str]


def function(group: Group, tile: Tile | None, interpret: bool):
    """The pass alone: f(q, k, v, operands) -> (out, lse), or f(q, k, v, operands, out, lse, dout) -> gradients.

    The tangent pass is given dout, the value and the key in the place of tangents of query, key and value.
    """
    sizes = None if tile is None else BlockSizes(**dataclasses.asdict(tile))
    spec = spec_of(group, sizes, interpret)
    triton.check_block_sizes(spec)
    if group.kind == "forward":
        return lambda q, k, v, operands: triton.forward(q, k, v, operands, spec)
    if group.kind == "tangent":

        def tangent(q, k, v, operands, out, lse, dout):
            return triton.tangent((q, k, v, operands), out, lse, {"query": dout, "key": v, "value": k}, spec)

        return tangent
    wanted: dict = {"dq": {"query": (group.shape.B,)}, "dbias": {"bias": (1,)}}.get(
        group.kind, dict.fromkeys(("key", "value"), (group.shape.B,))
    )

    def backward(q, k, v, operands, out, lse, dout):
        return triton.backward((q, k, v, operands), out, lse, dout, None, wanted, spec)

    return backward


def spec_of(group: Group, sizes: BlockSizes | None = None, interpret: bool = False) -> AttentionSpec:
    """The static choices of a group's calls."""
    return AttentionSpec(
        scale=None if group.option == "scale" else group.shape.D**-0.5,
        causal=group.causal,
        softcap=30.0 if group.option == "softcap" else None,
        dropout_rate=0.1 if group.option == "dropout" else 0.0,
        implementation="triton",
        block_sizes=sizes,
        interpret=interpret,
    )


def operands_of(group: Group) -> Operands:
    """The arrays of a group's option."""
    B, T, H = group.shape.B, group.shape.T, group.shape.H
    make = {
        "dropout": lambda: Operands(dropout_words=dropout.head_words(jax.random.key(3), (B,), H)),
        "bias": lambda: Operands(bias=jax.random.normal(jax.random.key(1), (1, H, T, T), jnp.bfloat16)),
        "row bias": lambda: Operands(bias=jax.random.normal(jax.random.key(1), (1, 1, 1, T), jnp.bfloat16)),
        "mask": lambda: Operands(mask=jax.random.bernoulli(jax.random.key(2), 0.9, (1, 1, T, T))),
        "alibi": lambda: Operands(alibi_slopes=jnp.linspace(0.1, 0.5, H)[None]),
        "scale": lambda: Operands(scale=jnp.full((1,), group.shape.D**-0.5)),
        "segments": lambda: _segments(packed(T)),
    }
    return make.get(group.option, Operands)()


def _segments(ids: np.ndarray) -> Operands:
    return Operands(q_segment_ids=jnp.asarray(ids), kv_segment_ids=jnp.asarray(ids))


def structs(group: Group) -> tuple:
    """Shapes and dtypes of the arguments."""
    s = group.shape
    x = jax.ShapeDtypeStruct((s.B, s.T, s.H, s.D), jnp.bfloat16)
    lse = jax.ShapeDtypeStruct((s.B, s.H, s.T), jnp.float32)
    operands = jax.eval_shape(lambda: operands_of(group))
    return (x, x, x, operands) if group.kind == "forward" else (x, x, x, operands, x, lse, x)


@functools.cache
def arrays(group: Group, interpret: bool) -> tuple:
    """q, k, v, operands, out, lse, dout of a forward group, of which out and lse are the forward pass's."""
    q, k, v, dout = group.shape.inputs()
    operands = operands_of(group)
    out, lse = jax.jit(function(group, None, interpret))(q, k, v, operands)
    return q, k, v, operands, out, lse, dout


def table_tile(group: Group) -> Tile:
    """What the package's own table gives."""
    q, k, v, operands = structs(group)[:4]
    return tiling.tile_for(group.kind, spec_of(group), q, k, v, operands)


def _row_of(group: Group) -> str:
    """The pass by which the table knows the group's."""
    return "dq" if group.kind == "dbias" else group.kind


def parsed(name: str) -> Tile:
    """The tile written 128x64w8s3."""
    return Tile(*map(int, re.split("[xws]", name)))


def candidates(group: Group, options: argparse.Namespace) -> list[Tile]:
    """All combinations that fit the shared memory and are not hopeless, likeliest first, the table's own before all."""
    own = table_tile(group)
    if options.short:
        return [own, *(x for x in map(parsed, _SHORT[group.kind].split()) if x != own)]
    found, widths = [], (group.shape.D, group.shape.D)
    for numbers in itertools.product(options.block_q, options.block_kv, options.warps, options.stages):
        tile = Tile(*numbers)
        shared = tiling.shared_bytes(_row_of(group), tile, widths, 2)
        if shared <= options.shared_kib * 1024 and registers(group.kind, tile, widths, 2) <= options.registers:
            found.append(tile)
    found.sort(key=lambda x: distance(x, own))
    return [own, *(x for x in found if x != own)]


def submit_all(
    pool: ThreadPoolExecutor, groups: list[Group], options: argparse.Namespace, interpret: bool
) -> dict[Group, dict[Tile, Future]]:
    """Futures of compiled candidates: the first of each group, then the second of each, ..."""
    lists = {group: candidates(group, options)[: options.most] for group in groups}
    futures: dict[Group, dict[Tile, Future]] = {group: {} for group in groups}
    for rank in range(max(map(len, lists.values()))):
        for group in groups:
            if rank < len(lists[group]):
                tile = lists[group][rank]
                build = functools.partial(_build, group, tile, interpret)
                futures[group][tile] = pool.submit(build)
    return futures


def _build(group: Group, tile: Tile, interpret: bool):
    return jax.jit(function(group, tile, interpret)).lower(*structs(group)).compile()


def call_of(group: Group, compiled: Any, interpret: bool):
    """The compiled candidate with its arguments."""
    values = arrays(group._replace(kind="forward"), interpret)
    return functools.partial(compiled, *values[: len(structs(group))])


def screen(futures: dict[Group, dict[Tile, Future]], deadline: float, interpret: bool) -> dict[Group, Screened]:
    """Times each candidate by few samples as soon as it is compiled, until the deadline."""
    found = {group: Screened({}, {}) for group in futures}
    left = [(group, tile) for group in futures for tile in futures[group]]
    while left and time.perf_counter() < deadline:
        ready = [key for key in left if futures[key[0]][key[1]].done()]
        if not ready:
            time.sleep(0.02)
        for group, tile in ready:
            left.remove((group, tile))
            try:
                call = call_of(group, futures[group][tile].result(), interpret)
                t = timing.measure({0: call}, samples=3, sample_ms=10)[0]
            except Exception as error:  # noqa: BLE001  (a tile that does not compile is passed over)
                t = timing.first_line(error)
            if isinstance(t, str):
                found[group].failed[name_of(tile)] = t
            else:
                found[group].ms[tile] = t.low
            if time.perf_counter() > deadline:
                break
    return found


def final(group: Group, times: dict[Tile, float], futures: dict[Tile, Future], interpret: bool) -> dict[str, float]:
    """Milliseconds of the fastest candidates and of the table's tile, interleaved."""
    fastest = sorted(times, key=times.__getitem__)[:FINALISTS]
    own = table_tile(group)
    if own in times and own not in fastest:
        fastest.append(own)
    calls = {name_of(x): call_of(group, futures[x].result(), interpret) for x in fastest}
    measured = timing.measure(calls, samples=5, sample_ms=20)
    found = {name: t.median for name, t in measured.items() if not isinstance(t, str)}
    return dict(sorted(found.items(), key=lambda item: item[1]))


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=["d128-T16k", "d64-T16k", "d256-T4k"])
    parser.add_argument("--mask", nargs="+", choices=["full", "causal"], default=["causal", "full"])
    parser.add_argument("--passes", nargs="+", choices=PASSES, default=list(PASSES), help="dbias: with `bias` alone")
    parser.add_argument("--option", nargs="+", choices=OPTIONS, default=["none"], help="what the calls ask for besides")
    parser.add_argument("--short", action="store_true", help="a few chosen tiles of each pass, in the place of all")
    parser.add_argument("--block-q", nargs="+", type=int, default=[32, 64, 128])
    parser.add_argument("--block-kv", nargs="+", type=int, default=[32, 64, 128])
    parser.add_argument("--warps", nargs="+", type=int, default=[4, 8])
    parser.add_argument("--stages", nargs="+", type=int, default=[1, 2, 3, 4])
    parser.add_argument("--shared-kib", type=int, default=227)
    parser.add_argument(
        "--registers", type=float, default=260.0, help="accumulators a thread, above which none is tried"
    )
    parser.add_argument("--most", type=int, default=40, help="candidates a group")
    parser.add_argument("--seconds", type=float, default=330.0)
    parser.add_argument("--json", type=Path, default=Path("out/sweep.json"))
    parser.add_argument("--shrink", type=int, default=1, help="divides all lengths, to try the script on a CPU")
    return parser.parse_args()


def main() -> None:
    """Screens all groups within the time given, then measures the best of each again."""
    options = parse()
    workloads.quiet()
    interpret = jax.default_backend() == "cpu"
    deadline = time.perf_counter() + options.seconds
    groups = [
        Group(Shape.of(name, options.shrink), mask == "causal", kind, option)
        for name in options.shapes
        for mask in options.mask
        for option in options.option
        for kind in options.passes
        if kind != "dbias" or option == "bias"
    ]
    report: dict[str, Any] = {"device": jax.devices()[0].device_kind, "jax": jax.__version__, "groups": {}}
    pool = ThreadPoolExecutor(workloads.threads())
    futures = submit_all(pool, groups, options, interpret)
    reserve = 2.5 * len(groups)  # seconds for the second round
    screened = screen(futures, deadline - reserve, interpret)
    pool.shutdown(wait=False, cancel_futures=True)
    for group, (ms, failed) in screened.items():
        measured = final(group, ms, futures[group], interpret)
        report["groups"][str(group)] = {
            "final": measured,
            "screened": {name_of(x): t for x, t in sorted(ms.items(), key=lambda item: item[1])},
            "failed": failed,
        }
        own = name_of(table_tile(group))
        cells = [f"{name} {t:.3f}{'*' if name == own else ''}" for name, t in measured.items()]
        print(f"{group!s:24} of {len(ms)} ({len(failed)} failed), ms:  " + "  ".join(cells), flush=True)
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    print("* the table's tile")


if __name__ == "__main__":
    main()
