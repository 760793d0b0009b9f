"""Bias, mask, segments, positions, prefix, chunk, softcap, alibi, sinks, dropout and mods (R3-R8, R13, R23)."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import flash_jax
from flash_jax.triton import stored
from tests.support.accuracy import check
from tests.support.cases import case, poisoned
from tests.support.mods import READS, checkered, same_document_nearby
from tests.support.mods import documents as mod_documents
from tests.support.programs import everything, tangents, values_and_gradients

pytestmark = pytest.mark.gpu

SHAPES = ["B2-T300-S333-H4-K2-D64-bf16", "B2-T333-S300-H4-K1-D128-Dv64-bf16", "B2-T190-S210-H4-K2-D64-f32"]
RNG = np.random.default_rng(0)


def documents(length, count):
    """Ids [2, length] of packed documents, the last slots padding."""
    ends = np.sort(RNG.integers(1, length - 9, (2, count)), axis=-1)
    ids = (np.arange(length)[None, :, None] >= ends[:, None, :]).sum(-1)
    return np.where(np.arange(length) >= length - 9, -1, ids).astype(np.int32)


def score_mod(kind):
    """The option of this kind of READS."""
    return {"score_mod": READS[kind].function}


def tables(kind, c):
    """The shapes of what it reads."""
    return {"mod_operands": READS[kind].tables(c)}


def documents_after_a_table(b, h, i, j, _, ids):
    return same_document_nearby(b, h, i, j, ids)


def mapped(mask_mod, c, *operands):
    """A mask_mod with its map."""
    found = flash_jax.block_mask(mask_mod, (*c.batch, c.H, c.T, c.S), operands)
    return {"mask_mod": mask_mod, "mod_operands": operands, "block_mask": found}


# name -> a function of a case that gives (options, {name of a differentiable operand: its shape}).
FEATURES = {
    "bias-full": lambda c: ({}, {"bias": (*c.batch, c.H, c.T, c.S)}),
    "bias-shared": lambda c: ({"causal": True}, {"bias": (1, 1, c.T, c.S)}),
    "bias-by-head": lambda c: ({}, {"bias": (c.H, c.T, c.S)}),
    "bias-by-key": lambda c: ({"causal": True}, {"bias": (*c.batch, 1, 1, c.S)}),
    "bias-by-query": lambda c: ({}, {"bias": (1, c.H, c.T, 1)}),
    "mask-full": lambda c: ({"mask": RNG.random((*c.batch, c.H, c.T, c.S)) < 0.7}, {}),
    "mask-by-key": lambda c: ({"mask": RNG.random((*c.batch, 1, 1, c.S)) < 0.7, "causal": True}, {}),
    "mask-shared": lambda c: ({"mask": RNG.random((c.T, c.S)) < 0.02}, {}),
    "segments": lambda c: ({"q_segment_ids": documents(c.T, 4), "kv_segment_ids": documents(c.S, 4)}, {}),
    "segments-causal": lambda c: (
        {"q_segment_ids": documents(c.T, 3), "kv_segment_ids": documents(c.S, 3), "causal": True, "q_offset": 0},
        {},
    ),
    "segments-unsorted": lambda c: (
        {"q_segment_ids": RNG.integers(-1, 3, (2, c.T)), "kv_segment_ids": RNG.integers(-1, 3, (2, c.S))},
        {},
    ),
    "positions": lambda c: (
        {"q_positions": RNG.permutation(c.T), "kv_positions": RNG.permutation(c.S), "causal": True},
        {},
    ),
    "positions-window": lambda c: ({"q_positions": np.sort(RNG.integers(0, c.S, (2, c.T))), "window": (40, 7)}, {}),
    "prefix": lambda c: ({"causal": True, "prefix_lengths": np.array([0, 137])}, {}),
    "prefix-window": lambda c: ({"causal": True, "prefix_lengths": 100, "window": (150, None)}, {}),
    "chunk": lambda c: ({"chunk_size": 96, "causal": True}, {}),
    "chunk-both-ways": lambda c: ({"chunk_size": 50, "q_offset": np.array([-20, 31])}, {}),
    "softcap": lambda c: ({"softcap": 2.0, "causal": True}, {}),
    "softcap-30": lambda c: ({"softcap": 30.0}, {}),
    "softcap-50-far": lambda c: ({"softcap": 50.0, "scale": 1.5, "causal": True}, {}),
    "softcap-scale": lambda c: ({"softcap": 20.0}, {"scale": ()}),
    "alibi": lambda c: ({"causal": True}, {"alibi_slopes": (c.H,)}),
    "alibi-by-example": lambda c: ({}, {"alibi_slopes": (*c.batch, c.H)}),
    "sinks": lambda c: ({"causal": True, "q_offset": -20}, {"sinks": (c.H,)}),
    "dropout": lambda c: ({"dropout_rate": 0.3, "dropout_key": jax.random.key(3), "causal": True}, {}),
    "dropout-most": lambda c: ({"dropout_rate": 0.9, "dropout_key": jax.random.key(4)}, {"sinks": (c.H,)}),
    "mod-relative": lambda c: ({"causal": True, **score_mod("difference")}, tables("difference", c)),
    "mod-rows-columns": lambda c: (
        {**score_mod("several"), "softcap": 5.0},
        tables("several", c),
    ),
    "mod-constants": lambda c: (score_mod("head"), tables("head", c)),
    "mod-dense": lambda c: (score_mod("entry"), tables("entry", c)),
    "mod-dense-turned": lambda c: ({"causal": True, **score_mod("turned-entry")}, tables("turned-entry", c)),
    "mask-mod": lambda c: ({"mask_mod": same_document_nearby, "mod_operands": (mod_documents(c),)}, {}),
    "both-mods": lambda c: (
        {"mask_mod": documents_after_a_table, "mod_operands": (mod_documents(c),), **score_mod("difference")},
        tables("difference", c),
    ),
    "block-mask": lambda c: (mapped(checkered, c), {}),
    "block-mask-causal": lambda c: ({**mapped(checkered, c), "causal": True, "kv_lengths": np.array([170, 290])}, {}),
    "block-mask-documents": lambda c: (mapped(same_document_nearby, c, mod_documents(c)), {}),
    "all": lambda c: (
        {
            "causal": True, "window": (250, None), "prefix_lengths": np.array([30, 0]), "softcap": 15.0,
            "q_segment_ids": documents(c.T, 1), "kv_segment_ids": documents(c.S, 1), "kv_lengths": np.array([170, 290]),
            "mask": RNG.random((1, c.H, c.T, c.S)) < 0.9, "dropout_rate": 0.1, "dropout_key": jax.random.key(5),
        },
        {"bias": (1, c.H, c.T, c.S), "alibi_slopes": (c.H,), "sinks": (c.H,), "scale": ()},
    ),
}  # fmt: skip


@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("name", SHAPES)
def test_values_and_gradients(attend, name, feature):
    c = case(name)
    options, shapes = FEATURES[feature](c)
    check(values_and_gradients(**options), attend, c.inputs(**shapes), c.cotangents())


@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("name", SHAPES)
def test_tangents(attend, name, feature):
    """Along all that is differentiable at once."""
    c = case(name)
    options, shapes = FEATURES[feature](c)
    check(tangents(**options), attend, c.inputs(**shapes), c.inputs(1, **shapes))


@pytest.mark.parametrize(
    "name",
    [
        "B3-T300-S333-H4-K2-D64-bf16",
        "B2-T190-S210-H4-K2-D128-f16",
        "B4-T300-S333-H4-K2-D128-Dv64-bf16",
        "B6-T190-S210-H4-K2-D64-f16",
        "B4-T190-S210-H2-D64-f32",
    ],
)
def test_gradient_of_a_bias_example_by_example(attend, monkeypatch, name):
    """By the kernel of dq, twice the same, two 16-bit examples in one program; of rows of tiles some are skipped."""
    monkeypatch.setattr(stored, "_ENOUGH", 1)
    c = case(name)
    given = c.inputs(bias=(1, c.H, c.T, c.S)), c.cotangents()
    program = values_and_gradients(window=(100, 20))
    first = check(program, attend, *given)
    for x, y in zip(jax.tree.leaves(first), jax.tree.leaves(check(program, attend, *given)), strict=True):
        assert np.asarray(x).tobytes() == np.asarray(y).tobytes()


@pytest.mark.parametrize("name", ["B2-T300-S333-H4-K2-D64-bf16", "B2-T190-S210-H4-K2-D64-f32"])
@pytest.mark.parametrize("by", ["mask", "segments"])
def test_hidden_slots_may_hold_nan(attend, name, by):
    c = case(name)
    dead_rows, dead_keys = np.s_[:, 150:170], np.s_[:, 77:140]
    if by == "mask":
        mask = np.ones((2, 1, c.T, c.S), bool)
        mask[:, :, 150:170], mask[..., 77:140] = False, False
        options = {"mask": mask}
    else:
        q_ids, kv_ids = np.zeros((2, c.T), np.int32), np.zeros((2, c.S), np.int32)
        q_ids[dead_rows], kv_ids[dead_keys] = -1, 5
        options = {"q_segment_ids": q_ids, "kv_segment_ids": kv_ids}
    q, k, v = c.arrays()
    dout, dlse = c.cotangents()
    bad = (poisoned(q, dead_rows), poisoned(k, dead_keys), poisoned(v, dead_keys)), (poisoned(dout, dead_rows), dlse)
    check(values_and_gradients(softcap=9.0, **options), attend, (q, k, v), (dout, dlse), given=bad)
    dots = c.tangents()
    bad_dots = tuple(poisoned(x, slots) for x, slots in zip(dots, (dead_rows, dead_keys, dead_keys), strict=True))
    check(tangents(softcap=9.0, **options), attend, (q, k, v), dots, given=(bad[0], bad_dots))


def test_dropout_keeps_what_dropout_mask_says(attend):
    """The very entries, also in tiles that no other test has: v is the unit matrix, so out shows the probabilities."""
    T, key = 256, jax.random.key(8)
    q, k = jnp.zeros((2, T, 2, 64), jnp.bfloat16), jnp.zeros((2, T, 2, 64), jnp.bfloat16)
    v = jnp.broadcast_to(jnp.eye(T, dtype=jnp.bfloat16)[None, :, None], (2, T, 2, T))
    out = jax.jit(functools.partial(attend, dropout_rate=0.25, dropout_key=key))(q, k, v)
    np.testing.assert_array_equal(jnp.moveaxis(out, -2, -3) > 0, flash_jax.dropout_mask(key, 0.25, (2, 2, T, T)))


@pytest.mark.parametrize(
    "feature", ["bias-shared", "segments-causal", "dropout", "mod-relative", "mod-dense", "block-mask", "all"]
)
def test_repeats_are_bitwise_equal(attend, feature):
    c = case("B2-T300-S333-H4-K2-D64-bf16")
    options, shapes = FEATURES[feature](c)
    run = jax.jit(functools.partial(everything(**options), attend))
    given = c.inputs(**shapes), c.cotangents(), c.inputs(1, **shapes)
    first = jax.tree.leaves(run(*given))
    for _ in range(20):
        for x, y in zip(first, jax.tree.leaves(run(*given)), strict=True):
            assert np.asarray(x).tobytes() == np.asarray(y).tobytes()
