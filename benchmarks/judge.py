"""What the right answer is: attention in float64 NumPy, of one key/value head, sharing no code with what it judges.

Judged is the last key/value head of the last example, with the query heads that share it. Where a head has at most
`WHOLE` pairs of query and key all of it is computed; else `SAMPLE` query rows of it, which give the output and the
gradient to the query exactly, but not those to keys and values: these need every row.
"""

from typing import Any, NamedTuple

import numpy as np

from benchmarks.cases import Case

WHOLE = 2**28  # a head of 16k queries and 16k keys
SAMPLE = 32
BLOCK = 2**22  # scores that are held at a time, or those of SAMPLE rows where that is more

# A result further off than this is wrong. Rounding the inputs and results to bfloat16 alone makes some 3e-3; one TF32
# product, which is what a GPU's default gives float32, some 5e-4. A forgotten mask or scale makes 1e-1 or more.
LIMITS = {"bfloat16": 3e-2, "float16": 5e-3, "float32": 3e-3}


class Head(NamedTuple):
    """A key/value head and its query heads in float64: q, dout [T, G, ...], k, v [S, ...], bias [G, T, S] or None."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    dout: np.ndarray
    bias: np.ndarray | None


class Truth(NamedTuple):
    """Exact results: out and dq [rows, G, ...] of the rows named; dk, dv [S, ...], or None where they are not known."""

    rows: np.ndarray
    out: np.ndarray
    dq: np.ndarray
    dk: np.ndarray | None
    dv: np.ndarray | None


def cut(x: Any, heads: int) -> np.ndarray:
    """The last heads of the last example of an array [B, length, heads, width], as float64 [length, heads, width]."""
    return np.asarray(x[-1, :, x.shape[2] - heads :]).astype(np.float64)


def head_of(case: Case, arrays: tuple, extras: dict[str, Any]) -> Head:
    """The head that is judged, of the inputs of all."""
    q, k, v, dout = arrays
    bias = extras.get("bias")
    if bias is not None:
        bias = np.asarray(bias[0, case.H - case.group :]).astype(np.float64)
    return Head(cut(q, case.group), cut(k, 1)[:, 0], cut(v, 1)[:, 0], cut(dout, case.group), bias)


def truth(case: Case, head: Head, most: int | None = None) -> Truth:
    """The exact results: of all rows where the head has at most so many pairs (default: WHOLE), else of a sample."""
    whole = case.group * case.T * case.S <= (WHOLE if most is None else most)
    rows = np.arange(case.T) if whole else sampled_rows(case.T)
    out = np.empty((len(rows), case.group, case.Dv))
    dq = np.zeros((len(rows), case.group, case.D))
    dk, dv = np.zeros((case.S, case.D)), np.zeros((case.S, case.Dv))
    step = max(SAMPLE, BLOCK // case.S)
    for start in range(0, len(rows), step):
        some = rows[start : start + step]
        seen = case.allowed(some)
        for g in range(case.group):
            bias = 0.0 if head.bias is None else head.bias[g, some]
            q, dout = head.q[some, g], head.dout[some, g]
            p = _weights(head, q, seen, bias)
            out[start : start + step, g] = p @ head.v
            if not case.backward:
                continue
            ds = _gradient(head, p, dout)
            dq[start : start + step, g] = ds @ head.k
            if whole:
                dk += ds.T @ q
                dv += p.T @ dout
    all_known = whole and case.backward
    return Truth(rows, out, dq, dk if all_known else None, dv if all_known else None)


def sampled_rows(T: int) -> np.ndarray:
    """The first and the last row, and others at random, in order."""
    inner = np.random.default_rng(0).choice(T, min(SAMPLE - 2, T), replace=False)
    return np.unique(np.concatenate([[0, T - 1], inner]))


def _weights(head: Head, q: np.ndarray, seen: np.ndarray, bias: Any) -> np.ndarray:
    """The softmax of some rows' scores, [rows, S]."""
    scores = np.where(seen, q @ head.k.T * q.shape[-1] ** -0.5 + bias, -np.inf)
    p = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return p / p.sum(axis=-1, keepdims=True)


def _gradient(head: Head, p: np.ndarray, dout: np.ndarray) -> np.ndarray:
    """The gradient of these rows' q k^T: that of the scores, scaled."""
    dp = dout @ head.v.T
    return p * (dp - (p * dp).sum(axis=-1, keepdims=True)) * head.k.shape[-1] ** -0.5


def errors(case: Case, result: Any, exact: Truth) -> dict[str, float]:
    """||x - r|| / ||r|| of each part of a result: out, or (out, (dq, dk, dv)), where the truth is known."""
    out, gradients = result if isinstance(result, tuple) else (result, ())
    found = {"out": (out, exact.out, case.group)}
    for name, x, r, heads in zip(("dq", "dk", "dv"), gradients, exact[2:], (case.group, 1, 1), strict=False):
        if r is not None:
            found[name] = (x, r if name == "dq" else r[:, None], heads)
    measured = {}
    for name, (x, r, heads) in found.items():
        part = cut(x, heads)
        part = part[exact.rows] if name in ("out", "dq") else part
        measured[name] = float(np.linalg.norm(part - r) / np.linalg.norm(r))
    return measured


def wrong(case: Case, measured: dict[str, float]) -> bool:
    """Whether any error is beyond what the dtype explains; NaN is."""
    return not all(error <= LIMITS[case.dtype] for error in measured.values())
