"""The tangent kernel (`flash_jax/triton/tangent.py`) alone, in interpret mode: every option, every input that moves.

What both blockwise implementations promise of tangents, the files of each option hold them to; here is what a kernel
of its own can get wrong.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import flash_jax
from flash_jax import BlockSizes, triton
from flash_jax.spec import AttentionSpec, Operands
from flash_jax.triton import tiling
from tests.support import gpu_compile
from tests.support.accuracy import check
from tests.support.cases import FEWER_QUERIES, MORE_QUERIES, case, poisoned
from tests.support.mods import READS, documents, same_document_nearby
from tests.support.programs import Program, keywords, tangents
from tests.support.structure import named

pytestmark = pytest.mark.thorough

KERNEL = "flash_attention_tangent_kernel"


@pytest.fixture
def attend():
    with flash_jax.interpret_mode():
        yield functools.partial(
            flash_jax.flash_attention, implementation="triton", block_sizes=BlockSizes(block_q=16, block_kv=16)
        )


def ids(length, seed):
    """Segment ids [2, length], the last slots padding."""
    found = np.sort(np.random.default_rng(seed).integers(0, 4, (2, length))).astype(np.int32)
    found[:, -3:] = -1
    return found


def a_mask(c, share=0.7):
    return np.random.default_rng(0).random((1, c.H, c.T, c.S)) < share


# name -> a function of a case that gives (options, {name of a differentiable operand that moves, too: its shape}).
OPTIONS = {
    "none": lambda c: ({}, {}),
    "causal": lambda c: ({"causal": True}, {}),
    "window": lambda c: ({"window": (6, 2)}, {}),
    "chunk-prefix": lambda c: ({"causal": True, "chunk_size": 11, "prefix_lengths": np.array([0, 9])}, {}),
    "lengths": lambda c: ({"causal": True, "q_lengths": np.array([c.T, 7]), "kv_lengths": np.array([9, c.S])}, {}),
    "segments": lambda c: ({"q_segment_ids": ids(c.T, 1), "kv_segment_ids": ids(c.S, 2)}, {}),
    "positions": lambda c: (
        {"q_positions": np.random.default_rng(3).permutation(c.T).astype(np.int32), "causal": True},
        {},
    ),
    "mask": lambda c: ({"mask": a_mask(c)}, {}),
    "bias": lambda c: ({"causal": True}, {"bias": (*c.batch, c.H, c.T, c.S)}),
    "bias-by-key": lambda c: ({}, {"bias": (1, c.H, 1, c.S)}),
    "bias-by-query": lambda c: ({}, {"bias": (c.T, 1)}),
    "softcap-scale": lambda c: ({"softcap": 3.0}, {"scale": ()}),
    "alibi": lambda c: ({"causal": True}, {"alibi_slopes": (*c.batch, c.H)}),
    "sinks": lambda c: ({"causal": True, "q_offset": -9}, {"sinks": (c.H,)}),
    "sinks-bias": lambda c: ({}, {"sinks": (c.H,), "bias": (c.H, 1, 1)}),
    "dropout": lambda c: ({"dropout_rate": 0.3, "dropout_key": jax.random.key(3)}, {}),
    "score-mod": lambda c: ({"score_mod": READS["several"].function}, {"mod_operands": READS["several"].tables(c)}),
    "mask-mod": lambda c: ({"mask_mod": same_document_nearby, "mod_operands": (documents(c),)}, {}),
    "block-mask": lambda c: (
        {
            "mask_mod": same_document_nearby,
            "mod_operands": (documents(c),),
            "block_mask": flash_jax.block_mask(same_document_nearby, (*c.batch, c.H, c.T, c.S), (documents(c),)),
        },
        {},
    ),
    "all": lambda c: (
        {
            "causal": True, "window": (25, None), "prefix_lengths": np.array([3, 0]), "softcap": 15.0,
            "q_segment_ids": np.minimum(ids(c.T, 1), 1), "kv_segment_ids": np.minimum(ids(c.S, 2), 1),
            "kv_lengths": np.array([17, c.S]), "mask": a_mask(c, 0.9), "dropout_rate": 0.1,
            "dropout_key": jax.random.key(5), "score_mod": READS["difference"].function,
        },
        {
            "bias": (1, c.H, c.T, c.S), "alibi_slopes": (c.H,), "sinks": (c.H,), "scale": (),
            "mod_operands": READS["difference"].tables(c),
        },
    ),
}  # fmt: skip


BOTH = ("none", "all")


@pytest.mark.parametrize(
    "option, name",
    [(x, FEWER_QUERIES) for n, x in enumerate(OPTIONS) if n % 2 or x in BOTH]
    + [(x, MORE_QUERIES) for n, x in enumerate(OPTIONS) if n % 2 == 0 or x in BOTH],
    ids=str,
)
def test_option(attend, option, name):
    """Half of them with fewer queries than keys in float32, half with more in bfloat16."""
    c = case(name)
    options, shapes = OPTIONS[option](c)
    check(tangents(**options), attend, c.inputs(**shapes), c.inputs(1, **shapes))


@pytest.mark.parametrize(
    "name", ["T33-S20-H6-K2-D1-f16", "T20-S37-H3-K1-D40-Dv24-bf16", "B2x2-T17-S18-D80-Dv96-f32", "T18-S21-D129-f32"]
)
def test_head_dims_groups_and_leading_dims(attend, name):
    c = case(name)
    check(tangents(causal=True), attend, c.arrays(), c.tangents())


MOVING = ["query", "key", "value", "scale", "bias", "alibi_slopes", "sinks", "mod_operands"]


@pytest.mark.parametrize("n, moving", [*enumerate(MOVING)], ids=str)
def test_one_input_moves(attend, n, moving):
    """While all others are there, at rest: their tangents are symbolic zeros, which the kernel does not read."""
    c, mod = case((FEWER_QUERIES, MORE_QUERIES)[n % 2]), READS["difference"]
    shapes = {
        "bias": (c.H, 1, c.S),
        "alibi_slopes": (c.H,),
        "sinks": (c.H,),
        "scale": (),
        "mod_operands": mod.tables(c),
    }
    found = (c.inputs(seed, **shapes) for seed in (0, 1))
    inputs, directions = (dict(zip(MOVING, x[:3], strict=False)) | x[3] for x in found)

    def along(attend, inputs, direction):
        def f(x):
            given = inputs | {moving: x}
            q, k, v = (given.pop(name) for name in MOVING[:3])
            return attend(q, k, v, **keywords(attend, given), return_lse=True)

        return jax.jvp(f, (inputs[moving],), (direction,))[1]

    program = Program(along, {"causal": True, "score_mod": mod.function}, derivative=True)
    check(program, attend, inputs, directions[moving])


# What nobody attends.


@pytest.mark.parametrize(
    "by, bad", [("mask", np.nan), ("segments", np.inf), ("lengths", np.nan), ("mask_mod", np.inf)], ids=str
)
def test_hidden_slots_may_hold_anything(attend, by, bad):
    """In primals and tangents: keys that no query attends, and rows that attend nothing."""
    c = case("B2-T37-S35-H4-K2-D8-bf16")
    rows, keys = np.arange(c.T) >= 30, np.arange(c.S) >= 27
    hidden = {
        "mask": {"mask": ~rows[:, None] & ~keys},
        "segments": {
            "q_segment_ids": np.broadcast_to(np.where(rows, -1, 0), (2, c.T)),
            "kv_segment_ids": np.broadcast_to(np.where(keys, 7, 0), (2, c.S)),
        },
        "lengths": {"q_lengths": 30, "kv_lengths": 27},
        "mask_mod": {"mask_mod": lambda b, h, i, j: (i < 30) & (j < 27)},
    }[by]
    spoil = lambda x, slots: np.where(slots[:, None, None], np.asarray(bad, x.dtype), x)  # noqa: E731
    spoiled = [tuple(map(spoil, x, (rows, keys, keys))) for x in (c.arrays(), c.tangents())]
    check(tangents(**hidden), attend, c.arrays(), c.tangents(), given=spoiled)


def test_hidden_entries_of_a_bias_may_move_to_nan(attend):
    c = case(FEWER_QUERIES)
    shapes = {"bias": (c.H, c.T, c.S)}
    *inputs, riding = c.inputs(**shapes)
    *directions, moves = c.inputs(1, **shapes)
    after = np.triu(np.ones((c.T, c.S), bool), 1)
    given = [
        (*x, {"bias": np.where(after, np.nan, y["bias"]).astype(np.float32)})
        for x, y in ((inputs, riding), (directions, moves))
    ]
    program = tangents(causal=True, q_offset=0)
    check(program, attend, (*inputs, riding), (*directions, moves), given=given)


@pytest.mark.parametrize("sinks", [False, True], ids=["no-sinks", "sinks"])
def test_rows_that_only_the_bias_makes_dead(attend, sinks):
    """Their queries may hold NaN; with a sink, lse is the sink and moves with it."""
    c = case(FEWER_QUERIES)
    shapes = {"bias": (c.H, c.T, 1)} | ({"sinks": (c.H,)} if sinks else {})
    *inputs, riding = c.inputs(**shapes)
    *directions, moves = c.inputs(1, **shapes)
    riding["bias"][:, 5:9] = -np.inf
    q, dq = (poisoned(x, np.s_[:, 5:9]) for x in (inputs[0], directions[0]))
    given = (q, *inputs[1:], riding), (dq, *directions[1:], moves)
    d_out, d_lse = check(tangents(), attend, (*inputs, riding), (*directions, moves), given=given)
    assert not np.any(d_out[:, 5:9]) and np.any(d_out[:, 9:])
    expected = moves["sinks"][:, None] if sinks else 0
    np.testing.assert_array_equal(d_lse[:, :, 5:9], np.broadcast_to(expected, (2, c.H, 4)))


# Rows that move as a whole.


@pytest.mark.parametrize("dtype", ["bf16", "f32"])
def test_a_row_that_moves_as_a_whole_leaves_the_output(attend, dtype):
    """Its scores moved by a thousand each: lse moves by as much, and the output by nothing but rounding."""
    c = case(f"B2-T19-S35-H4-K2-D8-{dtype}")
    q, k, v = c.arrays()
    bias = c.normal((2, 4, 19, 1), 0, "bias").astype(np.float32)
    moves = np.full_like(bias, 1000.0)
    d_out, d_lse = jax.jvp(lambda b: attend(q, k, v, b, return_lse=True), (bias,), (moves,))[1]
    np.testing.assert_allclose(d_lse, np.broadcast_to(1000.0, d_lse.shape), rtol=1e-6)
    assert np.abs(np.asarray(d_out, np.float32)).max() <= 1000 * 2e-6


# Transformations.


def test_vmap_over_tangents_and_some_primals(attend):
    """Each array has its own leading dims, in the place of copies: tangents alone mapped, primals alone, both."""
    c = case("B3x2-T9-S19-H4-K2-D8-f32")
    (q, k, v), (dq, dk, dv) = c.arrays(), c.tangents()
    bias, d_bias = (c.normal((3, 2, 4, 9, 19), seed, "bias") for seed in (0, 1))

    def mapped(attend, inputs, directions):
        def one(q, k, v, bias, dq, dk, dv, d_bias):
            f = lambda *x: attend(*x, return_lse=True)  # noqa: E731
            return jax.jvp(f, (q, k, v, bias), (dq, dk, dv, d_bias))[1]

        return jax.vmap(one, in_axes=(0, None, None, None, None, 0, None, 0))(*inputs, *directions)

    program = Program(mapped, {"causal": True}, derivative=True)
    check(program, attend, (q, k[0], v[0], bias[0]), (dq[0], dk, dv[0], d_bias))


def test_what_is_not_mapped_is_not_copied():
    """As `jax.jacfwd` maps: the kernel gets the very arrays, one key for all directions."""
    c, spec = case("B1-T9-S12-H4-K2-D8-f32"), AttentionSpec(scale=0.3, interpret=True)
    (q, k, v), (dout, dlse) = c.arrays(), c.cotangents()
    dots = {"query": np.broadcast_to(q, (5, *q.shape[1:])), "bias": np.zeros((5, 1, 9, 12), np.float32)}
    operands = Operands(bias=np.zeros((1, 4, 9, 12), np.float32))

    def run(q, k, v, operands, out, lse, dots):
        return triton.tangent((q, k, v, operands), out, lse, dots, spec)

    given = (q, k, v, operands, dout, dlse, dots)
    (call,) = named("pallas_call", run, *given)
    assert sorted(x.aval.size for x in call.invars) == sorted(x.size for x in jax.tree.leaves(given))
    assert [x.aval.shape for x in call.outvars] == [(5, *q.shape[1:]), (5, 4, 9)]


def test_under_x64(attend):
    """Loops count in 64 bits there, and numbers are wide unless told otherwise."""
    c = case(FEWER_QUERIES)
    options, shapes = OPTIONS["all"](c)
    given = c.inputs(**shapes), c.inputs(1, **shapes)
    narrow = jax.jit(functools.partial(tangents(**options), attend))(*given)
    with jax.enable_x64(True):
        wide = jax.jit(functools.partial(tangents(**options), attend))(*given)
    for x, y in zip(narrow, wide, strict=True):
        assert x.dtype == y.dtype == jnp.float32
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5)


# Sizes and programs.


def test_sizes_of_its_own(attend):
    sizes = BlockSizes(block_q=64, block_kv=16, tangent=BlockSizes(block_q=16, block_kv=64))
    c = case("T37-S70-H2-K1-D8-f32")
    check(tangents(window=(9, 20)), functools.partial(attend, block_sizes=sizes), c.arrays(), c.tangents())


def tile(sizes):
    """The tile for a head dim of 128 on an H200."""
    x = jax.ShapeDtypeStruct((1, 4096, 2, 128), jnp.bfloat16)
    with gpu_compile.lowering_for(gpu_compile.H200.name):
        return tiling.tile_for("tangent", AttentionSpec(block_sizes=sizes), x, x, x, Operands())


def test_sizes_of_the_forward_pass_are_cut_to_fit():
    """Which were chosen for half as many arrays; sizes that name the pass are taken as they are, or refused."""
    sizes = BlockSizes(block_q=128, block_kv=128, num_warps=8, num_stages=3)
    assert tile(sizes) == tiling.Tile(128, 128, 8, 1)
    assert tile(BlockSizes(128, 128, 8, 3, tangent=BlockSizes())) == tile(None)
    assert tile(BlockSizes(tangent=BlockSizes(64, 64, 8, 2))) == tiling.Tile(64, 64, 8, 2)
    with pytest.raises(ValueError, match="`block_sizes` for the tangent pass needs about 448 KiB"):
        tile(BlockSizes(tangent=sizes))
    with pytest.raises(ValueError, match="block_q of the tangent pass must be a power of two"):
        triton.check_block_sizes(AttentionSpec(block_sizes=BlockSizes(tangent=BlockSizes(block_q=24))))


def kernels(function):
    """The names of the kernels in a function of query, key and value, lowered for a GPU."""
    x = jax.ShapeDtypeStruct((1, 128, 2, 64), jnp.bfloat16)
    return set(gpu_compile.triton_ir(gpu_compile.lower(function, x, x, x)))


def test_a_program_for_a_gpu_has_the_kernel():
    """A tangent has it; a gradient has not, and what differentiates a tangent has what the tangent has."""
    attend = functools.partial(flash_jax.flash_attention, causal=True)
    pushed = lambda q, k, v: jax.jvp(attend, (q, k, v), (k, v, q))[1]  # noqa: E731
    forward = "flash_attention_forward_kernel"
    assert kernels(pushed) == {forward, KERNEL}
    assert KERNEL not in kernels(jax.grad(lambda *x: attend(*x).astype(jnp.float32).sum()))
    assert {forward, KERNEL} <= kernels(jax.value_and_grad(lambda *x: pushed(*x).astype(jnp.float32).sum()))


def test_a_tangent_of_the_sinks_alone_visits_no_tile():
    """It follows from out and lse."""
    x = jax.ShapeDtypeStruct((1, 128, 2, 64), jnp.bfloat16)
    attend = functools.partial(flash_jax.flash_attention, implementation="triton")
    pushed = lambda x, s: jax.jvp(lambda s: attend(x, x, x, sinks=s, return_lse=True), (s,), (s,))[1]  # noqa: E731
    lowered = gpu_compile.lower(pushed, x, jax.ShapeDtypeStruct((2,), jnp.float32))
    text = gpu_compile.triton_ir(lowered)[KERNEL]
    assert "tt.dot" not in text and "scf.for" not in text
