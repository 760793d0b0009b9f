"""`block_mask`: the blocks of a mask_mod, found once, so that tiles in which nothing is allowed are not visited."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import flash_jax
from flash_jax import BlockMask, BlockSizes, block_mask
from tests.support.accuracy import check
from tests.support.cases import case, poisoned
from tests.support.mods import checkered
from tests.support.programs import Program, values_and_gradients

pytestmark = pytest.mark.thorough

# What the map says.


def banded(b, h, i, j):
    return (j <= i) & (i - j < 150 * (h + 1)) & ((b == 0) | (j >= 128))


def by_ids(b, h, i, j, ids):
    return ids[b, i] == ids[b, j]


def growing_ids(length):
    return np.stack([np.arange(length) // 150, np.zeros(length, int) + (np.arange(length) > 255)]).astype(np.int32)


def dense(mask_mod, shape, *operands):
    index = np.indices((int(np.prod(shape[:-3])), *shape[-3:]), dtype=np.int32)
    return np.broadcast_to(mask_mod(*index, *operands), index.shape[1:]).reshape(shape)


def states_by_hand(allowed):
    """0, 1 or 2 for each block of 128 x 128, entry by entry."""
    *lead, T, S = allowed.shape
    found = np.zeros((*lead, -(-T // 128), -(-S // 128)), np.int8)
    for *at, i, j in np.ndindex(*found.shape):
        block = allowed[(*at, slice(i * 128, (i + 1) * 128), slice(j * 128, (j + 1) * 128))]
        found[(*at, i, j)] = 2 if block.all() else 1 if block.any() else 0
    return found


@pytest.mark.parametrize("shape", [(2, 2, 300, 257), (1, 2, 130, 128), (1, 1, 5, 400), (2, 1, 3, 129, 260)], ids=str)
def test_states(shape):
    """What lies past the end of a ragged block counts for nothing."""
    found = block_mask(banded, shape)
    expected = states_by_hand(dense(banded, shape))
    np.testing.assert_array_equal(found.states, expected)
    assert found.states.dtype == jnp.int8 and found.shape == shape and found.mask_mod is banded
    assert len(np.unique(expected)) > 1


def test_states_of_a_mod_with_operands():
    ids = growing_ids(400)
    found = block_mask(by_ids, (2, 1, 400, 400), (ids,))
    expected = states_by_hand(dense(by_ids, (2, 1, 400, 400), ids))
    np.testing.assert_array_equal(found.states, expected)
    assert len(np.unique(expected)) == 3


@pytest.mark.parametrize("shape", [(300, 400), (4, 300, 400)], ids=str)
def test_dims_that_are_left_out(shape):
    found = block_mask(checkered, shape)
    np.testing.assert_array_equal(found.states.reshape(-1, 3, 4)[0], states_by_hand(dense(checkered, (1, 300, 400)))[0])
    assert found.states.ndim == 3


def test_under_jit():
    """Operands may be traced."""
    ids = growing_ids(400)
    make = lambda ids: block_mask(by_ids, (2, 1, 400, 400), (ids,)).states  # noqa: E731
    np.testing.assert_array_equal(jax.jit(make)(ids), make(ids))


# Attention with a map is attention without it.

T, S = 280, 330
SIZES = [BlockSizes(block_q=q, block_kv=kv) for q, kv in ((16, 64), (128, 32), (256, 256))]


def short(x):
    """A name for the test id."""
    return x if isinstance(x, str) else f"q{x.block_q}-k{x.block_kv}"


GROWING = np.sort(np.random.default_rng(0).integers(-1, 3, (2, S)))
OPTIONS = {
    "alone": {},
    "causal-window": {"causal": True, "window": (140, None)},
    "segments": {"q_segment_ids": GROWING[:, :T], "kv_segment_ids": GROWING},
    "positions": {"q_positions": np.arange(T)[::-1] + 20, "causal": True},
    "kv-positions-chunk": {"kv_positions": np.arange(S) % 100, "chunk_size": 60},
    "lengths": {"kv_lengths": np.array([300, 100]), "q_lengths": np.array([130, 270])},
    "prefix": {"causal": True, "prefix_lengths": np.array([0, 150]), "q_offset": 10},
    "mask": {"mask": np.random.default_rng(1).random((2, 1, T, S)) < 0.7},
    "score-mod": {"score_mod": lambda s, b, h, i, j: s - 0.01 * jnp.abs(i - j).astype(s.dtype)},
}
MORE = ("kv-positions-chunk", "prefix", "segments", "mask")  # for the slow run
DRAWN = [
    pytest.param(name, SIZES[(n + m) % 3], marks=pytest.mark.slow if m or name in MORE else ())
    for n, name in enumerate(OPTIONS)
    for m in range(3)
]


def holed(b, h, i, j):
    """Blocks of all three states, other ones for another head or example."""
    state = (i // 128 + j // 128 + h + b) % 3
    return (state == 2) | ((state == 1) & ((i - j) % 5 > 0))


@pytest.mark.parametrize("options, sizes", DRAWN, ids=short)
def test_values_and_gradients(implementation, options, sizes):
    """For tiles that are smaller and larger than a block of the map."""
    c = case(f"B2-T{T}-S{S}-H2-K1-D4-f32")
    found = block_mask(holed, (2, 2, T, S))
    assert set(np.unique(found.states)) == {0, 1, 2}
    attend = functools.partial(flash_jax.flash_attention, implementation=implementation, block_sizes=sizes)
    program = values_and_gradients(mask_mod=holed, block_mask=found, **OPTIONS[options])
    check(program, attend, c.arrays(), c.cotangents())


def test_a_traced_offset(implementation):
    c = case(f"B2-T{T}-S{S}-H2-K1-D4-f32")
    attend = functools.partial(flash_jax.flash_attention, implementation=implementation, block_sizes=SIZES[0])
    found = block_mask(checkered, (T, S))

    def run(attend, inputs, cotangents, offset):
        return values_and_gradients(q_offset=offset)(attend, inputs, cotangents)

    options = {"causal": True, "mask_mod": checkered, "block_mask": found}
    program = Program(run, options, derivative=(False, True))
    check(program, attend, c.arrays(), c.cotangents(), np.array([40, -7], np.int32))


# What it is for.


def one_map(states, mask_mod=checkered, shape=(1, T, S)):
    return BlockMask(jnp.asarray(states, jnp.int8), mask_mod, shape)


def shown(implementation, sizes, states, **options):
    """bool [T, S]: which keys the queries attend, from the outputs for values that are unit vectors."""
    # Two heads, each of which shows half of the keys.
    q, k, v = jnp.zeros((T, 2, 4)), jnp.zeros((S, 2, 4)), jnp.eye(S).reshape(S, 2, S // 2)
    call = functools.partial(flash_jax.flash_attention, implementation=implementation, block_sizes=sizes)
    out = call(q, k, v, block_mask=one_map(states), **options)
    return np.asarray(out).reshape(T, S) > 0


@pytest.mark.parametrize("sizes", SIZES[:2], ids=short)
def test_a_block_with_nothing_in_it_is_not_visited(implementation, sizes):
    """A map that is wrong shows it: what it calls empty disappears."""
    states = np.array(block_mask(checkered, (T, S)).states)[0]
    allowed = dense(checkered, (1, 1, T, S))[0, 0].copy()
    assert states[1, 1] == 2
    np.testing.assert_array_equal(shown(implementation, sizes, states[None]), allowed)
    states[1, 1], allowed[128:256, 128:256] = 0, False
    np.testing.assert_array_equal(shown(implementation, sizes, states[None]), allowed)


def test_a_block_that_is_allowed_as_a_whole_needs_no_mask():
    """On a GPU's kernels, and seen in the same way: what the map calls full the mask_mod is not asked about."""
    states = np.array(block_mask(checkered, (T, S)).states)[0]
    allowed = dense(checkered, (1, 1, T, S))[0, 0].copy()
    assert states[1, 0] == 0
    states[1, 0], allowed[128:256, :128] = 2, True
    with flash_jax.interpret_mode():
        np.testing.assert_array_equal(shown("triton", SIZES[0], states[None]), allowed)
        # Where causal has a say, it still does.
        causal = np.arange(T)[:, None] >= np.arange(S)
        seen = shown("triton", SIZES[0], states[None], causal=True, q_offset=0)
    np.testing.assert_array_equal(seen, allowed & causal)


