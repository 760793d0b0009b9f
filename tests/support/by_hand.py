"""Attention in Python loops over NumPy float64 numbers, one rule a line: what the reference itself is judged by."""

import itertools
import math

import numpy as np


def attention_by_hand(query, key, value, *, scale=None, return_lse=True, **options):
    """Output `[..., T, H, Dv]` and log-sum-exp `[..., H, T]`, both float64; `options` as in `allowed_by_hand`."""
    query, key, value = (np.asarray(x, np.float64) for x in (query, key, value))
    *batch, T, H, D = query.shape
    S, K, Dv = *key.shape[-3:-1], value.shape[-1]
    scale = D**-0.5 if scale is None else float(scale)
    out = np.zeros((*batch, T, H, Dv))
    lse = np.full((*batch, H, T), -math.inf)
    for b in itertools.product(*map(range, batch)):
        for h, i in itertools.product(range(H), range(T)):
            kv_head = h // (H // K)
            keys = [j for j in range(S) if allowed_by_hand((b, batch), (i, T), (j, S), **options)]
            if not keys:
                continue
            scores = [scale * float(query[*b, i, h] @ key[*b, j, kv_head]) for j in keys]
            top = max(scores)
            total = sum(math.exp(s - top) for s in scores)
            lse[*b, h, i] = top + math.log(total)
            for s, j in zip(scores, keys, strict=True):
                out[*b, i, h] += math.exp(s - top) / total * value[*b, j, kv_head]
    return (out, lse) if return_lse else out


def allowed_by_hand(example, query, key, *, causal=False, window=None, q_offset=None, **lengths):
    """Whether a query may attend a key: `example` is (index, leading dims), `query` (row, T), `key` (slot, S).

    `lengths` are `q_lengths` and `kv_lengths`, numbers or arrays, or None.
    """
    (b, batch), (i, T), (j, S) = example, query, key
    q_lengths, kv_lengths = lengths.get("q_lengths"), lengths.get("kv_lengths")

    def of_example(array):
        return int(np.broadcast_to(np.asarray(array), tuple(batch))[b])

    rows = T if q_lengths is None else min(max(of_example(q_lengths), 0), T)
    keys = S if kv_lengths is None else min(max(of_example(kv_lengths), 0), S)
    if i >= rows or j >= keys:
        return False
    position = i + (keys - rows if q_offset is None else of_example(q_offset))
    if causal and j > position:
        return False
    left, right = (None, None) if window is None else window
    if left is not None and j < position - left:
        return False
    return right is None or j <= position + right
