"""Several GPUs on one causal attention: data, heads and the sequence shared among them, against one GPU.

    python3 -m benchmarks.scaling                  on two H200s about two minutes
    python3 -m benchmarks.scaling --length 2048 --implementation xla      to try the script on a CPU of several devices

One sequence of 131,072 tokens, 16 heads of dim 128, bfloat16, forward and backward. "data" gives each GPU a sequence of
its own; the others share one. The speed-up is in tokens per second. Results are compared with those of one GPU: the
largest difference over the largest value, or "bitwise"; and those of the first head with float64 (by the blockwise code
of `xla`, as a matrix of scores would not fit): the largest error of out, dq, dk or dv, each over the largest value.
"""

import argparse
import functools
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import flash_jax
from benchmarks import timing, workloads

HEADS, HEAD_DIM = 16, 128
WAYS = {
    "data": (P("gpu"), None),
    "heads": (P(None, None, "gpu"), None),
    "sequence, by heads": (P(None, "gpu"), "heads"),
    "sequence, ring": (P(None, "gpu"), "ring"),
    "sequence, ring in zigzag": (P(None, "gpu"), "ring"),
    "sequence, all_gather": (P(None, "gpu"), "all_gather"),
    "sequence, all_gather in zigzag": (P(None, "gpu"), "all_gather"),
}


def step(implementation: str, q, k, v, dout, positions=None, **options) -> tuple:
    """(out, gradients) of causal attention; positions where the tokens are not in the order of the text."""
    if positions is not None:
        options |= {"q_positions": positions, "kv_positions": positions}
    attend = functools.partial(flash_jax.flash_attention, causal=True, implementation=implementation, **options)
    out, pull = jax.vjp(attend, q, k, v)
    return out, pull(dout)


def shared(way: str, mesh: jax.sharding.Mesh, arrays: tuple, implementation: str) -> tuple[Any, tuple]:
    """(compiled step, its arguments) on all devices of the mesh."""
    spec, strategy = WAYS[way]
    options = {} if strategy is None else {"context_axis": "gpu", "context_strategy": strategy}
    run = functools.partial(step, implementation, **options)
    specs: tuple = (spec,) * 4
    if "zigzag" in way:
        n = mesh.size
        positions = flash_jax.zigzag(jnp.arange(arrays[0].shape[1]), n)
        arrays, specs = (*(flash_jax.zigzag(x, n, 1) for x in arrays), positions), (*specs, P("gpu"))
    part = jax.shard_map(run, mesh=mesh, in_specs=specs, out_specs=(spec, (spec,) * 3))
    placed = tuple(jax.device_put(x, NamedSharding(mesh, s)) for x, s in zip(arrays, specs, strict=True))
    return jax.jit(part).lower(*placed).compile(), placed


def difference(found: Any, expected: Any) -> str:
    """The word "bitwise", or the largest difference over the largest value of a result."""
    worst = 0.0
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        a, b = np.asarray(a[:1]).astype(np.float32), np.asarray(b).astype(np.float32)
        worst = max(worst, float(np.abs(a - b).max() / np.abs(b).max()))
    return f"{worst:.1e}" if worst else "bitwise"


def first_head(arrays: tuple) -> tuple:
    """The result of `step` for the first head alone, in float64 by `xla`."""
    with jax.enable_x64(True):
        wide = tuple(jnp.asarray(np.asarray(x[:, :, :1]), jnp.float64) for x in arrays)
        return jax.device_get(jax.jit(functools.partial(step, "xla"))(*wide))


def error(found: Any, expected: Any) -> float:
    """The largest error of a result on the first head, over the largest value, of that with the largest."""
    worst = 0.0
    for x, r in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        worst = max(worst, float(np.abs(np.asarray(x[:1, :, :1]).astype(np.float64) - r).max() / np.abs(r).max()))
    return worst


def main() -> None:
    """Prints the table and writes it as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=131072)
    parser.add_argument("--implementation", default="triton")
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=list(WAYS))
    parser.add_argument("--samples", type=int, default=5)
    parser.add_argument("--json", type=Path, default=Path("out/scaling.json"))
    args = parser.parse_args()
    workloads.quiet()
    devices = jax.devices()
    n = len(devices)
    mesh = jax.make_mesh((n,), ("gpu",), axis_types=(AxisType.Auto,))
    shape = (1, args.length, HEADS, HEAD_DIM)
    arrays = tuple(jax.random.normal(key, shape, jnp.bfloat16) for key in jax.random.split(jax.random.key(0), 4))
    one = jax.jit(functools.partial(step, args.implementation)).lower(*arrays).compile()
    expected = jax.device_get(one(*arrays))
    exact = first_head(arrays)
    calls, compared, memory = {"one GPU": functools.partial(one, *arrays)}, {"one GPU": ""}, {}
    errors = {"one GPU": error(expected, exact)}
    for way in args.ways:
        given = tuple(jnp.concatenate([x] * n) for x in arrays) if way == "data" else arrays
        compiled, placed = shared(way, mesh, given, args.implementation)
        found = compiled(*placed)
        if "zigzag" in way:
            found = jax.tree.map(lambda x: flash_jax.unzigzag(x, n, 1), found)
        found = jax.device_get(found)
        calls[way], compared[way] = functools.partial(compiled, *placed), difference(found, expected)
        errors[way] = error(found, exact)
        memory[way] = compiled.memory_analysis().temp_size_in_bytes
        del found
    found = timing.measure(calls, args.samples, 200.0)
    kind = f"{n} x {devices[0].device_kind}"
    report: dict[str, Any] = {"device": kind, "jax": jax.__version__, "length": args.length}
    base = found["one GPU"]
    print(f"{kind}, jax {jax.__version__}: causal, {args.length} tokens, forward and backward")
    for way, t in found.items():
        if isinstance(t, str) or isinstance(base, str):
            print(f"{way:32} {t}")
            continue
        gain = base.median / t.median * (n if way == "data" else 1)
        more = f"{memory[way] / 2**20:8.0f} MiB temporary   {compared[way]}" if way in memory else ""
        print(f"{way:32} {t.median:9.2f} ms   {gain:5.2f}x   error {errors[way]:.1e}   {more}", flush=True)
        report[way] = {"ms": t.median, "low": t.low, "high": t.high, "speed_up": gain}
        report[way] |= {"compared": compared[way], "error": errors[way]}
    args.json.parent.mkdir(parents=True, exist_ok=True)
    args.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
