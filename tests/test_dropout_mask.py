"""`dropout_mask` is what `flash_attention` keeps, whatever computes it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flash_jax import dropout_mask

RATE, KEY = 0.3, jax.random.key(7)


def test_it_is_what_attention_keeps(attend):
    B, T, S, H = 2, 20, 37, 2
    q, k = np.zeros((B, 1, T, H, 8), np.float32), np.zeros((B, 1, S, 1, 8), np.float32)
    units = np.broadcast_to(np.eye(S, dtype=np.float32)[:, None], (B, 1, S, 1, S))
    out = attend(q, k, units, dropout_rate=RATE, dropout_key=KEY)  # each weight is 1 / S
    kept = np.asarray(dropout_mask(KEY, RATE, (B, 1, H, T, S)))
    expected = np.where(kept, 1 / (S * (1 - RATE)), 0)
    np.testing.assert_allclose(np.moveaxis(out, -2, -3), expected, rtol=1e-5)


def test_it_keeps_the_right_share_everywhere():
    shape = (2, 3, 2, 128, 128)
    kept = np.asarray(dropout_mask(KEY, RATE, shape), np.float64)
    for axis in range(len(shape)):
        shares = kept.mean(axis=tuple(a for a in range(len(shape)) if a != axis))
        deviation = (RATE * (1 - RATE) * shares.size / kept.size) ** 0.5
        assert np.abs(shares - (1 - RATE)).max() < 5 * deviation


def test_heads_and_examples_and_keys_differ():
    kept = np.asarray(dropout_mask(KEY, 0.5, (2, 2, 64, 64))).reshape(4, -1)
    another = np.asarray(dropout_mask(jax.random.key(8), 0.5, (64, 64, 1))).reshape(1, -1)
    agreement = (kept[:, None] == np.concatenate([kept, another])[None]).mean(axis=-1)
    assert (np.abs(agreement - 0.5) < 0.05).sum() == 4 * 5 - 4


def test_old_keys_jit_and_numpy_ints():
    kept = dropout_mask(KEY, RATE, (2, 5, 6))
    assert kept.shape == (2, 5, 6)
    assert kept.dtype == bool
    np.testing.assert_array_equal(kept, dropout_mask(jax.random.key_data(KEY), RATE, (np.int64(2), 5, 6)))
    np.testing.assert_array_equal(kept, jax.jit(lambda key: dropout_mask(key, RATE, (2, 5, 6)))(KEY))


def test_a_rate_of_0_keeps_all():
    assert np.all(dropout_mask(None, 0.0, (1, 2, 3)))
    assert np.all(dropout_mask(KEY, 0, (1, 2, 3)))


@pytest.mark.parametrize(
    ("key", "rate", "shape", "error", "text"),
    [
        (None, 0.1, (1, 2, 3), ValueError, "`dropout_rate` 0.1 needs a `dropout_key`"),
        (KEY, 1.0, (1, 2, 3), ValueError, "`dropout_rate` must be at least 0 and less than 1; got 1.0"),
        (KEY, "0.1", (1, 2, 3), TypeError, "`dropout_rate` must be a Python number; got str"),
        (jnp.zeros((2, 2)), 0.1, (1, 2, 3), TypeError, "`dropout_key` must be one JAX key"),
        (KEY, 0.1, (2, 3), ValueError, r"`shape` must be \(..., H, T, S\), at least three .* got \(2, 3\)"),
        (KEY, 0.1, (1, 2, -3), ValueError, "at least three non-negative ints"),
        (KEY, 0.1, (1, 2, 3.0), TypeError, "`shape` must be a tuple of ints"),
        (KEY, 0.1, 3, TypeError, "`shape` must be a tuple of ints"),
    ],
)
def test_what_is_wrong_is_said(key, rate, shape, error, text):
    with pytest.raises(error, match=text):
        dropout_mask(key, rate, shape)
