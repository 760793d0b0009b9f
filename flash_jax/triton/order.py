"""In which order the programs of a kernel start, of which each has a tile of one head of one example.

A GPU starts them in the order of the grid, the first dim fastest. Tiles of one head share the keys that they read, so
they should run at the same time, while the cache of level 2 holds these. But where tiles are uneven, as under a causal
mask, a heavy one that starts late is waited for at the end. So there several heads go together, as many as have room in
the cache: first the heaviest tile of each, then the next, and what runs last is light.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from flash_jax.spec import AttentionSpec
from flash_jax.tiles.masks import Int
from flash_jax.triton.launch import launch
from flash_jax.triton.tiling import Tile

_CACHED = 16 * 2**20  # bytes that programs share of the cache of level 2: of the 40 MiB of an A100, or 50 of an H200


class Grid(NamedTuple):
    """How many there are of what has a program each; `streamed` are the bytes that the programs of a head all read."""

    tiles: int
    heads: int
    examples: int
    streamed: int


def bytes_of_head(*arrays: jax.Array) -> int:
    """Bytes that one head has in arrays [..., length, heads, dim]."""
    return sum(x.shape[-3] * x.shape[-1] * x.dtype.itemsize for x in arrays)


def launch_tiles(
    kernel: functools.partial,
    grid: Grid,
    specs: tuple[Any, Any],
    outputs: Any,
    tile: Tile,
    spec: AttentionSpec,
    name: str | None = None,
    aliases: dict[int, int] | None = None,
) -> Callable:
    """`launch` of a kernel that is given the number of its tile before all else; the first tiles should be heaviest.

    The index maps of `specs` are given (tile, head, example).
    """
    together = heads_together(grid.heads, grid.streamed) if _uneven(spec) else 1
    if together > 1:
        turned = functools.partial(_turned, together=together)
        specs = jax.tree.map(turned, specs, is_leaf=lambda x: isinstance(x, pl.BlockSpec))
    dims = grid.tiles * together, grid.heads // together, grid.examples
    numbered = functools.partial(_numbered, kernel, together)
    return launch(numbered, dims, specs, outputs, tile, spec, name or kernel.func.__name__, aliases)


def heads_together(heads: int, streamed: int) -> int:
    """The largest divisor of `heads` of which the cache has room for what is streamed, `streamed` bytes each."""
    return max(n for n in range(1, heads + 1) if heads % n == 0 and (n == 1 or n * streamed <= _CACHED))


def _uneven(spec: AttentionSpec) -> bool:
    """Whether a later query may see more keys, as far as can be told from the options."""
    left, right = spec.band
    return left is None and right is not None and spec.chunk_size is None


def _numbered(kernel: Callable, together: int, *refs: Any) -> None:
    kernel(_split(pl.program_id(0), together)[0], *refs)


def _turned(block: pl.BlockSpec, together: int) -> pl.BlockSpec:
    """The spec for a grid of (tiles x heads that go together, groups of such heads, examples)."""
    index_map = block.index_map
    if index_map is None:
        return block

    def turned(program, group, example):
        tile, head = _split(program, together)
        return index_map(tile, group * together + head, example)

    return dataclasses.replace(block, index_map=turned)


def _split(program: jax.Array, together: int) -> tuple[jax.Array, Int]:
    """The tile of a program, and which of the heads that go together it is for.

    Both are from the first dim of the grid, as of that alone the compiler knows how large it is: it makes fewer
    instructions of a range of tiles then, and keeps fewer numbers in registers.
    """
    if together == 1:
        return program, 0
    divisor = jnp.full_like(program, together)
    return lax.div(program, divisor), lax.rem(program, divisor)
