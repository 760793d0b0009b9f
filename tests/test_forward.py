"""Output and log-sum-exp, for every length, head dim, dtype, head grouping and number of leading dims (R9, R20)."""

import jax
import numpy as np
import pytest

from tests.support.accuracy import assert_agrees, check
from tests.support.cases import case
from tests.support.programs import forward
from tests.support.tiers import every

LENGTHS = [
    "B2-T1-S1-D16-f32",
    "B2-T1-S100-D16-bf16",
    "B2-T7-S1-D16-f32",
    "B2-T63-S65-D16-f32",
    "B2-T65-S63-D16-f16",
    "B2-T7-S100-D16-f32",
    "B2-T100-S7-D16-bf16",
    "T257-S63-D16-f32",
    "T33-S257-D16-f32",
    "B2-T16-S16-D16-f32",
    "B2-T32-S48-D16-f32",
]
EMPTY = ["B2-T0-S7-H4-K2-D16-Dv8-bf16", "B2-T7-S0-H4-K2-D16-Dv8-bf16", "B2-T0-S0-f32", "B0-T7-S5-f32", "B2x0-T7-S5-f32"]
HEAD_DIMS = [
    "T20-S33-D1-f32",
    "T20-S33-D40-f16",
    "T20-S33-D59-f32",
    "T20-S33-D72-bf16",
    "T20-S33-D80-f32",
    "T20-S33-D96-bf16",
    "T20-S33-D111-f32",
    "T20-S33-D128-f16",
    "T20-S33-D192-f32",
    "T20-S33-D256-bf16",
    "T20-S33-D40-Dv72-f32",
    "T20-S33-D72-Dv16-bf16",
    "T20-S33-D192-Dv128-f16",
    "T20-S33-D1-Dv111-f32",
    "T20-S33-D16-Dv1-f32",
]
HEADS = ["B2-T20-S33-H8-K2-bf16", "B2-T20-S33-H6-K3-f32", "B2-T20-S33-H5-K1-f16", "B2-T20-S33-H1-K1-f32"]
LEADING = ["T20-S33-H4-K2-f32", "B1-T20-S33-f32", "B3-T20-S33-f32", "B2x3-T20-S33-H4-K2-bf16", "B2x1x3-T20-S33-f32"]
DTYPES = [f"B2-T63-S65-H4-K2-D24-Dv40-{dtype}" for dtype in ("bf16", "f16", "f32")]


@pytest.mark.parametrize("name", every(2, LENGTHS + DTYPES))
def test_lengths_and_dtypes(attend, name):
    check(forward(), attend, *case(name).arrays())


@pytest.mark.parametrize("name", LENGTHS[3:8])
def test_causal(attend, name):
    check(forward(causal=True), attend, *case(name).arrays())


@pytest.mark.parametrize("name", every(3, HEAD_DIMS + HEADS + LEADING))
def test_head_dims_heads_and_leading_dims(attend, name):
    check(forward(causal=True), attend, *case(name).arrays())


@pytest.mark.parametrize("name", EMPTY)
def test_nothing_to_do(attend, name):
    """No queries, no keys or no examples: the shapes as ever; without keys zeros, and -inf for the log-sum-exp."""
    check(forward(), attend, *case(name).arrays())


def test_numpy_arrays_give_jax_arrays(attend):
    arrays = case("B2-T5-S7-f32").arrays()
    assert all(isinstance(x, np.ndarray) for x in arrays)
    out = attend(*arrays)
    assert isinstance(out, jax.Array)
    np.testing.assert_array_equal(out, attend(*map(jax.numpy.asarray, arrays)))


def test_default_is_the_same_as_jit(attend):
    """Called op by op, the function gives what it gives under `jit`."""
    arrays = case("B2-T20-S33-H4-K2-bf16").arrays()
    np.testing.assert_array_equal(attend(*arrays, causal=True), jax.jit(lambda *x: attend(*x, causal=True))(*arrays))


def test_each_head_equals_the_call_with_this_head_alone(attend):
    """No head reads its neighbour's tail (case B17)."""
    q, k, v = case("B2-T35-S41-H4-K2-D24-f32").arrays()
    out, lse = attend(q, k, v, causal=True, return_lse=True)
    for h in (0, 3):
        one, shared = np.s_[..., h : h + 1, :], np.s_[..., h // 2 : h // 2 + 1, :]
        assert_agrees((out[one], lse[:, h : h + 1]), forward(causal=True), q[one], k[shared], v[shared])


def test_each_example_equals_the_call_with_this_example_alone(attend):
    q, k, v = case("B2x3-T19-S35-H4-K2-D24-bf16").arrays()
    out, lse = attend(q, k, v, return_lse=True)
    for b in ((0, 2), (1, 0)):
        assert_agrees((out[b], lse[b]), forward(), q[b], k[b], v[b])
