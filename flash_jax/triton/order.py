"""In which order the programs of a kernel start, of which each has a tile of one head of one example.

A GPU starts them in the order of the grid, the first dim fastest. Tiles of one head share the keys that they read, so
they should run at the same time, while the cache of level 2 holds these. There are two reasons to let several heads or
examples go together, first one tile of each, then the next, as many as have room in the cache:

- Where tiles are uneven, as under a causal mask, a heavy one that starts late is waited for at the end. If the heaviest
  tiles of several heads start first, what runs last is light.
- A bias or mask that heads or examples share is read from memory once for all that go together.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from flash_jax.spec import AttentionSpec, Operands
from flash_jax.tiles.masks import Int
from flash_jax.triton.launch import Shape, launch
from flash_jax.triton.tiling import Tile

_CACHED = 16 * 2**20  # bytes that programs share of the cache of level 2: of the 40 MiB of an A100, or 50 of an H200
_DOCUMENTS = 16  # so many are taken to lie in a row with segment ids, of which one is read at a time


class Grid(NamedTuple):
    """How many there are of what has a program each, and of these, how many go together."""

    tiles: int
    heads: int
    examples: int
    heads_together: int = 1
    examples_together: int = 1

    @classmethod
    def of(cls, tiles: int, heads: int, streamed: int, shape: Shape, operands: Operands, spec: AttentionSpec) -> "Grid":
        """Programs for `tiles` of each of so many heads, which read `streamed` bytes a head."""
        if operands.q_segment_ids is not None:
            streamed //= _DOCUMENTS
        room = _CACHED // max(1, streamed)
        all_heads, some_examples = _readers(operands, shape)
        # Heads or examples, not both, as each costs registers.
        if heads > 1 and (all_heads or (some_examples == 1 and _uneven(spec))):
            return cls(tiles, heads, shape.examples, heads_together=_divisor(heads, room))
        return cls(tiles, heads, shape.examples, examples_together=_divisor(some_examples, room))

    @property
    def dims(self) -> tuple[int, int, int]:
        """(tiles of those that go together, groups of heads, groups of examples)."""
        together = self.heads_together * self.examples_together
        return self.tiles * together, self.heads // self.heads_together, self.examples // self.examples_together

    def place(self, program: Int, heads: Int, examples: Int) -> tuple[Int, Int, Int]:
        """(tile, head, example) of a program; arguments: its index in `dims`.

        Which of those that go together it is for is told from the first dim, as of that alone the compiler knows how
        large it is: it makes fewer instructions of a range of tiles then, and keeps fewer numbers in registers.
        """
        program, head = _split(program, self.heads_together)
        tile, example = _split(program, self.examples_together)
        return tile, heads * self.heads_together + head, examples * self.examples_together + example


def bytes_of_head(*arrays: jax.Array | None) -> int:
    """Bytes that one head has in arrays [..., length, heads, dim]."""
    return sum(x.shape[-3] * x.shape[-1] * x.dtype.itemsize for x in arrays if x is not None)


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

    def placed(block: pl.BlockSpec) -> pl.BlockSpec:
        index_map = block.index_map
        if index_map is None:
            return block
        return dataclasses.replace(block, index_map=lambda *program: index_map(*grid.place(*program)))

    specs = jax.tree.map(placed, specs, is_leaf=lambda x: isinstance(x, pl.BlockSpec))
    numbered = functools.partial(_numbered, kernel, grid)
    return launch(numbered, grid.dims, specs, outputs, tile, spec, name or kernel.func.__name__, aliases)


def _numbered(kernel: Callable, grid: Grid, *refs: Any) -> None:
    kernel(grid.place(pl.program_id(0), 0, 0)[0], *refs)


def _divisor(n: int, most: int) -> int:
    """The largest divisor of n that is at most `most`, or 1."""
    return max(d for d in range(1, max(1, min(n, most)) + 1) if n % d == 0)


def _readers(operands: Operands, shape: Shape) -> tuple[bool, int]:
    """Of a bias or mask that has an entry for each pair: whether heads share it, and how many examples in a row do."""
    heads, examples = False, 1
    for x in (operands.bias, operands.mask):
        if x is not None and 1 not in x.shape[-2:]:
            *lead, own_heads, _, _ = x.shape
            shared = len(list(itertools.takewhile(lambda n: n == 1, reversed(lead))))
            heads |= own_heads == 1
            examples = max(examples, math.prod(shape.lead[len(lead) - shared :]))
    return heads, examples


def _uneven(spec: AttentionSpec) -> bool:
    """Whether a later query may see more keys, as far as can be told from the options."""
    left, right = spec.band
    return left is None and right is not None and spec.chunk_size is None


def _split(number: Int, n: int) -> tuple[Int, Int]:
    """(number // n, number % n)."""
    if n == 1:
        return number, 0
    divisor = jnp.full_like(number, n)
    return lax.div(number, divisor), lax.rem(number, divisor)
