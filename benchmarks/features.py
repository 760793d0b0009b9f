"""What each option costs, and what skipping tiles saves: times of ours against ours, in one process.

    python3 -m benchmarks.features              on an H200 about two minutes
    python3 -m benchmarks.features --shrink 32 --implementation xla      to try the script on a CPU

"options": one call with the option against the same call without, at T = 8k and head dim 128, 2 examples of 16 heads.
"skipping": a call of which most tiles need not be visited, against the time that its visible tiles would take at the
rate of the call without any mask: visible pairs of query and key are rounded to tiles of 128 x 128.
"""

import argparse
import functools
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import flash_jax
from benchmarks import timing, workloads
from benchmarks.cases import packed

TILE = 128
LIMITS = {"bias": 1.5, "bias and its gradient": 1.5, "dropout": 1.4, "softcap": 1.25}
HEADS, HEAD_DIM = 16, 128


def options(B: int, T: int) -> dict[str, tuple[dict, dict]]:
    """{name: (static options and arrays without gradient, arrays with)} of what costs time in every tile."""
    normal = functools.partial(jax.random.normal, jax.random.key(1), dtype=jnp.bfloat16)
    return {
        "plain": ({}, {}),
        "bias": ({"bias": normal((1, HEADS, T, T))}, {}),
        "bias and its gradient": ({}, {"bias": normal((1, HEADS, T, T))}),
        "bias of each example, its gradient": ({}, {"bias": normal((B, HEADS, T, T))}),
        "bias [1, 1, T, S], its gradient": ({}, {"bias": normal((1, 1, T, T))}),
        "bias [1, 1, 1, S]": ({"bias": normal((1, 1, 1, T))}, {}),
        "mask [1, 1, T, S]": ({"mask": jax.random.bernoulli(jax.random.key(2), 0.9, (1, 1, T, T))}, {}),
        "dropout": ({"dropout_rate": 0.1, "dropout_key": jax.random.key(3)}, {}),
        "softcap": ({"softcap": 30.0}, {}),
        "softcap, scores beyond it": ({"softcap": 30.0, "scale": 5.0}, {}),
        "alibi": ({}, {"alibi_slopes": jnp.linspace(0.1, 0.5, HEADS)}),
        "sinks": ({}, {"sinks": jnp.linspace(-1.0, 1.0, HEADS)}),
        "scale (array)": ({}, {"scale": jnp.asarray(HEAD_DIM**-0.5)}),
        "score_mod, |i - j|": ({"score_mod": farther_is_less}, {}),
        "score_mod, a table of i - j": (
            {"score_mod": by_distance}, {"mod_operands": (jnp.zeros((HEADS, 2 * T - 1), jnp.float32),)},
        ),
    }  # fmt: skip


def farther_is_less(score, b, h, i, j):
    """A score_mod without operands."""
    return score - 0.01 * jnp.abs(i - j).astype(jnp.float32)


