"""Attention in Python loops over NumPy float64 numbers, one rule a line: what the reference itself is judged by."""

import itertools
import math

import jax
import numpy as np


def attention_by_hand(query, key, value, bias=None, mask=None, *, return_lse=True, **options):
    """Output `[..., T, H, Dv]` and log-sum-exp `[..., H, T]`, both float64; `options` as in `score_by_hand`.

    Besides these, `sinks`, `dropout_rate` with a typed `dropout_key`, and `score_mod`, `mask_mod` and `mod_operands`.
    """
    query, key, value = (np.asarray(x, np.float64) for x in (query, key, value))
    *batch, T, H, _ = query.shape
    S, K, Dv = *key.shape[-3:-1], value.shape[-1]
    sinks, rate, dropout_key = (options.pop(name, None) for name in ("sinks", "dropout_rate", "dropout_key"))
    score_mod, mask_mod = (options.pop(name, None) for name in ("score_mod", "mask_mod"))
    tables = [ByHand(np.asarray(x)) for x in options.pop("mod_operands", ())]
    sinks = np.broadcast_to(-math.inf if sinks is None else np.asarray(sinks), (*batch, H))
    bias = np.broadcast_to(0.0 if bias is None else np.asarray(bias), (*batch, H, T, S))
    mask = np.broadcast_to(True if mask is None else mask, (*batch, H, T, S))
    out = np.zeros((*batch, T, H, Dv))
    lse = np.full((*batch, H, T), -math.inf)
    for number, (*b, h) in enumerate(itertools.product(*map(range, (*batch, H)))):
        kv_head = h // (H // K)
        for i in range(T):
            scores = {}
            for j in range(S):
                if mask[*b, h, i, j] and bias[*b, h, i, j] > -math.inf:
                    pair = query[*b, i, h], key[*b, j, kv_head]
                    entry = (number // H, h, i, j, *tables)
                    if mask_mod is not None and not mask_mod(*entry):
                        continue
                    mod = None if score_mod is None else lambda s, entry=entry: score_mod(s, *entry)
                    score = score_by_hand(pair, (tuple(b), tuple(batch)), h, (i, T), (j, S), mod=mod, **options)
                    if score is not None and score > -math.inf:
                        scores[j] = score + bias[*b, h, i, j]
            top = max([sinks[*b, h], *scores.values()])
            if top == -math.inf:
                continue
            total = math.exp(sinks[*b, h] - top) + sum(math.exp(s - top) for s in scores.values())
            lse[*b, h, i] = top + math.log(total)
            for j, s in scores.items():
                kept = 1.0
                if rate:
                    kept = kept_by_hand(dropout_key, rate, number, i, j) / (1 - rate)
                out[*b, i, h] += kept * math.exp(s - top) / total * value[*b, j, kv_head]
    return (out, lse) if return_lse else out


class ByHand:
    """An operand of a mod: an index outside is moved to the nearest end."""

    def __init__(self, x):
        self.x = x

    def __getitem__(self, index):
        index = index if isinstance(index, tuple) else (index,)
        return self.x[tuple(min(max(int(i), 0), n - 1) for i, n in zip(index, self.x.shape, strict=True))]


def score_by_hand(pair, example, h, row, slot, *, scale=None, softcap=None, mod=None, alibi_slopes=None, **who):  # noqa: PLR0913
    """The score of a query and a key, without a bias; None where `allowed_by_hand` of `who` says no."""
    at_i, at_j = positions_by_hand(example, row, slot, **who)
    if not allowed_by_hand(example, row, slot, (at_i, at_j), **who):
        return None
    score = float(pair[0] @ pair[1]) * (len(pair[0]) ** -0.5 if scale is None else float(scale))
    if softcap is not None:
        score = softcap * math.tanh(score / softcap)
    if mod is not None:
        score = float(mod(score))
    if alibi_slopes is not None:
        (b, batch), slopes = example, np.asarray(alibi_slopes)
        score -= np.broadcast_to(slopes, (*batch, slopes.shape[-1]))[*b, h] * abs(at_i - at_j)
    return score


def allowed_by_hand(example, row, slot, at, *, causal=False, window=None, prefix_lengths=None, **more):  # noqa: PLR0911
    """Whether a query may attend a key: `example` is (index, leading dims), `row` (i, T), `slot` (j, S).

    `at` are the positions of the two. `more` are lengths, positions, segment ids and `chunk_size`.
    """
    (i, T), (j, S), (at_i, at_j) = row, slot, at
    rows, keys = lengths_by_hand(example, T, S, **more)
    if i >= rows or j >= keys:
        return False
    in_prefix = prefix_lengths is not None and at_j < _of_example(prefix_lengths, example)
    if causal and at_j > at_i and not in_prefix:
        return False
    chunk = more.get("chunk_size")
    if chunk is not None and math.floor(at_i / chunk) != math.floor(at_j / chunk):
        return False
    both = more.get("segment_ids")
    q_ids, kv_ids = more.get("q_segment_ids", both), more.get("kv_segment_ids", both)
    if q_ids is not None:
        mine, other = _of_example(q_ids, example, i), _of_example(kv_ids, example, j)
        if mine != other or mine < 0:
            return False
    left, right = (None, None) if window is None else window
    if left is not None and at_j < at_i - left:
        return False
    return right is None or at_j <= at_i + right


def positions_by_hand(example, row, slot, *, q_offset=None, q_positions=None, kv_positions=None, **more):
    """Where a query and a key stand."""
    (i, T), (j, S) = row, slot
    rows, keys = lengths_by_hand(example, T, S, **more)
    at_i = i + (keys - rows if q_offset is None else _of_example(q_offset, example))
    at_i = at_i if q_positions is None else _of_example(q_positions, example, i)
    return at_i, j if kv_positions is None else _of_example(kv_positions, example, j)


def lengths_by_hand(example, T, S, *, q_lengths=None, kv_lengths=None, **_):
    """How many rows and keys of the example are no padding."""
    rows = T if q_lengths is None else min(max(_of_example(q_lengths, example), 0), T)
    return rows, S if kv_lengths is None else min(max(_of_example(kv_lengths, example), 0), S)


def kept_by_hand(key, rate, number, i, j):
    """Whether dropout keeps entry (i, j) of the example and head that has this number: a hash, in Python's ints."""
    row_word, col_word = (int(x) for x in jax.random.key_data(jax.random.fold_in(key, number))[:2])
    return _odd(row_word ^ i) * _odd(col_word ^ j) % 2**32 >= round(rate * 2**32)


def _odd(x):
    x = x * 0x7FEB352D % 2**32
    x ^= x >> 16
    return x * 0x846CA68B % 2**32 | 1


def _of_example(array, example, index=None):
    """The number, or with an index the entry of the row, that an array broadcast over the leading dims has here."""
    b, batch = example
    array = np.asarray(array)
    if index is None:
        return int(np.broadcast_to(array, batch)[b])
    return int(np.broadcast_to(array, (*batch, array.shape[-1]))[*b, index])
