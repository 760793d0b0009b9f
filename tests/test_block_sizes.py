"""Tile sizes change speed alone: any sizes, and each of the table's, give one function; what cannot fit is refused."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import flash_jax
from flash_jax import BlockSizes
from flash_jax.triton import order, tiling
from tests.support.accuracy import check
from tests.support.cases import case
from tests.support.programs import everything, values_and_gradients

OPTIONS = {"causal": True, "window": (37, None), "kv_lengths": np.array([100, 81])}
SIZES = [
    BlockSizes(block_q=16, block_kv=64),
    BlockSizes(block_q=64, block_kv=16),
    BlockSizes(block_q=128, block_kv=128, num_warps=8, num_stages=3),
    BlockSizes(
        block_q=32, block_kv=64, dq=BlockSizes(block_q=16, block_kv=32), dkv=BlockSizes(block_q=64, block_kv=16)
    ),
    BlockSizes(block_kv=16, dkv=BlockSizes(block_q=16)),
    None,
]


def short(sizes):
    """A name for the test id."""
    return "table" if sizes is None else f"q{sizes.block_q}-k{sizes.block_kv}" + ("-own-backward" if sizes.dkv else "")


def with_sizes(implementation, sizes):
    return functools.partial(flash_jax.flash_attention, implementation=implementation, block_sizes=sizes)


@pytest.mark.thorough
@pytest.mark.parametrize("sizes", SIZES, ids=short)
def test_any_sizes(implementation, sizes):
    """Case B07, with its unequal blocks scaled down; values and all gradients."""
    c = case("B2-T63-S100-H4-K2-D24-f32")
    check(values_and_gradients(**OPTIONS), with_sizes(implementation, sizes), c.arrays(), c.cotangents())


@pytest.mark.parametrize(
    ("room", "options", "shapes", "together"),
    [
        (20_000, {"causal": True}, {}, (4, 1)),
        (1_000_000, {"causal": True}, {"bias": (1, 1, 37, 45)}, (8, 1)),
        (20_000, {"causal": True}, {"bias": (1, 8, 37, 45)}, (1, 3)),
        (20_000, {}, {"bias": (1, 8, 37, 45)}, (1, 3)),
        (20_000, {}, {"bias": (3, 1, 37, 45)}, (4, 1)),
        (20_000, {}, {"bias": (1, 1, 37, 1)}, (1, 1)),
    ],
    ids=["causal", "bias-for-all-causal", "bias-by-head-causal", "bias-by-head", "bias-by-example", "bias-by-query"],
)
def test_the_order_of_programs_changes_nothing(room, options, shapes, together, monkeypatch):
    """Heads and examples whose programs go together, counted for the forward pass (triton/order.py)."""
    seen, grid_of = [], order.Grid.of
    monkeypatch.setattr(order, "_CACHED", room)
    monkeypatch.setattr(order.Grid, "of", lambda *given: seen.append(grid_of(*given)) or seen[-1])
    c = case("B3-T37-S45-H8-K4-D16-f32")
    with flash_jax.interpret_mode():
        attend = with_sizes("triton", BlockSizes(block_q=16, block_kv=16))
        check(everything(**options), attend, c.inputs(**shapes), c.cotangents(), c.inputs(1, **shapes))
    assert seen[0] == (3, 8, 3, *together)


@pytest.mark.parametrize("sizes", [BlockSizes(block_q=1, block_kv=1), BlockSizes(block_q=5, block_kv=7)], ids=short)
def test_xla_takes_any_positive_size(sizes):
    c = case("B2-T13-S21-H4-K2-D8-f32")
    program = values_and_gradients(causal=True, kv_lengths=np.array([21, 9]))
    check(program, with_sizes("xla", sizes), c.arrays(), c.cotangents())


@pytest.mark.thorough
@pytest.mark.parametrize(
    "row", sorted({(dim, size) for _, dim, size in tiling._TABLE}), ids=lambda r: f"D{r[0]}-{r[1]}bytes"
)
def test_every_row_of_the_table(row):
    """The kernels with the tiles that a GPU would use for this head dim and dtype, in interpret mode."""
    dim, itemsize = row
    c = case(f"T150-S140-H2-K1-D{dim - 8}-{'f32' if itemsize == 4 else 'bf16'}")
    with flash_jax.interpret_mode():
        check(everything(causal=True), with_sizes("triton", None), c.arrays(), c.cotangents(), c.tangents())


@pytest.mark.parametrize(
    "sizes, text",
    [
        (
            BlockSizes(block_q=48),
            "block_q of the forward pass must be a power of two of at least 16 for 'triton'; got 48.",
        ),
        (
            BlockSizes(block_kv=8),
            "block_kv of the forward pass must be a power of two of at least 16 for 'triton'; got 8.",
        ),
        (
            BlockSizes(num_warps=3),
            "num_warps of the forward pass must be a power of two from 1 to 16 for 'triton'; got 3.",
        ),
        (
            BlockSizes(num_warps=32),
            "num_warps of the forward pass must be a power of two from 1 to 16 for 'triton'; got 32.",
        ),
        (BlockSizes(dq=BlockSizes(block_q=24)), "block_q of the dq pass must be a power of two of at least 16"),
        (BlockSizes(dkv=BlockSizes(block_kv=24)), "block_kv of the dkv pass must be a power of two of at least 16"),
        (BlockSizes(tangent=BlockSizes(num_warps=3)), "num_warps of the tangent pass must be a power of two from 1 to"),
    ],
    ids=str,
)
def test_sizes_that_triton_cannot_take_are_refused_while_tracing(sizes, text):
    x = jax.ShapeDtypeStruct((1, 64, 2, 64), jnp.bfloat16)
    with pytest.raises(ValueError) as error:
        jax.eval_shape(with_sizes("triton", sizes), x, x, x)
    assert text in str(error.value)


@pytest.mark.parametrize("field", ["block_q", "block_kv", "num_warps", "num_stages"])
@pytest.mark.parametrize("value", [0, -16, 1.5, True, "64"], ids=repr)
def test_numbers_that_are_no_sizes(field, value):
    with pytest.raises(ValueError, match=f"`BlockSizes.{field}` must be a positive int or None; got {value!r}"):
        BlockSizes(**{field: value})


def test_nested_sizes_must_be_sizes():
    with pytest.raises(TypeError, match="`BlockSizes.dq` must be a BlockSizes or None; got int"):
        BlockSizes(dq=64)


def test_sizes_are_values():
    assert BlockSizes(block_q=64) == BlockSizes(block_q=64) and len({BlockSizes(), BlockSizes()}) == 1
