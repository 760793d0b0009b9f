"""Every tile of the table and many overrides, each pass: results are as exact with one as with another (B07, G03)."""

import functools

import jax
import pytest

from flash_jax import BlockSizes
from tests.support.accuracy import check
from tests.support.cases import case
from tests.support.programs import everything

pytestmark = pytest.mark.gpu

# Several tiles each way and a ragged end, by the table's rows: head dims up to 64, 128 and 256, both element sizes.
TABLE = [f"T300-S333-H4-K2-D{D}-{dtype}" for D in (64, 128, 256) for dtype in ("bf16", "f16", "f32")]
OVERRIDES = {
    "16x16w1s1": BlockSizes(16, 16, 1, 1),
    "16x128w4s2": BlockSizes(16, 128, 4, 2),
    "128x16w4s3": BlockSizes(128, 16, 4, 3),
    "32x64w2s3": BlockSizes(32, 64, 2, 3),
    "64x32w4s1": BlockSizes(64, 32, 4, 1),
    "64x64w8s4": BlockSizes(64, 64, 8, 4),
    "64x128w4s2": BlockSizes(64, 128, 4, 2),
    "128x64w4s2": BlockSizes(128, 64, 4, 2),
    "128x128w8s2": BlockSizes(128, 128, 8, 2),
    "256x32w8s1": BlockSizes(256, 32, 8, 1),
    "32x256w8s1": BlockSizes(32, 256, 8, 1),
    "each-its-own": BlockSizes(128, 32, dq=BlockSizes(32, 128, 4, 2), dkv=BlockSizes(16, 64, 4, 3)),
    "tangent-alone": BlockSizes(tangent=BlockSizes(64, 64, 4, 2)),
    "dkv-alone": BlockSizes(dkv=BlockSizes(64, 128, 8, 2)),
    "stages-alone": BlockSizes(num_stages=5),
}


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("name", TABLE)
def test_table(attend, name, causal):
    c = case(name)
    check(everything(causal=causal), attend, c.arrays(), c.cotangents(), c.tangents())


@pytest.mark.parametrize("options", [{"causal": True}, {"window": (90, 41)}], ids=["causal", "window"])
@pytest.mark.parametrize("sizes", OVERRIDES.values(), ids=OVERRIDES)
def test_overrides(attend, sizes, options):
    c = case("T300-S333-H4-K2-D64-bf16")
    given = c.arrays(), c.cotangents(), c.tangents()
    check(everything(**options), functools.partial(attend, block_sizes=sizes), *given)


def test_one_that_does_not_fit_says_what_would(attend):
    x = case("T600-D256-f32").arrays()
    large = BlockSizes(block_q=256, block_kv=256)
    with pytest.raises(ValueError, match=r"KiB of shared memory, and .* has \d+ KiB; try block_q=\d+, block_kv=\d+"):
        jax.jit(functools.partial(attend, block_sizes=large))(*x)
