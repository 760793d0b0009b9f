"""Scores in the millions, which the kernels for 16 bits compute another way than those near 0 (R1, R20)."""

import functools

import numpy as np
import pytest

import flash_jax
from flash_jax.tiles import scores
from tests.support.accuracy import check
from tests.support.cases import case
from tests.support.programs import forward, values_and_gradients


@pytest.mark.parametrize("far, length", [(-1.0, 37), (scores.FAR, 38)], ids=["with-care", "fast"])
@pytest.mark.parametrize(
    "options", [{"causal": True}, {"segment_ids": True, "window": (9, 3)}], ids=["causal", "segments"]
)
def test_16_bits_with_care_and_without(options, far, length, monkeypatch):
    """All scores are taken for far ones, or none: both ways through the kernels give what the rule asks."""
    monkeypatch.setattr(scores, "FAR", far)  # of other lengths, so that nothing is taken from a cache
    if "segment_ids" in options:
        options = options | {"segment_ids": np.arange(length) // 15}
    c = case(f"B2-T{length}-H4-K2-D16-bf16")
    sizes = flash_jax.BlockSizes(block_q=16, block_kv=16)
    attend = functools.partial(flash_jax.flash_attention, implementation="triton", block_sizes=sizes)
    with flash_jax.interpret_mode():
        check(values_and_gradients(**options), attend, c.arrays(), c.cotangents())


@pytest.mark.parametrize("times", [3, 20])
def test_maxima_that_grow(times):
    """Later keys have larger scores: what is summed up so far shrinks in some steps, and in the others by nothing."""
    c = case("B1-T40-S400-H2-D16-bf16")
    q, k, v = c.arrays()
    q = (q * np.linspace(0, times, c.T)[:, None, None]).astype(q.dtype)
    k = (k * np.linspace(0, times, c.S)[:, None, None]).astype(k.dtype)
    sizes = flash_jax.BlockSizes(block_q=16, block_kv=16)
    attend = functools.partial(flash_jax.flash_attention, implementation="triton", block_sizes=sizes)
    with flash_jax.interpret_mode():
        check(forward(), attend, q, k, v)
        check(forward(causal=True, q_offset=300), attend, q, k, v)
