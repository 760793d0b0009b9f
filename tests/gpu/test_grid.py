"""Values and gradients against the float64 reference, over lengths, head dims, dtypes and head groups (R9, R10, R20).

The product of all axes is sampled: every pair of lengths and every head dim meets every dtype, and along these lists
the other axes go round, their numbers of values having no common divisor.
"""

import itertools

import pytest

from tests.support.accuracy import check
from tests.support.cases import case
from tests.support.programs import values_and_gradients

pytestmark = pytest.mark.gpu

DTYPES = ["bf16", "f16", "f32"]
LENGTHS = [
    (1, 1), (1, 7), (1, 100), (1, 4097), (7, 7), (7, 257), (63, 63), (63, 65), (65, 63), (65, 65), (100, 100),
    (100, 257), (257, 100), (257, 257), (100, 1024), (1024, 1), (1024, 100), (1000, 1024), (1024, 1024), (4097, 63),
    (65, 4097), (4097, 4097),
]  # fmt: skip
SHORT = [(63, 65), (100, 257), (257, 100), (129, 129), (200, 77), (77, 320), (128, 256)]
HEAD_DIMS = ["D1", "D8", "D16", "D24", "D32", "D40", "D59", "D64", "D72", "D80", "D96", "D111", "D128", "D160", "D192"]
HEAD_DIMS += ["D224", "D256", "D40-Dv72", "D192-Dv128", "D64-Dv256", "D128-Dv16", "D1-Dv111"]
HEADS = ["H2-K2", "H8-K2", "H5-K1", "H4-K4", "H6-K3"]
FEW_HEADS = ["H2-K1", "H2-K2", "H4-K1"]
BATCHES = ["", "B2-", "B3-"]
CAUSAL = [True, False]


def of_lengths():
    """Every pair of lengths in every dtype; long ones with few heads, so that the quadratic judges fit."""
    for n, ((T, S), dtype) in enumerate(itertools.product(LENGTHS, DTYPES)):
        long = T * S > 2**20
        if S == 1 and dtype == "f32":
            S = 2  # rows of one key: see test_one_key in test_options.py
        batch = "" if long else BATCHES[n % 3]
        heads = FEW_HEADS[n % 3] if long else HEADS[n % 5]
        width = ["D64", "D128", "D80", "D32"][n % 4] if dtype != "f32" else ["D64", "D32", "D128", "D40"][n % 4]
        yield f"{batch}T{T}-S{S}-{heads}-{width}-{dtype}", CAUSAL[n % 2]


def of_head_dims():
    """Every head dim in every dtype."""
    for n, (width, dtype) in enumerate(itertools.product(HEAD_DIMS, DTYPES)):
        T, S = SHORT[n % 7]
        yield f"{BATCHES[n % 3]}T{T}-S{S}-{HEADS[n % 5]}-{width}-{dtype}", CAUSAL[n % 2]


def parameters(cases):
    """Parameters with the ids that show what they are."""
    return [pytest.param(name, causal, id=f"{name}-{'causal' if causal else 'full'}") for name, causal in cases]


@pytest.mark.parametrize(("name", "causal"), parameters([*of_lengths(), *of_head_dims()]))
def test_values_and_gradients(attend, name, causal):
    c = case(name)
    check(values_and_gradients(causal=causal), attend, c.arrays(), c.cotangents())