def by_distance(score, b, h, i, j, table):
    """A score_mod with a learned number for each head and distance."""
    return score + table[h, i - j + table.shape[1] // 2]


def nearby(b, h, i, j, *_):
    """A mask_mod: the window (1023, 0)."""
    return (i >= j) & (i - j < 1024)


def same_document(b, h, i, j, ids):
    """A mask_mod: packed documents, causal."""
    return (ids[b, i] == ids[b, j]) & (i >= j)


def skipping(shrink: int) -> dict[str, tuple[int, dict]]:
    """{name: (T, options)} of what leaves most tiles unvisited, one example each."""
    T = 32768 // shrink
    return {
        "causal, 32k": (T, {"causal": True}),
        "causal, 12 packed documents, 32k": (T, {"causal": True, "segment_ids": jnp.asarray(packed(T))}),
        "window (1023, 0), 64k": (2 * T, {"window": (1023 // min(shrink, 8), 0)}),
        "chunk_size 2048, causal, 32k": (T, {"causal": True, "chunk_size": 2048 // min(shrink, 8)}),
        "prefix 4096, causal, 32k": (T, {"causal": True, "prefix_lengths": 4096 // shrink}),
    }


def skipping_by_maps(shrink: int) -> dict[str, tuple[int, dict, dict]]:
    """{name: (T, options, options of the same meaning)}: a mask_mod and its block_mask, one example each."""
    T = 32768 // shrink
    ids = jnp.asarray(packed(T))
    by_ids = {"mask_mod": same_document, "mod_operands": (ids,)}
    return {
        "window (1023, 0), 32k, mask_mod": (
            T,
            {"mask_mod": nearby, "block_mask": flash_jax.block_mask(nearby, (1, 1, T, T))},
            {"window": (1023, 0)},
        ),
        "12 documents, 32k, mask_mod": (
            T,
            by_ids | {"block_mask": flash_jax.block_mask(same_document, (1, 1, T, T), (ids,))},
            {"causal": True, "segment_ids": ids},
        ),
    }


def visible_share(T: int, given: dict) -> float:
    """The share of the tiles of 128 x 128 in which anything is allowed, row of tiles by row of tiles."""
    cols, count = np.arange(T), 0
    ids = None if "segment_ids" not in given else np.asarray(given["segment_ids"])[0]
    for start in range(0, T, TILE):
        rows = np.arange(start, min(start + TILE, T))
        seen = np.ones((len(rows), T), bool)
        if given.get("causal"):
            seen &= (cols <= rows[:, None]) | (cols < given.get("prefix_lengths", 0))
        if "window" in given:
            left, right = given["window"]
            seen &= (cols >= rows[:, None] - left) & (cols <= rows[:, None] + right)
        if "chunk_size" in given:
            seen &= cols // given["chunk_size"] == rows[:, None] // given["chunk_size"]
        if ids is not None:
            seen &= ids[rows][:, None] == ids
        count += np.add.reduceat(seen.any(axis=0), np.arange(0, T, TILE)).astype(bool).sum()
    return float(count) / (-(-T // TILE)) ** 2


def programs(implementation: str, frozen: dict, trained: dict, qkv: tuple) -> dict[str, tuple]:
    """{pass: (function, arguments)}: forward, and forward with backward of all that is differentiated."""
    dout = jax.random.normal(jax.random.key(9), qkv[0].shape, qkv[0].dtype)

    def forward(qkv, trained, frozen_arrays):
        q, k, v = qkv
        return flash_jax.flash_attention(q, k, v, **trained, **static, **frozen_arrays, implementation=implementation)

    def both(qkv, trained, frozen_arrays, dout):
        out, pull = jax.vjp(lambda qkv, trained: forward(qkv, trained, frozen_arrays), qkv, trained)
        return out, pull(dout)

    arrays = {name: x for name, x in frozen.items() if isinstance(x, jax.Array)}
    static = {name: x for name, x in frozen.items() if name not in arrays}
    return {"forward": (forward, (qkv, trained, arrays)), "both": (both, (qkv, trained, arrays, dout))}


def inputs(B: int, T: int) -> tuple:
    """Query, key and value of one call."""
    keys = jax.random.split(jax.random.key(0), 3)
    return tuple(jax.random.normal(key, (B, T, HEADS, HEAD_DIM), jnp.bfloat16) for key in keys)


def measure(cases: dict[str, tuple[int, int, dict, dict]], args: argparse.Namespace) -> dict[tuple[str, str], float]:
    """{(name, pass): milliseconds} of {name: (B, T, options, differentiated)}; those of one T and pass are interleaved.

    Calls that take much longer, and leave a GPU hot and slow, are not between them, and a sample is long enough for the
    clock to become what these calls alone would make it.
    """
    functions, arguments = {}, {}
    for name, (B, T, frozen, trained) in cases.items():
        for kind, (function, values) in programs(args.implementation, frozen, trained, inputs(B, T)).items():
            functions[name, kind], arguments[name, kind] = function, values
    with ThreadPoolExecutor(workloads.threads()) as pool:
        compiled = timing.compile_ahead(pool, functions, arguments)
        calls = {key: functools.partial(future.result(), *arguments[key]) for key, future in compiled.items()}
    found: dict = {}
    for group in sorted({(cases[name][1], kind) for name, kind in calls}):
        alike = {key: call for key, call in calls.items() if (cases[key[0]][1], key[1]) == group}
        found |= timing.measure(alike, args.samples, args.sample_ms)
    for key, t in found.items():
        if isinstance(t, str):
            print(f"{key}: {t}", flush=True)
    return {key: t.median for key, t in found.items() if not isinstance(t, str)}


def print_options(ms: dict, report: dict) -> None:
    """Times and how many times those of the plain call they are."""
    for kind in ("forward", "both"):
        for (name, of), t in ms.items():
            if of == kind and ("plain", kind) in ms:
                ratio, limit = t / ms["plain", kind], LIMITS.get(name)
                asked = f"  asked: at most {limit}" if limit else ""
                print(f"{kind:8} {name:34} {t:8.3f} ms {ratio:5.2f}x{asked}", flush=True)
                report[f"{kind}, {name}"] = {"ms": t, "times_plain": ratio}


def print_skipping(ms: dict, cases: dict, report: dict) -> None:
    """Times against those of the visible tiles at the dense rate of the same length."""
    for kind in ("forward", "both"):
        for name, (T, _, meaning) in cases.items():
            dense = ms.get((f"dense {T}", kind))
            if dense is None or (name, kind) not in ms:
                continue
            share = visible_share(T, meaning)
            ratio = ms[name, kind] / (share * dense)
            print(
                f"{kind:8} {name:34} {ms[name, kind]:8.3f} ms, {100 * share:5.1f}% of the tiles of a dense call of "
                f"{dense:.3f} ms: {ratio:.2f}x their time",
                flush=True,
            )
            report[f"{kind}, {name}"] = {"ms": ms[name, kind], "dense_ms": dense, "share": share, "ratio": ratio}


def main() -> None:
    """Prints both tables and writes them as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--implementation", default="triton")
    parser.add_argument("--samples", type=int, default=7)
    parser.add_argument("--sample-ms", type=float, default=80.0)
    parser.add_argument("--shrink", type=int, default=1)
    parser.add_argument("--json", type=Path, default=Path("out/features.json"))
    args = parser.parse_args()
    workloads.quiet()
    B, T = 2, 8192 // args.shrink
    report: dict = {"device": jax.devices()[0].device_kind, "jax": jax.__version__, "options": {}, "skipping": {}}
    print_options(measure({n: (B, T, *o) for n, o in options(B, T).items()}, args), report["options"])
    cases = {name: (T, given, given) for name, (T, given) in skipping(args.shrink).items()}
    cases |= skipping_by_maps(args.shrink)
    calls = {name: (1, T, given, {}) for name, (T, given, _) in cases.items()}
    calls |= {f"dense {T}": (1, T, {}, {}) for T in sorted({T for T, *_ in cases.values()})}
    print_skipping(measure(calls, args), cases, report["skipping"])
    args.json.parent.mkdir(parents=True, exist_ok=True)
    args.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
