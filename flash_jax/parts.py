"""A part of a call: some of its rows and keys, as a device holds them that shares the sequences with others.

Positions, lengths and indices of the part are those that its rows and keys have in the whole, so that what is computed
of it is what the whole call computes there.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from flash_jax.compat import vary_like
from flash_jax.spec import MAP_BLOCK, AttentionSpec, Operands
from flash_jax.tiles.masks import Geometry, Int

_NUMBERS = {
    "q_lengths": "q_length", "kv_lengths": "kv_length", "q_offset": "q_offset", "prefix_lengths": "prefix_length",
}  # fmt: skip
"""Numbers of an example: as an operand, and as a static choice."""


def part_of(
    q: jax.Array, k: jax.Array, operands: Operands, spec: AttentionSpec, row: Int, col: Int
) -> tuple[Operands, AttentionSpec]:
    """The operands and the spec of the part that begins at `row` and `col` of the whole, whose size is `spec.whole`.

    q [..., T, H, D] and k [..., S, K, D] are those of the part. So are positions and segment ids; `bias` and `mask`
    have the rows of the part, and all keys of the whole (or 1), of which its own are cut out; all else is the whole's.
    """
    whole = spec.whole or (q.shape[-3], k.shape[-3])
    T, S, rank = q.shape[-3], k.shape[-3], q.ndim - 3
    geometry = Geometry.of(spec, operands, *whole)
    kv_positions, shift = operands.kv_positions, col
    if kv_positions is not None:
        shift = 0
    elif spec.chunk_size is not None or operands.q_positions is not None:  # which count from the start of the whole
        kv_positions, shift = (col + jnp.arange(S, dtype=jnp.int32)).reshape(*(1,) * rank, S), 0
    numbers = {
        "q_lengths": _within(geometry.q_length, row, T, whole[0]),
        "kv_lengths": _within(geometry.kv_length, col, S, whole[1]),
        "q_offset": geometry.q_offset + row - shift,
        "prefix_lengths": None if geometry.prefix is None else geometry.prefix - shift,
    }
    static = {_NUMBERS[name]: x if isinstance(x, int) else None for name, x in numbers.items()}
    arrays = {name: None if isinstance(x, int) else x for name, x in numbers.items()}
    arrays |= vary_like({"row_start": jnp.asarray(row, jnp.int32), "col_start": jnp.asarray(col, jnp.int32)}, q, k)
    arrays = {n: x.reshape((1,) * rank) if x is not None and not x.ndim else x for n, x in arrays.items()}
    cut = {name: _columns(getattr(operands, name), col, S) for name in ("bias", "mask")}
    block_map = _blocks(operands.block_map, (row, col), (T, S), whole)
    new = dataclasses.replace(operands, **arrays, **cut, kv_positions=kv_positions, block_map=block_map)
    return new, dataclasses.replace(spec, **static, whole=whole, context_axis=None, context_strategy=None)


def _within(length: Int, start: Int, count: int, size: int) -> Int:
    """How many of `count` slots from `start` are before `length`, of a sequence of `size`."""
    if isinstance(length, int) and length >= size:  # those of a part are always inside
        return count
    if isinstance(length, int) and isinstance(start, int):
        return min(max(length - start, 0), count)
    return jnp.clip(length - start, 0, count)


def _columns(x: jax.Array | None, col: Int, S: int) -> jax.Array | None:
    """The part's keys of a bias or mask."""
    if x is None or x.shape[-1] in (1, S):
        return x
    return lax.dynamic_slice_in_dim(x, col, S, x.ndim - 1)


def _blocks(found: jax.Array | None, starts: tuple[Int, Int], sizes: tuple[int, int], whole: tuple[int, int]):
    """The part's blocks of a block map; None, so that all are visited, where the part does not begin and end at one."""
    if found is None:
        return None
    for axis, (start, size, full) in enumerate(zip(starts, sizes, whole, strict=True)):
        if size == full:
            continue
        if size % MAP_BLOCK:
            return None
        block = start // MAP_BLOCK if isinstance(start, int) else lax.div(start, np.int32(MAP_BLOCK))
        found = lax.dynamic_slice_in_dim(found, block, size // MAP_BLOCK, found.ndim - 2 + axis)
    return found
