"""More than 2**31 elements, more than 65535 programs along an axis: the last slices are right (R19; G05b, G07)."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support.accuracy import assert_agrees, check
from tests.support.cases import case
from tests.support.programs import Program, forward, values_and_gradients

pytestmark = pytest.mark.gpu


def normal(seed, n, *rest):
    """Standard-normal bfloat16 numbers [n, *rest] on the GPU, drawn row by row: no draw is large."""

    @jax.jit
    def draw(key):
        def one(key):
            return jax.random.normal(key, rest, jnp.bfloat16)

        return jax.lax.map(one, jax.random.split(key, n), batch_size=64 if n > 64 else None)

    x = draw(jax.random.key(seed))
    assert x.shape == (n, *rest)
    return x


def host(tree, index):
    """The slices `index` of the arrays, as NumPy arrays."""
    return jax.tree.map(lambda x: np.asarray(x[index]), tree)


def test_many_examples(attend):
    """16385 examples of 128 x 16 x 64: 2**31 + 2**17 elements; values and gradients of the last and of others."""
    shape = 16385, 128, 16, 64
    assert np.prod(shape, dtype=np.int64) > 2**31
    arrays = tuple(normal(seed, *shape) for seed in range(3))
    program = values_and_gradients(causal=True)
    cotangents = normal(3, *shape), jnp.ones((16385, 16, 128), jnp.float32)
    values, gradients = jax.jit(functools.partial(program, attend))(arrays, cotangents)
    for index in (np.s_[-1:], np.s_[8191:8193], np.s_[:1]):
        found = host((values, gradients), index)
        assert_agrees(found, program, host(arrays, index), host(cotangents, index))


def test_one_long_example(attend):
    """2**20 + 8 queries and keys of 16 x 128, within a window: the last 200 rows, which read the last 400 alone."""
    T, tail, window = 2**20 + 8, 200, (127, 0)
    arrays = tuple(normal(seed, T, 16, 128) for seed in range(3))
    cotangents = normal(3, T, 16, 128), jnp.ones((16, T), jnp.float32)
    assert arrays[0].size > 2**31

    def last(values_and_gradients):
        (out, lse), gradients = values_and_gradients
        return (out[-tail:], lse[:, -tail:]), tuple(g[-tail:] for g in gradients)

    whole = values_and_gradients(window=window)
    found = last(jax.jit(functools.partial(whole, attend))(arrays, cotangents))
    cut = (
        host(arrays, np.s_[-2 * tail :]),
        (np.asarray(cotangents[0][-2 * tail :]), np.ones((16, 2 * tail), np.float32)),
    )
    program = Program(lambda attend, *x: last(whole(attend, *x)), derivative=(False, True))
    assert_agrees(found, program, *cut)


def test_decoding_over_a_cache_of_many_heads(attend):
    """One query for each of 1024 heads over 4096 keys, 5 examples: strides of 2**29; the last heads of each."""
    k, v = (normal(seed, 5, 4096, 1024, 128) for seed in (0, 1))
    q = normal(2, 5, 1, 1024, 128)
    assert k.size > 2**31
    lengths = np.array([4096, 4000, 1, 0, 4095])
    options = {"causal": True, "kv_lengths": lengths}
    out, lse = jax.jit(functools.partial(forward(**options), attend))(q, k, v)
    for heads in (slice(-2, None), slice(0, 2)):
        found = np.asarray(out[:, :, heads]), np.asarray(lse[:, heads])
        assert_agrees(found, forward(**options), *host((q, k, v), np.s_[:, :, heads]))


@pytest.mark.parametrize("of", ["mask", "bias"])
def test_scores_shaped_operand(attend, of):
    """Case G05a: 8 x 28 x 4096 x 4096 entries, 3.8e9; values and gradients of the last example's last heads."""
    shape = 8, 28, 4096, 4096
    assert np.prod(shape, dtype=np.int64) > 2**31
    b, h, i, j = (jax.lax.broadcasted_iota(jnp.int32, (n,), 0).reshape([-1 if a == d else 1 for a in range(4)])
                  for d, n in enumerate(shape))  # fmt: skip
    pattern = jax.jit(lambda: (5 * b + 3 * h + 7 * i + 13 * j) % 11)
    dense = jax.jit(lambda: pattern() > 3 if of == "mask" else (pattern() / 4).astype(jnp.bfloat16))()
    arrays = tuple(normal(seed, 8, 4096, 28, 128) for seed in range(3))
    cotangents = normal(3, 8, 4096, 28, 128), jnp.ones((8, 28, 4096), jnp.float32)
    riding = {"bias": dense} if of == "bias" else {}

    def run(attend, inputs, cotangents, mask):
        return values_and_gradients(causal=True, mask=mask)(attend, inputs, cotangents)

    program = Program(run, derivative=(False, True))
    mask = dense if of == "mask" else None
    (out, lse), (dq, dk, dv, drest) = jax.jit(functools.partial(program, attend))((*arrays, riding), cotangents, mask)
    rows, scores = np.s_[-1:, :, -2:], np.s_[-1:, -2:]
    found = host((out, dq, dk, dv), rows), host((lse, drest), scores)
    found = (found[0][0], found[1][0]), (*found[0][1:], found[1][1])
    inputs = (*host(arrays, rows), host(riding, scores))
    given = (host(cotangents[0], rows), host(cotangents[1], scores)), host(mask, scores)
    assert_agrees(found, program, inputs, *given)


@pytest.mark.parametrize(
    "name", ["B70000-T16-S16-H1-D16-bf16", "T16-S16-H70000-K35000-D16-bf16", "B70000-T1-S1-H1-bf16"]
)
def test_more_than_65535_programs_along_an_axis(attend, name):
    c = case(name)
    check(values_and_gradients(causal=True), attend, c.arrays(), c.cotangents())