def test_the_backward_pass_visits_no_more(implementation):
    """By the same wrong map: no gradient passes through the block that it calls empty."""
    states = np.full((1, 3, 3), 2)
    states[:, 1] = 0
    q, k, v = case(f"T{T}-S{S}-H1-D4-f32").arrays()
    found = one_map(states, lambda b, h, i, j: True)
    call = functools.partial(flash_jax.flash_attention, implementation=implementation, block_sizes=SIZES[0])
    dq = jax.jit(jax.grad(lambda q: jnp.square(call(q, k, v, block_mask=found)).sum()))(q)
    assert not np.any(dq[128:256]) and np.any(dq[:128]) and np.any(dq[256:])


def test_keys_that_nobody_attends_may_be_nan(implementation):
    c, keys = case(f"B2-T{T}-S{S}-H2-K1-D4-f32"), np.s_[:, 128:256]
    hiding = lambda b, h, i, j: (j < 128) | (j >= 256)  # noqa: E731
    q, k, v = c.arrays()
    attend = functools.partial(flash_jax.flash_attention, implementation=implementation, block_sizes=SIZES[0])
    program = values_and_gradients(mask_mod=hiding, block_mask=block_mask(hiding, (T, S)))
    given = (q, poisoned(k, keys), poisoned(v, keys)), c.cotangents()
    _, (_, dk, dv) = check(program, attend, (q, k, v), c.cotangents(), given=given)
    assert not np.any(dk[keys]) and not np.any(dv[keys])


