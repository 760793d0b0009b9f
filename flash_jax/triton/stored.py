"""dS written out by the kernel of dq, which has it in registers: the gradient of a bias with an entry for each.

What is summed over examples is summed by one launch for each, one after the other, each adding to what the one before
has left: in a fixed order, and in float32 until the last one writes the dtype of the bias. A launch writes each entry
once. Where two examples attend the same tiles, and there is room, one program has the queries of both, so that a sum of
two need not be written and read again. For a bias that heads or only some examples share, and where only arrays say
what is visible, there is the kernel of triton/dbias.py.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from flash_jax.spec import OWN_RANK, AttentionSpec, Operands
from flash_jax.tiles import ranges
from flash_jax.triton.dq import query_pass
from flash_jax.triton.entries import Residuals
from flash_jax.triton.launch import Shape, flat
from flash_jax.triton.tiling import pairs_fit, tile_for

_ENOUGH = 256  # programs of one launch that keep a GPU busy
_MOVES_NO_TILE = ("scale", "row_start", "col_start", "mod_examples")  # of the numbers that each example may have


def _is_served(
    residuals: Residuals, operands: Operands, lead: tuple[int, ...], target: jax.ShapeDtypeStruct, spec: AttentionSpec
) -> bool:
    """Whether the kernel of dq can give this gradient, and is the faster way to it."""
    shape = Shape.of(*residuals[:3], lead)
    *own, heads, T, S = target.shape
    unknown = ranges.is_scanned(operands) or spec.mask_mod is not None
    if unknown or operands.mask is not None or (heads, T, S) != (shape.H, shape.T, shape.S):
        return False
    programs = pl.cdiv(T, tile_for("dq", spec, *residuals[:3], operands).block_q) * heads
    return tuple(own) == lead or (all(n == 1 for n in own) and programs >= _ENOUGH)


def query_and_bias_pass(
    residuals: Residuals,
    operands: Operands,
    lead: tuple[int, ...],
    sums: tuple[str, ...],
    dtype: jnp.dtype | None,
    spec: AttentionSpec,
    target: jax.ShapeDtypeStruct | None,
) -> tuple[Any, dict[str, jax.Array], jax.Array | None]:
    """What `query_pass` gives, and the gradient of the bias like `target`, None where it takes a kernel of its own."""
    if dtype is None and not sums:
        return None, {}, None
    if dtype is None or target is None or not _is_served(residuals, operands, lead, target, spec):
        return query_pass(residuals, operands, lead, sums, dtype, spec)
    if target.shape[:-3] == lead:
        return query_pass(residuals, operands, lead, sums, dtype, spec, target)
    return _by_turns(residuals, operands, lead, (sums, dtype, spec), target)


def _by_turns(
    residuals: Residuals, operands: Operands, lead: tuple[int, ...], how: tuple[Any, Any, Any], target: Any
) -> tuple:
    """Example after example, or two by two, the gradient so far handed on."""
    sums, _, spec = how
    shape = Shape.of(*residuals[:3], lead)
    count = 2 if not sums and _share_programs(residuals, operands, lead, spec) else 1
    turns = shape.examples // count
    own_target = jax.ShapeDtypeStruct((1, *target.shape[len(lead) :]), target.dtype)
    partial = jax.ShapeDtypeStruct(own_target.shape, jnp.float32)

    def launch(turn, before, target) -> tuple[Any, tuple[Any, dict[str, jax.Array]]]:
        def own(x):
            here, every = x.shape[: len(lead)], flat(x, x.ndim - len(lead))
            if every.shape[0] == 1:
                return every
            if here == lead:  # for two of two examples that is no copy
                return lax.dynamic_slice_in_dim(every, turn * count, count)
            examples = jnp.asarray(turn, jnp.int32) * count + jnp.arange(count, dtype=jnp.int32)
            return every[shape.example(here)(examples)]

        own_residuals, own_operands = Residuals(*map(own, residuals)), operands.map(lambda _, x: own(x))
        dq, found, total = query_pass(own_residuals, own_operands, (count,), *how, target, before, together=count > 1)
        return total, (dq, found)

    if turns == 1:
        total, (dq, found) = launch(0, None, own_target)
    else:
        before, first = launch(0, None, partial)
        before, others = lax.scan(lambda before, turn: launch(turn, before, partial), before, jnp.arange(1, turns - 1))
        total, last = launch(turns - 1, before, own_target)

        def joined(first, others, last, axis):
            sizes = *first.shape[:axis], (turns - 2) * count, *first.shape[axis + 1 :]
            return jnp.concatenate([first, jnp.moveaxis(others, 0, axis).reshape(sizes), last], axis)

        dq = joined(first[0], others[0], last[0], 0)
        found = {name: joined(first[1][name], others[1][name], last[1][name], 1) for name in first[1]}
    found = {name: x.reshape(x.shape[0], *lead, *x.shape[2:]) for name, x in found.items()}
    return dq.reshape(*lead, *dq.shape[1:]), found, total.reshape(target.shape)


def _share_programs(residuals: Residuals, operands: Operands, lead: tuple[int, ...], spec: AttentionSpec) -> bool:
    """Whether a program may have two examples: they share the bias itself, not only its gradient, and attend the same
    tiles, there is an even number of them, and room.

    Sums over rows would be more than its registers hold (at head dim 64 up to 3 KiB of them were spilled).
    """
    moving = [x for name, x in operands.items() if OWN_RANK.get(name) == 0 and name not in _MOVES_NO_TILE]
    shared = math.prod(operands.bias.shape[: len(lead)]) == 1 and all(x.size == 1 for x in moving)
    return shared and math.prod(lead) % 2 == 0 and pairs_fit(spec, *residuals[:3], operands)
