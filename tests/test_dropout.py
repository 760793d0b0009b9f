"""Dropout keeps a set that is a function of key, example, head, row and column alone, after the row sums (R13)."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import flash_jax
from flash_jax.tiles import dropout
from tests.support.accuracy import check
from tests.support.cases import FEWER_QUERIES, MORE_QUERIES, case
from tests.support.programs import Program, everything, forward, gradients, second_order
from tests.support.structure import lowered_sizes

pytestmark = pytest.mark.thorough

KEY = jax.random.PRNGKey(7)


def revealed(attend, batch, T, S, H, **options):
    """The kept set as a call shows it: equal scores and values that are unit vectors. bool [..., H, T, S]."""
    q, k = jnp.zeros((*batch, T, H, 4)), jnp.zeros((*batch, S, H, 4))
    v = jnp.broadcast_to(jnp.eye(S)[:, None], (*batch, S, H, S))
    return np.moveaxis(np.asarray(attend(q, k, v, **options)), -2, -3) > 0


def kept_set(key, rate, batch, H, T, S):
    """The same from the hash itself."""
    words = dropout.head_words(key, batch, H)[..., None, None]
    i, j = np.arange(T)[:, None], np.arange(S)[None]
    return np.asarray(dropout.kept(words[..., 0, :, :], words[..., 1, :, :], i, j, rate))


def test_values_gradients_and_tangents(attend):
    c = case(MORE_QUERIES)
    program = everything(dropout_key=KEY, dropout_rate=0.6, kv_lengths=np.array([19, 4]))
    check(program, attend, c.arrays(), c.cotangents(), c.tangents())


def test_several_leading_dims(attend):
    check(forward(dropout_key=KEY, dropout_rate=0.3), attend, *case("B2x3-T9-S19-H2-K1-D8-f32").arrays())


def test_with_what_rides_along(attend):
    c = case(FEWER_QUERIES)
    shapes = {"bias": (4, 19, 35), "alibi_slopes": (4,), "sinks": (2, 4)}
    program = everything(dropout_key=KEY, dropout_rate=0.4, softcap=2.0, causal=True)
    check(program, attend, c.inputs(**shapes), c.cotangents(), c.inputs(1, **shapes))


def test_derivative_of_the_gradients(attend):
    c = case("B2-T9-S19-H2-K1-D8-f32")
    program = second_order(dropout_key=KEY, dropout_rate=0.4)
    check(program, attend, c.arrays(), c.cotangents(), c.tangents())


def test_the_gradient_uses_the_set_of_the_forward_pass(attend):
    """Case E01: with one-hot cotangents dv shows the set, and it is the one that the outputs show."""
    T, S = 35, 41
    q, k, v = jnp.zeros((T, 2, 4)), jnp.zeros((S, 2, 4)), jnp.eye(S)[:, None].repeat(2, 1)
    out, pull = jax.vjp(lambda v: attend(q, k, v, dropout_rate=0.5, dropout_key=KEY), v)
    cotangents = jnp.eye(T)[:, :, None, None] * jnp.ones((T, T, 2, S))  # ones in one row each
    (dv,) = jax.vmap(pull)(cotangents)  # [T, S, 2, S]
    np.testing.assert_array_equal(np.asarray(dv[..., 0]) > 0, np.moveaxis(np.asarray(out), 1, 2) > 0)


def test_tiles_do_not_matter(implementation):
    """Case E01: whatever the tiles of the passes, the kept set is the one of the hash."""
    expected = kept_set(jax.random.key(7), 0.5, (2,), 2, 35, 41)
    backward = flash_jax.BlockSizes(block_q=32, block_kv=16)
    for sizes in (None, flash_jax.BlockSizes(block_q=16, block_kv=32, dq=backward, dkv=backward)):
        attend = functools.partial(flash_jax.flash_attention, implementation=implementation, block_sizes=sizes)
        found = revealed(attend, (2,), 35, 41, 2, dropout_rate=0.5, dropout_key=jax.random.key(7))
        np.testing.assert_array_equal(found, expected)


def test_every_way_to_run_it_sees_one_set(attend):
    """Eagerly, under jit, with a raw key and a typed one, under remat; another key gives another set."""
    options = {"dropout_rate": 0.5}
    run = lambda key: revealed(attend, (2,), 19, 35, 2, dropout_key=key, **options)  # noqa: E731
    expected = kept_set(jax.random.key(7), 0.5, (2,), 2, 19, 35)
    np.testing.assert_array_equal(run(KEY), expected)
    q, k, v = (jnp.asarray(x) for x in case("B2-T19-S35-H2-D8-f32").arrays())
    call = lambda key, v: attend(q, k, v, dropout_key=key, **options)  # noqa: E731
    jitted, eager = jax.jit(call)(jax.random.key(7), v), call(KEY, v)
    np.testing.assert_array_equal(jitted, eager)
    loss = lambda v: (call(KEY, v) ** 2).sum()  # noqa: E731
    remat, plain = jax.jit(jax.grad(jax.checkpoint(loss)))(v), jax.jit(jax.grad(loss))(v)
    np.testing.assert_array_equal(remat, plain)
    assert np.any(call(jax.random.key(8), v) != eager)


def test_vmap_gives_each_example_what_it_would_see_alone(attend):
    """With a key for all, every example sees one set; with a key for each, each its own. Values and gradients."""
    c = case("B3x2-T9-S19-H2-K1-D8-f32")
    keys = jax.random.split(jax.random.key(3), 3)

    def mapped(attend, inputs, cotangents, keys):
        def one(x, ct, key):
            return gradients(dropout_key=key)(attend, x, ct), forward(dropout_key=KEY)(attend, *x)

        return jax.vmap(one)(inputs, cotangents, keys)

    found = check(Program(mapped, {"dropout_rate": 0.5}, (True, False)), attend, c.arrays(), c.cotangents(), keys)
    inputs, cotangents = (jax.tree.map(lambda x: x[1], tree) for tree in (c.arrays(), c.cotangents()))
    alone = jax.jit(lambda *x: gradients(dropout_key=keys[1], dropout_rate=0.5)(attend, *x))(inputs, cotangents)
    for x, y in zip(found[0], alone, strict=True):
        np.testing.assert_allclose(x[1], y, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
def test_rate(rate):
    """Of 2**20 entries a share of 1 - rate is kept, within five standard deviations, whole rows and columns too."""
    kept = kept_set(jax.random.key(0), rate, (2,), 2, 512, 512)
    deviation = np.sqrt(rate * (1 - rate))
    assert abs(kept.mean() - (1 - rate)) < 5 * deviation / np.sqrt(kept.size)
    for axis in (-1, -2):
        means = kept.mean(axis)
        assert np.abs(means - (1 - rate)).max() < 6 * deviation / np.sqrt(512)
        assert abs(means.std() / (deviation / np.sqrt(512)) - 1) < 0.1


@pytest.mark.parametrize("seed", range(3))
def test_entries_are_independent(seed):
    """Sets of two heads, examples, rows, columns, keys and neighbours agree as often as strangers would."""
    a = kept_set(jax.random.key(seed), 0.5, (2,), 2, 256, 256)
    b = kept_set(jax.random.key(seed + 100), 0.5, (2,), 2, 256, 256)
    pairs = {
        "heads": (a[:, 0], a[:, 1]),
        "examples": (a[0], a[1]),
        "keys": (a, b),
        "rows": (a[..., :-1, :], a[..., 1:, :]),
        "columns": (a[..., :-1], a[..., 1:]),
        "far rows": (a[..., :128, :], a[..., 128:, :]),
        "diagonal": (a[..., :-1, :-1], a[..., 1:, 1:]),
        "transposed": (a, a.swapaxes(-1, -2)),
    }
    for name, (x, y) in pairs.items():
        assert abs((x == y).mean() - 0.5) < 5 * 0.5 / np.sqrt(x.size), name
    corners = a[..., :128, :128] ^ a[..., 128:, :128] ^ a[..., :128, 128:] ^ a[..., 128:, 128:]
    assert abs(corners.mean() - 0.5) < 5 * 0.5 / np.sqrt(corners.size)


def test_mean_over_keys_is_the_undropped_output(attend):
    """Case A14: rate 0.9, causal. 400 keys by vmap; rows whose set is empty are 0, and the mean is within 6 sigma."""
    q, k, v = case("T19-H1-D8-f32").arrays()
    keys = jax.random.split(jax.random.key(0), 400)
    run = jax.jit(
        jax.vmap(lambda key: attend(q, k, v, causal=True, dropout_rate=0.9, dropout_key=key, return_lse=True))
    )
    outs, lses = run(keys)
    whole, lse = attend(q, k, v, causal=True, return_lse=True)
    np.testing.assert_allclose(lses, np.broadcast_to(lse, lses.shape), rtol=1e-6, atol=1e-6)
    assert np.isfinite(outs).all() and (np.asarray(outs[:, 0]) == 0).all(-1).mean() > 0.8
    error = np.abs(np.asarray(outs).mean(0) - whole)
    assert (error <= 6 * np.asarray(outs).std(0) / 20 + 1e-6).all()


def test_rate_zero_is_no_dropout(attend):
    """Bit for bit, with a key or without; and a tiny rate drops almost nothing."""
    arrays = case("B2-T19-S35-H2-D8-f32").arrays()
    np.testing.assert_array_equal(attend(*arrays, dropout_rate=0.0, dropout_key=KEY), attend(*arrays))
    np.testing.assert_array_equal(attend(*arrays, dropout_rate=0), attend(*arrays))
    np.testing.assert_array_equal(attend(*arrays, dropout_key=KEY), attend(*arrays))
    tiny = attend(*arrays, dropout_rate=1e-7, dropout_key=KEY)
    np.testing.assert_allclose(tiny, attend(*arrays), rtol=1e-5, atol=1e-6)


def test_the_future_stays_hidden(attend):
    """Case D14: causal holds with dropout on, with the log-sum-exp and without, bit for bit."""
    q, k, v = case("T40-H2-D8-f32").arrays()
    k2, v2 = k.copy(), v.copy()
    k2[23:], v2[23:] = 9 * k[23:], -v[23:]
    for options in ({}, {"dropout_rate": 0.3, "dropout_key": KEY}):
        before, after = (attend(q, *kv, causal=True, return_lse=True, **options) for kv in ((k, v), (k2, v2)))
        np.testing.assert_array_equal(before[0][:23], after[0][:23])
        np.testing.assert_array_equal(before[1][:, :23], after[1][:, :23])
        np.testing.assert_array_equal(attend(q, k, v, causal=True, **options), before[0])


def test_the_set_is_never_stored(attend):
    """No value of T * S elements, forward and backward."""
    c = case("T300-S290-H1-K1-D4-f32")
    program = functools.partial(gradients(dropout_key=KEY, dropout_rate=0.5), attend)
    assert max(lowered_sizes(program, c.arrays(), c.cotangents())) < 300 * 290