def test_tiles_larger_than_the_arrays(implementation):
    c = case("B2-T17-S40-H2-K1-D8-f32")
    attend = functools.partial(flash_jax.flash_attention, implementation=implementation, block_sizes=SIZES[1])
    program = values_and_gradients(mask_mod=checkered, block_mask=block_mask(checkered, (17, 40)))
    check(program, attend, c.arrays(), c.cotangents())


# As an argument.


def test_brings_its_mask_mod(implementation):
    q, k, v = case(f"T{T}-S{S}-H2-D4-f32").arrays()
    call = functools.partial(flash_jax.flash_attention, q, k, v, implementation=implementation)
    found = block_mask(checkered, (T, S))
    np.testing.assert_array_equal(call(block_mask=found), call(mask_mod=checkered, block_mask=found))


def test_passes_through_jit_and_vmap(implementation):
    """A pytree of one array; under vmap it may have the mapped axis, or not."""
    q, k, v = case(f"B2-T{T}-S{S}-H1-D4-f32").arrays()
    call = functools.partial(flash_jax.flash_attention, implementation=implementation, block_sizes=SIZES[1])
    ids = growing_ids(S)

    def one(q, k, v, ids, found):
        return call(q, k, v, mask_mod=lambda b, h, i, j, ids: ids[i] == ids[j], mod_operands=(ids,), block_mask=found)

    each = lambda b, h, i, j, ids: ids[i] == ids[j]  # noqa: E731
    made = [block_mask(each, (T, S), (x,)) for x in ids]
    both = dataclasses.replace(made[0], states=jnp.stack([x.states for x in made]))
    mapped = jax.jit(jax.vmap(one))(q, k, v, ids, both)
    for n in range(2):
        np.testing.assert_allclose(mapped[n], one(q[n], k[n], v[n], ids[n], made[n]), rtol=1e-5, atol=1e-6)
    shared = jax.jit(jax.vmap(one, in_axes=(0, 0, 0, None, None)))(q, k, v, ids[0], made[0])
    np.testing.assert_allclose(shared[0], mapped[0], rtol=1e-5, atol=1e-6)
    assert np.any(np.asarray(shared[1]) != np.asarray(mapped[1]))


@pytest.mark.parametrize("shape", [(T, S + 1), (T + 128, S), (3, T, S), (2, 2, T, S), (5, 2, 2, T, S)], ids=str)
def test_of_another_shape(shape):
    q, k, v = case(f"B3-T{T}-S{S}-H2-D4-f32").arrays()
    found = block_mask(checkered, shape)
    text = re.escape(f"was made for scores of shape {found.shape}, and these are (3, 2, {T}, {S})")
    with pytest.raises(ValueError, match=text):
        flash_jax.flash_attention(q, k, v, block_mask=found)


def test_of_another_kind():
    q, k, v = case("T5-f32").arrays()
    with pytest.raises(TypeError, match="must be what `flash_jax.block_mask` returns; got ndarray"):
        flash_jax.flash_attention(q, k, v, block_mask=np.ones((5, 5), np.int8))


@pytest.mark.parametrize("shape", [(5,), 5, (0, 5), (5, 2.0), (True, 5)], ids=str)
def test_shapes_that_are_none(shape):
    with pytest.raises(ValueError, match=r"`shape` must be \[..., H, T, S\] of at least two positive ints; got"):
        block_mask(checkered, shape)


def test_no_mask_mod():
    with pytest.raises(TypeError, match="`mask_mod` must be a function; got None"):
        block_mask(None, (5, 5))  # pyright: ignore[reportArgumentType]
