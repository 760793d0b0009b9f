"""Rows that attend nothing, and slots that nobody attends: zeros, -inf, no gradient; their NaN reaches nothing (R1)."""

import jax
import numpy as np
import pytest

from tests.support.accuracy import check
from tests.support.cases import case, poisoned
from tests.support.programs import gradients, tangents, values_and_gradients

pytestmark = pytest.mark.thorough

NAME = "B2-T35-S41-H4-K2-D24-Dv16-f32"
LENGTHS = {"q_lengths": np.array([35, 18]), "kv_lengths": np.array([20, 41])}


def poisoned_call(c):
    """Inputs and cotangents of `c` with NaN and infinities wherever `LENGTHS` says that there is padding."""
    (q, k, v), (dout, dlse) = c.arrays(), c.cotangents()
    inputs = poisoned(q, np.s_[1, 18:]), poisoned(k, np.s_[0, 20:]), poisoned(v, np.s_[0, 20:])
    inputs[1][0, 21::3] = np.inf
    inputs[2][0, 20::4] = -np.inf
    return inputs, (poisoned(dout, np.s_[1, 18:]), poisoned(dlse, np.s_[1, :, 18:]))


@pytest.mark.parametrize("causal, dtype", [(False, "f32"), (True, "bf16"), (True, "f16")], ids=str)
def test_poisoned_padding_reaches_neither_results_nor_gradients(attend, causal, dtype):
    c = case(NAME.replace("f32", dtype))
    program = values_and_gradients(causal=causal, **LENGTHS)
    check(program, attend, c.arrays(), c.cotangents(), given=poisoned_call(c))


def test_poisoned_padding_reaches_no_tangent(attend):
    c = case(NAME)
    (q, k, v), (tq, tk, tv) = c.arrays(), c.tangents()
    given = (
        (poisoned(q, np.s_[1, 18:]), poisoned(k, np.s_[0, 20:]), poisoned(v, np.s_[0, 20:])),
        (poisoned(tq, np.s_[1, 18:]), poisoned(tk, np.s_[0, 20:]), poisoned(tv, np.s_[0, 20:])),
    )
    check(tangents(**LENGTHS), attend, (q, k, v), (tq, tk, tv), given=given)


@pytest.mark.parametrize(
    "options, dead_queries, dead_keys",
    [
        ({"causal": True, "q_offset": -9}, np.s_[:9], np.s_[26:]),
        ({"causal": True, "q_offset": 0}, np.s_[:0], np.s_[35:]),
        ({"window": (2, 0), "q_offset": 20}, np.s_[23:], np.s_[:18]),
        ({"window": (None, -0), "q_offset": -20}, np.s_[:20], np.s_[15:]),
    ],
    ids=["causal-before", "top-left", "window-after", "window-before"],
)
def test_slots_out_of_everyones_sight_may_hold_nan(attend, options, dead_queries, dead_keys):
    """Keys and queries that causal, window and offset leave without a partner, none of them padding by any length."""
    c = case("B2-T35-S41-H2-D16-f32")
    (q, k, v), (dout, dlse) = c.arrays(), c.cotangents()
    rows, keys = (np.s_[:, dead_queries], np.s_[:, dead_keys])
    given = (
        (poisoned(q, rows), poisoned(k, keys), poisoned(v, keys)),
        (poisoned(dout, rows), poisoned(dlse, np.s_[:, :, dead_queries])),
    )
    check(values_and_gradients(**options), attend, (q, k, v), (dout, dlse), given=given)


def test_poison_in_one_example_or_head_stays_there(attend):
    """NaN that is attended may spread in its own head and example, and nowhere else."""
    c = case("B2-T19-S35-H4-K2-D16-f32")
    (q, k, v), cotangents = c.arrays(), c.cotangents()
    clean = jax.jit(lambda *x: values_and_gradients()(attend, *x))((q, k, v), cotangents)
    dirty_inputs = q, poisoned(k, np.s_[1, 30, 1]), v
    dirty = jax.jit(lambda *x: values_and_gradients()(attend, *x))(dirty_inputs, cotangents)
    (out, lse), (dq, dk, dv) = dirty
    assert np.isnan(out[1, :, 2:]).all() and np.isnan(lse[1, 2:]).all()
    for x, y in zip((out, dq, dk, dv), (clean[0][0], *clean[1]), strict=True):
        half = x.shape[2] // 2
        np.testing.assert_array_equal(x[0], y[0])
        np.testing.assert_array_equal(x[1, :, :half], y[1, :, :half])


@pytest.mark.parametrize("name", ["B2-T7-S0-H4-K2-D16-Dv8-f32", "B2-T0-S7-H4-K2-D16-Dv8-f32"])
def test_no_keys_or_no_queries(attend, name):
    c = case(name)
    dq, dk, dv = check(gradients(causal=True), attend, c.arrays(), c.cotangents())
    assert not np.any(dq) and not np.any(dk) and not np.any(dv)


def test_dead_rows_are_exactly_zero(attend):
    """Not merely small: the first rows of a causal square with more queries than keys."""
    c = case("B2-T52-S35-H2-D16-bf16")
    (out, lse), (dq, _, _) = values_and_gradients(causal=True)(attend, c.arrays(), c.cotangents())
    assert not np.any(out[:, :17]) and not np.any(dq[:, :17])
    assert (np.asarray(lse)[:, :, :17] == -np.inf).all() and np.isfinite(np.asarray(lse)[:, :, 17:]).all()
    assert np.any(out[:, 17:], axis=-1).all()
