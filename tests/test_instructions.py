"""What interpret mode computes in the place of a GPU's single instructions."""

import numpy as np

from flash_jax.triton.instructions import _fma_interpreted


def test_a_fused_multiply_add_rounds_once():
    r = np.random.default_rng(0)
    a, b = r.normal(size=(2, 20000)).astype(np.float32)
    c = -(a * b) * r.choice(np.float32([1, 1.001, 0.5]), 20000)  # so that the error of the product shows
    exact = a.astype(np.float64) * b + c  # of 48 bits, and float64 has 53
    found = np.asarray(_fma_interpreted(a, b, c), np.float64)
    assert (np.abs(found - exact) <= np.spacing(np.abs(exact).astype(np.float32))).all()
    assert (np.abs((a * b + c) - exact) > 100 * np.spacing(np.abs(exact).astype(np.float32))).mean() > 0.3


def test_infinities_and_numbers_too_large_to_split():
    assert _fma_interpreted(-np.inf, 0.125, 3.0) == -np.inf
    assert np.isnan(_fma_interpreted(np.nan, 1.0, 0.0))
    assert _fma_interpreted(2.0**125, 0.5, 1.0) == np.float32(2.0**124)
