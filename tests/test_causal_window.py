"""Who may see whom: causal, windows and the queries' offset, static and traced, each alone and together (R2-R4)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support.accuracy import assert_agrees, check
from tests.support.cases import case
from tests.support.programs import Program, forward, tangents, values_and_gradients

pytestmark = pytest.mark.thorough

WITH_GRADIENTS = {
    "causal": {"causal": True},
    "window-3-1": {"window": (3, 1)},
    "window-1-0": {"window": (1, 0)},
    "window-20-open": {"window": (20, None)},
    "window-open-5": {"window": (None, 5)},
    "causal-window-18-4": {"causal": True, "window": (18, 4)},
    "top-left": {"causal": True, "q_offset": 0},
    "offset-minus-9": {"causal": True, "q_offset": -9},
    "offset-5-window-7-2": {"q_offset": 5, "window": (7, 2)},
    "offset-by-example": {"causal": True, "q_offset": np.array([-9, 17])},
    "offset-by-example-window": {"window": (4, 6), "q_offset": np.array([3, -20])},
}
FORWARD_ONLY = {
    "window-0-0": {"window": (0, 0)},
    "window-open-open": {"window": (None, None)},
    "window-beyond-everything": {"window": (1000, 1000)},
    "causal-window-open-0": {"causal": True, "window": (None, 0)},
    "offset-11": {"causal": True, "q_offset": 11},
    "offset-beyond-the-keys": {"causal": True, "q_offset": 500},
    "offset-before-every-key": {"causal": True, "q_offset": -500},
    "offset-alone": {"q_offset": 5},
}
OPTIONS = WITH_GRADIENTS | FORWARD_ONLY
FEWER_QUERIES, MORE_QUERIES = "B2-T35-S52-H4-K2-D16-f32", "B2-T52-S35-H2-D16-bf16"


@pytest.mark.parametrize("options", WITH_GRADIENTS.values(), ids=WITH_GRADIENTS)
def test_values_and_gradients(attend, options):
    c = case(FEWER_QUERIES)
    check(values_and_gradients(**options), attend, c.arrays(), c.cotangents())


@pytest.mark.parametrize("options", FORWARD_ONLY.values(), ids=FORWARD_ONLY)
def test_values(attend, options):
    check(forward(**options), attend, *case(FEWER_QUERIES).arrays())


@pytest.mark.parametrize("option", ["causal", "window-3-1", "top-left", "offset-minus-9"])
def test_more_queries_than_keys(attend, option):
    c = case(MORE_QUERIES)
    check(values_and_gradients(**OPTIONS[option]), attend, c.arrays(), c.cotangents())


@pytest.mark.parametrize("option", ["causal-window-18-4", "offset-by-example-window"])
def test_tangents(attend, option):
    c = case(FEWER_QUERIES)
    check(tangents(**OPTIONS[option]), attend, c.arrays(), c.tangents())


@pytest.mark.parametrize("offset", [np.int32(7), np.array([7, -4])], ids=["0-d", "per-example"])
def test_traced_offset(attend, offset):
    """An offset that is known only when the program runs: forward and gradients."""
    c = case(FEWER_QUERIES)

    def with_offset(attend, inputs, cotangents, offset):
        return values_and_gradients(q_offset=offset)(attend, inputs, cotangents)

    program = Program(with_offset, {"causal": True, "window": (9, None)}, derivative=(False, True))
    check(program, attend, c.arrays(), c.cotangents(), offset)


@pytest.mark.parametrize("offset", [np.int8(3), np.int64(3), np.array([3, 3], np.uint16), np.array([3])], ids=repr)
def test_offset_of_any_integer_dtype(attend, offset):
    check(forward(causal=True, q_offset=offset), attend, *case(FEWER_QUERIES).arrays())


def test_offset_of_several_leading_dims(attend):
    arrays = case("B2x3-T19-S35-f32").arrays()
    for offset in (np.array([1, -3, 20]), np.array([[2], [9]]), np.arange(6).reshape(2, 3)):
        check(forward(causal=True, q_offset=offset), attend, *arrays)


def test_decoding_step_by_step_is_the_full_pass(attend):
    """One compiled step serves every position: the traced offset is the number of the token."""
    q, k, v = case("B2-T13-S13-H4-K2-f32").arrays()
    step = jax.jit(lambda q, i: attend(q, k, v, causal=True, q_offset=i, return_lse=True))
    outs, lses = zip(*(step(q[:, i : i + 1], i) for i in range(13)), strict=True)
    steps = jnp.concatenate(outs, axis=1), jnp.concatenate(lses, axis=2)
    assert_agrees(steps, forward(causal=True), q, k, v)


@pytest.mark.parametrize("options", [{"causal": True}, {"window": (None, 0)}, {"window": (40, 0)}], ids=str)
def test_the_future_cannot_be_seen(attend, options):
    """Bit for bit: changing later keys and values leaves earlier rows as they are."""
    q, k, v = case("B2-T40-f32").arrays()
    later = np.s_[:, 23:]
    k2, v2 = k.copy(), v.copy()
    k2[later], v2[later] = 9 * k[later], -v[later]
    before, after = attend(q, k, v, **options), attend(q, k2, v2, **options)
    np.testing.assert_array_equal(before[:, :23], after[:, :23])
    assert (before[:, 23:] != after[:, 23:]).any(axis=-1).all()


@pytest.mark.parametrize("wide", [2**31 - 1, 2**31, 2**40])
def test_a_window_as_wide_as_an_integer_is_unbounded(attend, wide):
    """A caller's way to say "no window": positions must not overflow."""
    arrays = case(FEWER_QUERIES).arrays()
    np.testing.assert_array_equal(attend(*arrays, window=(wide, 3)), attend(*arrays, window=(None, 3)))
    np.testing.assert_array_equal(attend(*arrays, window=(3, wide)), attend(*arrays, window=(3, None)))


@pytest.mark.parametrize("offset", [2**31 - 1, -(2**31)])
@pytest.mark.parametrize("traced", [False, True], ids=["static", "traced"])
def test_the_largest_offsets_do_not_overflow(attend, offset, traced):
    arrays = case(FEWER_QUERIES).arrays()
    out, lse = attend(*arrays, causal=True, q_offset=np.int32(offset).reshape(1) if traced else offset, return_lse=True)
    if offset > 0:
        np.testing.assert_array_equal(out, attend(*arrays))
    else:
        assert not np.any(out) and (np.asarray(lse) == -np.inf).all()
