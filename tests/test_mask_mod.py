"""`mask_mod`: True where attention is allowed, besides every other condition; what it hides may be NaN (R1, R23)."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support.accuracy import check
from tests.support.cases import case, poisoned
from tests.support.mods import REACH, by_difference, documents, same_document, same_document_nearby
from tests.support.programs import everything, gradients, values_and_gradients

pytestmark = pytest.mark.thorough

FEW, MANY = "B2-T17-S34-H4-K2-D8-f32", "B2-T33-S18-H2-K1-D8-bf16"


def sparse(b, h, i, j):
    """Rows and keys among them that are hidden altogether, for one head or for all."""
    return ((i * 7 + j * 5 + b) % 3 > 0) & (i != 4 + h) & (j != 6) & ((i != 11) | (b == 0))


def as_mask(mask_mod, c, *operands):
    """The same, dense: [..., H, T, S]."""
    b, h, i, j = np.indices((2, c.H, c.T, c.S), dtype=np.int32)
    return np.asarray(mask_mod(b, h, i, j, *operands))


@pytest.mark.parametrize(
    "name, mask_mod, options",
    [(FEW, sparse, {"causal": True}), (MANY, same_document_nearby, {"window": (20, 2)})],
    ids=["sparse", "documents"],
)
def test_values_gradients_and_tangents(attend, name, mask_mod, options):
    c = case(name)
    operands = () if mask_mod is sparse else (documents(c),)
    program = everything(mask_mod=mask_mod, mod_operands=operands, **options)
    (out, lse), (dq, dk, _), _ = check(program, attend, c.arrays(), c.cotangents(), c.tangents())
    if mask_mod is sparse:
        assert not np.any(out[1, 11]) and not np.any(dq[0, 5, 1]) and not np.any(dk[:, 6])
        assert (np.asarray(lse)[1, :, 11] == -np.inf).all()


@pytest.mark.parametrize(
    "mask_mod, options",
    [(sparse, {"softcap": 2.0, "kv_lengths": np.array([30, 21])}), (same_document_nearby, {})],
    ids=["sparse", "documents"],
)
def test_is_the_mask_of_the_same_entries(attend, mask_mod, options):
    """Values and gradients, but for the order in which a compiler adds."""
    c = case(FEW)
    operands = () if mask_mod is sparse else (documents(c),)
    mask = as_mask(mask_mod, c, *operands)

    def run(**how):
        program = functools.partial(values_and_gradients(**how, **options), attend)
        return jax.tree.leaves(jax.jit(program)(c.arrays(), c.cotangents()))

    for x, y in zip(run(mask_mod=mask_mod, mod_operands=operands), run(mask=mask), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)


def test_together_with_a_mask(attend):
    c = case(FEW)
    mask = np.random.default_rng(0).random((2, 1, 17, 34)) < 0.7
    check(values_and_gradients(mask_mod=sparse, mask=mask), attend, c.arrays(), c.cotangents())


@pytest.mark.parametrize("modified", [False, True], ids=["alone", "with-score-mod"])
def test_what_it_hides_from_all_may_be_nan(attend, modified):
    """Keys that no row attends and rows that attend none, NaN in inputs, cotangents and tangents alike."""
    c, rows, keys = case(FEW), np.s_[1, 5:8], np.s_[:, 2::4]

    def hiding(b, h, i, j, *_):
        return (j % 4 != 2) & ((b != 1) | (i < 5) | (i >= 8))

    options = {"mask_mod": hiding, **({"score_mod": by_difference} if modified else {})}
    tables = {"mod_operands": ((4, 2 * REACH + 1),)} if modified else {}
    *inputs, riding = c.inputs(**tables)
    *directions, more = c.inputs(1, **tables)
    dout, dlse = c.cotangents()

    def bad(q, k, v):
        return poisoned(q, rows), poisoned(k, keys), poisoned(v, keys)

    true = (*inputs, riding), (dout, dlse), (*directions, more)
    cotangents = poisoned(dout, rows), poisoned(dlse, np.s_[1, :, 5:8])
    given = (*bad(*inputs), riding), cotangents, (*bad(*directions), more)
    (out, _), (dq, dk, *_), _ = check(everything(**options), attend, *true, given=given)
    assert not np.any(out[rows]) and not np.any(dq[rows]) and not np.any(dk[keys])


@pytest.mark.parametrize("value", [True, False])
def test_of_one_value(attend, value):
    q, k, v = case("B2-T19-S35-f32").arrays()
    out, lse = attend(q, k, v, mask_mod=lambda b, h, i, j: value, return_lse=True)
    if value:
        np.testing.assert_allclose(out, attend(q, k, v), rtol=1e-5, atol=1e-6)
    else:
        assert not np.any(out) and (np.asarray(lse) == -np.inf).all()


def test_both_mods_share_their_operands(attend):
    c = case(FEW)
    ids = documents(c)

    def shifted(s, b, h, i, j, t, ids):
        return jnp.where(ids[b, i] == 0, s, s + t[h, i - j + REACH])

    def documents_of(b, h, i, j, t, ids):
        return same_document(b, h, i, j, ids)

    program = values_and_gradients(score_mod=shifted, mask_mod=documents_of, mod_operands=(ids,), causal=True)
    check(program, attend, c.inputs(mod_operands=((4, 2 * REACH + 1),)), c.cotangents())


def test_floats_that_only_a_mask_mod_reads_have_no_gradient(attend):
    """They decide, and no more: the gradient is 0, at whatever place they are read."""
    c = case(FEW)

    def above(b, h, i, j, t):
        return t[b, i // 2] < t[b, (j * 3) % 20] + 0.7

    *_, operands = check(gradients(mask_mod=above), attend, c.inputs(mod_operands=((2, 20),)), c.cotangents())
    assert not np.any(operands["mod_operands"][0])
