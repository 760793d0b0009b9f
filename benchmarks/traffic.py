"""What devices that share a sequence send and keep, by formula: the tables of docs/scaling.md.

    python3 -m benchmarks.traffic                            a million tokens, 32 query and 8 key/value heads of dim 128
    python3 -m benchmarks.traffic --tokens 131072 --heads 16 16

For one layer's attention, one example, 16-bit inputs. Sent: bytes that leave one device, forward and backward together.
Kept: what one device holds besides its own query, key, value, output and their gradients while the layer runs. Compute
is what the device's share of a causal forward and backward pass takes at --tflops.
"""

import argparse


def sent(strategy: str, n: int, T: int, H: int, K: int, D: int) -> float:
    """Bytes that one of n devices sends, forward and backward."""
    q, kv = T * H * D / n, T * K * D / n  # numbers in a device's own part of one array
    if strategy == "heads":  # q, k, v, out one way and their cotangents the other, but for the part that stays
        return 2 * (2 * q + 2 * kv) * 2 * (n - 1) / n
    if strategy == "ring":  # keys and values n - 1 times in each pass, and their gradients in float32 n times
        return 2 * (n - 1) * 2 * kv * 2 + n * 2 * kv * 4
    return 2 * (n - 1) * 2 * kv * 2 + (n - 1) * 2 * kv * 4  # "all_gather": gathered in each pass, gradients scattered


def kept(strategy: str, n: int, T: int, H: int, K: int, D: int) -> float:
    """Bytes that one of n devices keeps besides its own arrays, in the backward pass, which keeps the most."""
    q, kv = T * H * D / n, T * K * D / n
    if strategy == "heads":  # exchanged q, k, v, out and cotangent, and gradients not yet exchanged back
        return (3 * q + 2 * kv) * 2 + (q + 2 * kv) * 2
    if strategy == "ring":  # the part that is attended, the one that comes, and float32 gradients: dq, and twice dk, dv
        return 2 * 2 * kv * 2 + q * 4 + 2 * 2 * kv * 4
    return n * 2 * kv * 2 + q * 4 + n * 2 * kv * 4  # all keys and values, dq, and float32 gradients of all keys


def compute(n: int, T: int, H: int, D: int, tflops: float) -> float:
    """Seconds of one device's share: 4 T T H D / 2 operations forward, 2.5 times that backward."""
    return 3.5 * 4 * T * T * H * D / 2 / n / (tflops * 1e12)


def main() -> None:
    """Prints the table, in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=2**20)
    parser.add_argument("--heads", type=int, nargs=2, default=(32, 8), metavar=("H", "K"))
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--tflops", type=float, default=400)
    args = parser.parse_args()
    (H, K), sizes = args.heads, (args.tokens, args.heads[0], args.heads[1], args.dim)
    names = ("heads", "ring", "all_gather")
    print(f"{args.tokens} tokens, H = {H}, K = {K}, D = {args.dim}\n")
    print(
        f"| devices | compute | {' | '.join(f'{x}: sent' for x in names)} | {' | '.join(f'{x}: kept' for x in names)} |"
    )
    print("|---" * 8 + "|")
    for n in (8, 16, 64, 256, 1024):
        cells = [f"{f(name, n, *sizes) / 2**30:.2f} GiB" for f in (sent, kept) for name in names]
        for at in (0, 3):  # of "heads", which needs a head of each kind for every device
            if K % n:
                cells[at] = "-"
        seconds = compute(n, args.tokens, H, args.dim, args.tflops)
        print(f"| {n} | {seconds * 1e3:,.0f} ms | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
