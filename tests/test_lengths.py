"""`q_lengths` and `kv_lengths`: who is padding, how they are clamped, and that they move the diagonal (R6)."""

import numpy as np
import pytest

from tests.support.accuracy import assert_agrees, check
from tests.support.cases import case
from tests.support.programs import Program, forward, gradients, tangents, values_and_gradients

pytestmark = pytest.mark.thorough

WITH_GRADIENTS = {
    "keys": {"kv_lengths": np.array([20, 41])},
    "queries": {"q_lengths": np.array([35, 18])},
    "both": {"q_lengths": np.array([17, 35]), "kv_lengths": np.array([33, 5])},
    "both-causal": {"causal": True, "q_lengths": np.array([17, 35]), "kv_lengths": np.array([33, 5])},
    "both-window": {"window": (6, 3), "q_lengths": np.array([35, 9]), "kv_lengths": np.array([12, 41])},
    "with-offset": {"causal": True, "q_offset": 3, "q_lengths": np.array([12, 30]), "kv_lengths": np.array([9, 40])},
    "zero": {"causal": True, "q_lengths": np.array([0, 35]), "kv_lengths": np.array([10, 0])},
    "clamped": {"causal": True, "q_lengths": np.array([-3, 99]), "kv_lengths": np.array([1000, 41])},
    "int": {"causal": True, "q_lengths": 30, "kv_lengths": 17},
}
FORWARD_ONLY = {
    "clamped-below": {"q_lengths": np.array([35, 35]), "kv_lengths": np.array([-5, 7])},
    "int-clamped": {"causal": True, "q_lengths": 99, "kv_lengths": 99},
    "int-below-zero": {"q_lengths": -1, "kv_lengths": 7},
    "0-d": {"causal": True, "kv_lengths": np.array(17)},
    "of-size-1": {"causal": True, "q_lengths": np.array([18]), "kv_lengths": np.array([23, 41])},
}
OPTIONS = WITH_GRADIENTS | FORWARD_ONLY
NAME = "B2-T35-S41-H4-K2-D16-f32"


@pytest.mark.parametrize("options", WITH_GRADIENTS.values(), ids=WITH_GRADIENTS)
def test_values_and_gradients(attend, options):
    c = case(NAME)
    check(values_and_gradients(**options), attend, c.arrays(), c.cotangents())


@pytest.mark.parametrize("options", FORWARD_ONLY.values(), ids=FORWARD_ONLY)
def test_values(attend, options):
    check(forward(**options), attend, *case(NAME).arrays())


@pytest.mark.parametrize("option", ["both-causal", "zero"])
def test_tangents(attend, option):
    c = case(NAME)
    check(tangents(**OPTIONS[option]), attend, c.arrays(), c.tangents())


def test_traced(attend):
    c = case(NAME.replace("f32", "bf16"))

    def with_lengths(attend, inputs, cotangents, q_lengths, kv_lengths):
        return values_and_gradients(q_lengths=q_lengths, kv_lengths=kv_lengths)(attend, inputs, cotangents)

    program = Program(with_lengths, {"causal": True}, derivative=(False, True))
    check(program, attend, c.arrays(), c.cotangents(), np.array([50, 12]), np.array([-1, 29]))


def test_several_leading_dims(attend):
    arrays = case("B2x3-T19-S35-H2-f32").arrays()
    check(forward(q_lengths=np.array([3, 19, 17]), kv_lengths=np.array([[35], [16]])), attend, *arrays)


def test_each_example_equals_its_own_short_call(attend):
    """Padded to a common length or not, an example gives the same, gradients included; its padding gives nothing."""
    c = case(NAME)
    (q, k, v), (dout, dlse) = c.arrays(), c.cotangents()
    rows, keys = [17, 33], [41, 9]
    options = {"causal": True, "q_lengths": np.array(rows), "kv_lengths": np.array(keys)}
    out, lse = forward(**options)(attend, q, k, v)
    dq, dk, dv = gradients(**options)(attend, (q, k, v), (dout, dlse))
    for b, (t, s) in enumerate(zip(rows, keys, strict=True)):
        alone, cotangents = (q[b, :t], k[b, :s], v[b, :s]), (dout[b, :t], dlse[b, :, :t])
        assert_agrees((out[b, :t], lse[b, :, :t]), forward(causal=True), *alone)
        found = dq[b, :t], dk[b, :s], dv[b, :s]
        assert_agrees(found, gradients(causal=True), alone, cotangents)
        assert not np.any(out[b, t:]) and (np.asarray(lse)[b, :, t:] == -np.inf).all()
        assert not np.any(dq[b, t:]) and not np.any(dk[b, s:]) and not np.any(dv[b, s:])
