"""`mask`: True = attend, broadcast over any dims, besides every other condition (R7); what it hides may be NaN."""

import functools

import jax
import numpy as np
import pytest

from tests.support.accuracy import check
from tests.support.cases import FEWER_QUERIES, MORE_QUERIES, case, poisoned
from tests.support.programs import Program, everything, forward, values_and_gradients
from tests.support.structure import lowered_sizes

pytestmark = pytest.mark.thorough


def drawn_mask(c, shape, share=0.6):
    """True in about `share` of the entries."""
    return np.random.default_rng(c.T).random(shape) < share


@pytest.mark.parametrize(
    "name, shape, options",
    [
        (FEWER_QUERIES, (2, 4, 19, 35), {"causal": True}),
        (MORE_QUERIES, (2, 1, 35, 19), {"window": (20, 2)}),
    ],
    ids=["B-H-T-S", "B-1-T-S"],
)
def test_values_gradients_and_tangents(attend, name, shape, options):
    """Among the rows and keys some that the mask hides altogether, for one head or for all."""
    c = case(name)
    mask = drawn_mask(c, shape)
    mask[0, 0, 7] = mask[1, :, 11] = mask[1, ..., 5] = False
    given = c.arrays(), c.cotangents(), c.tangents()
    (out, lse), (dq, dk, _), _ = check(everything(mask=mask, **options), attend, *given)
    assert not np.any(out[1, 11]) and not np.any(dq[0, 7, 0]) and not np.any(dk[1, 5])
    assert (np.asarray(lse)[1, :, 11] == -np.inf).all()


@pytest.mark.parametrize("shape", [(2, 1, 1, 35), (1, 4, 19, 1), (19, 35), ()], ids=str)
def test_broadcast_shapes(attend, shape):
    """Case D02 is the first, a mask of keys for each example."""
    c = case(FEWER_QUERIES)
    check(forward(mask=np.asarray(drawn_mask(c, shape))), attend, *c.arrays())


def test_is_the_fifth_argument_by_position(attend):
    q, k, v = case("B2-T5-S7-f32").arrays()
    mask = np.arange(7) % 3 > 0
    np.testing.assert_array_equal(attend(q, k, v, None, mask), attend(q, k, v, mask=mask))


@pytest.mark.parametrize("value", [True, False])
def test_of_one_value(attend, value):
    q, k, v = case("B2-T19-S35-f32").arrays()
    out, lse = attend(q, k, v, mask=np.full((19, 35), value), return_lse=True)
    if value:
        np.testing.assert_allclose(out, attend(q, k, v), rtol=1e-5, atol=1e-6)
    else:
        assert not np.any(out) and (np.asarray(lse) == -np.inf).all()


@pytest.mark.parametrize("shape", ["key", "matrix"])
def test_what_it_hides_from_all_may_be_nan(attend, shape):
    """Keys that no row attends and rows that attend none, NaN in inputs, cotangents and tangents alike (R1)."""
    c = case(FEWER_QUERIES)
    mask = np.arange(35) % 4 > 0 if shape == "key" else drawn_mask(c, (2, 4, 19, 35))
    rows = np.s_[:0] if shape == "key" else np.s_[1, 5:8]
    keys = np.s_[:, ::4]
    if shape == "matrix":
        mask[:, :, :, ::4] = mask[1, :, 5:8] = False
    (q, k, v), (dout, dlse), (tq, tk, tv) = c.arrays(), c.cotangents(), c.tangents()
    given = (
        (poisoned(q, rows), poisoned(k, keys), poisoned(v, keys)),
        (poisoned(dout, rows), dlse if shape == "key" else poisoned(dlse, np.s_[1, :, 5:8])),
        (poisoned(tq, rows), poisoned(tk, keys), poisoned(tv, keys)),
    )
    check(everything(mask=mask), attend, (q, k, v), (dout, dlse), (tq, tk, tv), given=given)


@pytest.mark.parametrize("axis", [0, None], ids=["mapped", "not-mapped"])
def test_vmap_of_values_and_gradients(attend, axis):
    """Case C06 with its 28 heads on 4 scaled to 6 on 2: a mask that is broadcast over heads, shared heads, a batch."""
    c = case("B3x1-T19-H6-K2-D8-bf16")
    mask = drawn_mask(c, (3, 1, 1, 19, 19) if axis == 0 else (1, 1, 19, 19))

    def mapped(attend, inputs, cotangents, mask):
        one = lambda x, ct, m: values_and_gradients(mask=m)(attend, x, ct)  # noqa: E731
        return jax.vmap(one, in_axes=(0, 0, axis))(inputs, cotangents, mask)

    check(Program(mapped, derivative=(False, True)), attend, c.arrays(), c.cotangents(), mask)


def test_a_mask_that_is_not_mapped_is_not_copied(attend):
    """Case C06: under vmap nothing has the size of the mask times the examples, nor times the heads."""
    c = case("B5-T150-S140-H2-K1-D4-f32")
    mask = drawn_mask(c, (1, 150, 140))
    mapped = jax.vmap(functools.partial(attend, mask=mask))
    assert max(lowered_sizes(mapped, *c.arrays())) < 2 * mask.size


def test_jacobian(attend):
    """Case C06 again."""
    q, k, v = case("T3-S4-H2-K1-D2-f32").arrays()
    mask = np.array([[True, False, True, True], [False] * 4, [True] * 4])

    def jacobian(attend, q, k, v):
        return jax.jacrev(lambda q: attend(q, k, v, return_lse=True))(q)

    check(Program(jacobian, {"mask": mask}, derivative=True), attend, q, k, v)


def test_no_keys_or_no_queries(attend):
    for name, shape in (("B2-T5-S0-H2-f32", (2, 1, 5, 1)), ("B2-T0-S5-H2-f32", (2, 1, 1, 5))):
        c = case(name)
        out, lse = attend(*c.arrays(), mask=np.ones(shape, bool), return_lse=True)
        assert out.shape == c.arrays()[0].shape and not np.any(out) and (np.asarray(lse) == -np.inf).all()
