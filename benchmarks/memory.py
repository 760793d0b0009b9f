"""Temporary memory of each option, from programs compiled for an H200 on a machine without a GPU.

    python3 -m benchmarks.memory [--length 16384]

prints a table of the bytes that forward, and forward with backward or with a tangent, need besides arguments and
results, at the length and at half of it; with --kernels also what ptxas says of the kernels. Needs the `compile` extra.
One example, 8 query heads, 2 key/value heads, head dim 128, bfloat16.
"""

import argparse

import jax
import jax.numpy as jnp

import flash_jax
from tests.support import compile_report, gpu_compile

B, H, K, D = 1, 8, 2, 128


def relative(score, b, h, i, j, table):
    """A learned number for each head and distance, the same from 127 on."""
    return score + table[h, i - j + 127]


def same_document(b, h, i, j, ids):
    """Allowed within a document."""
    return ids[b, i] == ids[b, j]


def diagonal_blocks(b, h, i, j):
    """Allowed in every fourth block of a row."""
    return (i // 128 - j // 128) % 4 == 0


def struct(*shape, dtype="bfloat16"):
    """An array's shape and dtype."""
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))


def options(T: int) -> dict[str, tuple[dict, dict, dict]]:
    """{name: (static options, arrays without gradient, arrays with)}."""
    f32, i32 = {"dtype": "float32"}, {"dtype": "int32"}
    alone = {
        "plain": ({}, {}, {}),
        "causal": ({"causal": True}, {}, {}),
        "window (1024, 0)": ({"window": (1024, 0)}, {}, {}),
        "lengths": ({}, {"q_lengths": struct(B, **i32), "kv_lengths": struct(B, **i32)}, {}),
        "q_offset (array)": ({"causal": True}, {"q_offset": struct(B, **i32)}, {}),
        "prefix_lengths": ({"causal": True}, {"prefix_lengths": struct(B, **i32)}, {}),
        "chunk_size 512": ({"causal": True, "chunk_size": 512}, {}, {}),
        "positions": ({"causal": True}, {"q_positions": struct(B, T, **i32), "kv_positions": struct(B, T, **i32)}, {}),
        "segment_ids": ({"causal": True}, {"segment_ids": struct(B, T, **i32)}, {}),
        "softcap": ({"softcap": 30.0}, {}, {}),
        "alibi_slopes": ({"causal": True}, {}, {"alibi_slopes": struct(H, **f32)}),
        "sinks": ({"causal": True}, {}, {"sinks": struct(H, **f32)}),
        "dropout": ({"dropout_rate": 0.1}, {"dropout_key": struct(2, dtype="uint32")}, {}),
        "scale (array)": ({}, {}, {"scale": struct(**f32)}),
        "mask [1, 1, T, S]": ({}, {"mask": struct(1, 1, T, T, dtype="bool")}, {}),
        "bias [1, H, T, S], its gradient too": ({}, {}, {"bias": struct(1, H, T, T)}),
        "bias [1, 1, 1, S], its gradient too": ({}, {}, {"bias": struct(1, 1, 1, T)}),
        "bias [1, 1, T, 1], its gradient too": ({}, {}, {"bias": struct(1, 1, T, 1)}),
    }
    table, ids = struct(H, 255, **f32), struct(B, T, **i32)
    blocks = jax.eval_shape(lambda: flash_jax.block_mask(diagonal_blocks, (T, T)))
    mods = {
        "score_mod, a table [H, 255]": ({"score_mod": relative}, {"mod_operands": (table,)}, {}),
        "score_mod, its gradient too": ({"score_mod": relative}, {}, {"mod_operands": (table,)}),
        "mask_mod, ids [B, T]": ({"mask_mod": same_document}, {"mod_operands": (ids,)}, {}),
        "mask_mod with block_mask": ({}, {"block_mask": blocks}, {}),
    }
    together = ({}, {}, {})
    for name, parts in alone.items():
        if name not in (
            "q_offset (array)",
            "bias [1, 1, 1, S], its gradient too",
            "bias [1, 1, T, 1], its gradient too",
        ):
            for whole, part in zip(together, parts, strict=True):
                whole.update(part)
    return alone | {"all together": together} | mods


PASSES = {"forward": "forward", "backward": "with backward", "tangent": "with tangent"}


def compiled(static, frozen, trained, T, *, passes, target=gpu_compile.H200, head_dim=D, dtype="bfloat16"):  # noqa: PLR0913
    """The program of one call, compiled for `target`; `passes` is one of PASSES."""
    q, kv = struct(B, T, H, head_dim, dtype=dtype), struct(B, T, K, head_dim, dtype=dtype)

    def forward(qkv, trained, frozen):
        options = {**static, **trained, **frozen, "return_lse": True, "implementation": "triton"}
        return flash_jax.flash_attention(qkv[0], qkv[1], qkv[2], **options)

    def gradients(qkv, trained, frozen, cotangents):
        return jax.vjp(lambda qkv, trained: forward(qkv, trained, frozen), qkv, trained)[1](cotangents)

    def tangents(inputs, directions, frozen):
        return jax.jvp(lambda qkv, trained: forward(qkv, trained, frozen), inputs, directions)

    if passes == "tangent":
        inputs = (q, kv, kv), trained
        return gpu_compile.compile_for(target, tangents, inputs, inputs, frozen)
    if passes == "forward":
        return gpu_compile.compile_for(target, forward, (q, kv, kv), trained, frozen)
    cotangents = q, struct(B, H, T, dtype="float32")
    return gpu_compile.compile_for(target, gradients, (q, kv, kv), trained, frozen, cotangents)


def main():
    """Prints the table."""
    compile_report.ask()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=16384)
    parser.add_argument("--only", help="a part of the option's name")
    parser.add_argument("--kernels", action="store_true", help="registers, spills and notes of each kernel")
    args = parser.parse_args()
    print(" ".join([f"{'MiB of temporary memory':40}", *(f"{title:>17}" for title in PASSES.values())]))
    print(" ".join([f"{'T = S =':40}", *[f"{args.length // 2:>8} {args.length:>8}"] * len(PASSES)]))
    for name in options(args.length):
        if args.only and args.only not in name:
            continue
        cells, kernels = [], []
        for passes in PASSES:
            for T in (args.length // 2, args.length):
                program = compiled(*options(T)[name], T, passes=passes)
                cells.append(f"{program.temporary_bytes / 2**20:8.2f}")
            kernels += program.kernels
        print(f"{name:40} {' '.join(cells)}", flush=True)
        for k in kernels if args.kernels else ():
            if k.name.startswith("flash"):
                print(f"    {k.name:40} {k.registers:4} registers, spills {k.spills} {' '.join(k.notes)}")


if __name__ == "__main__":
    main()
