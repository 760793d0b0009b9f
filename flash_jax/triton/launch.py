"""What the kernels share: blocks of arrays for a grid of programs, ragged loads and stores, products, loops."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from flash_jax import compat
from flash_jax.spec import AttentionSpec
from flash_jax.tiles.block_map import TileList
from flash_jax.tiles.masks import Int, TileRange
from flash_jax.triton.columns import width
from flash_jax.triton.tiling import Tile

Struct = jax.Array | jax.ShapeDtypeStruct


@dataclasses.dataclass(frozen=True)
class Shape:
    """The sizes of one call, and the block specs that follow from them, for programs of a tile, head and example.

    `lead` are the full leading dims, flattened into examples; an operand whose own leading dims are of size 1 in places
    is read in place by index, not copied.
    """

    lead: tuple[int, ...]
    T: int
    S: int
    H: int
    K: int
    D: int
    Dv: int

    @classmethod
    def of(cls, q: jax.Array, k: jax.Array, v: jax.Array, lead: tuple[int, ...]) -> "Shape":
        """The sizes of query [..., T, H, D], key [..., S, K, D] and value [..., S, K, Dv]."""
        T, H, D = q.shape[-3:]
        S, K, Dv = v.shape[-3:]
        return cls(lead, T, S, H, K, D, Dv)

    @property
    def groups(self) -> int:
        """Query heads that share one key/value head."""
        return self.H // self.K

    @property
    def examples(self) -> int:
        """Product of the leading dims."""
        return _product(self.lead)

    def example(self, own: tuple[int, ...]) -> Callable[[Int], Int]:
        """Maps an example of the grid to the index of its data in an operand with leading dims `own`, flattened."""
        if own == self.lead:
            return lambda b: b
        if _product(own) == 1:
            return lambda b: 0

        def index(b):
            own_index, stride = 0, 1
            for full, mine in zip(reversed(self.lead), reversed(own), strict=True):
                here, b = lax.rem(b, jnp.full_like(b, full)), lax.div(b, jnp.full_like(b, full))
                if mine != 1:
                    own_index, stride = own_index + here * stride, stride * mine
            return own_index

        return index

    def combined(self, own: tuple[int, ...]) -> Callable[[Int, Int], Int]:
        """The inverse: from the index of data of leading dims `own`, and the how-manieth example that shares it."""

        def example(mine, turn):
            index, stride = 0, 1
            for full, kept in zip(reversed(self.lead), reversed(own), strict=True):
                source = mine if kept != 1 else turn
                here, rest = lax.rem(source, jnp.full_like(source, full)), lax.div(source, jnp.full_like(source, full))
                mine, turn = (rest, turn) if kept != 1 else (mine, rest)
                index, stride = index + here * stride, stride * full
            return jnp.asarray(index, jnp.int32)

        return example

    def rows(self, x: Struct, rows: int | None, heads: int | None, place: Callable) -> pl.BlockSpec:
        """Spec for x [..., length, heads, dim]: `rows` of them (None: all) of one head (or of `heads`).

        `place(tile, head)` gives the indices of the row block and the head (or head block) from those of a program.
        """
        example = self.example(x.shape[:-3])

        def index_map(tile, head, b):
            row, head = place(tile, head)
            return example(b), row, head, 0

        return pl.BlockSpec((None, rows or x.shape[-3], heads, width(x.shape[-1], x.dtype.itemsize)), index_map)

    def stats(self, x: Struct, rows: int | None, heads: int | None, place: Callable) -> pl.BlockSpec:
        """Spec for x [..., H, T], as `rows` does for arrays with a head dim."""
        example = self.example(x.shape[:-2])

        def index_map(tile, head, b):
            row, head = place(tile, head)
            return example(b), head, row

        return pl.BlockSpec((None, heads, rows or x.shape[-1]), index_map)

    def entries(self, x: Struct, rows: int, place: Callable) -> pl.BlockSpec:
        """Spec for x [..., H, T, S]: `rows` of one head."""
        example = self.example(x.shape[:-3])

        def index_map(tile, head, b):
            row, head = place(tile, head)
            return example(b), head, row, 0

        return pl.BlockSpec((None, None, rows, x.shape[-1]), index_map)


def flat(x: jax.Array, rank: int) -> jax.Array:
    """x with its leading dims flattened into one; `rank` dims stay."""
    return x.reshape(-1, *x.shape[x.ndim - rank :])


def load_stats(ref: Any, keep: jax.Array | None) -> jax.Array:
    """The numbers of a ref [n], one for each row, 0 (and not read) where `keep` is False."""
    return ref[...] if keep is None else plgpu.load(ref, mask=keep, other=0)


def store_stats(ref: Any, x: jax.Array, keep: jax.Array | None) -> None:
    """Writes x [n] to a ref, where `keep` is True."""
    plgpu.store(ref, x, mask=keep)


def over_tiles(seen: TileRange | TileList, body: Callable, carry: Any, *, whole: bool) -> Any:
    """Runs `carry = body(tile, carry, masked=...)` over the tiles of a range or list, those that need a mask first.

    `whole` is whether the array holds even one whole tile: if not, none can be read without a mask.
    """
    masked, full = functools.partial(body, masked=True), functools.partial(body, masked=False)
    if isinstance(seen, TileList):
        carry = _loop(seen.full, seen.stop, lambda n, carry: masked(seen.tile(n), carry), carry)
        none = jnp.zeros((), jnp.int32)
        return _loop(none, seen.full, lambda n, carry: full(seen.tile(n), carry), carry) if whole else carry
    start, full_start, full_stop, stop = seen
    if full_stop is stop or start is full_start:
        carry = _loop(start, full_start, masked, carry)
        carry = _loop(full_stop, stop, masked, carry)
    else:  # one loop for both ends, since each costs registers
        skipped = full_stop - full_start

        def either(j, carry):
            return masked(j + skipped * (j >= full_start).astype(jnp.int32), carry)

        carry = _loop(start, stop - skipped, either, carry)
    return _loop(full_start, full_stop, full, carry) if whole else carry


def _loop(start: Int, stop: Int, body: Callable, carry: Any) -> Any:
    """fori_loop, but nothing at all where the bounds are known to leave nothing to do."""
    if start is stop or (isinstance(start, int) and isinstance(stop, int) and start >= stop):
        return carry
    # Under jax_enable_x64 a loop counts in 64 bits, unlike everything that the number meets.
    return lax.fori_loop(start, stop, lambda j, carry: body(jnp.asarray(j, jnp.int32), carry), carry)


def with_care(run: Callable, guard: bool, spoiled: Callable) -> Any:
    """`run(careful=False)`; where its results are `spoiled` by a NaN, `run(careful=True)` in its place.

    What no query of a tile attends must not be multiplied, as 0 * NaN is NaN. To find out which keys these are, where
    no closed form tells (a mask, segments, positions that are arrays), costs more than the products of the tile. So
    at first all are multiplied; that is the end of it unless there was a NaN, which is rare, or (`guard` is False)
    a closed form has told.
    """
    found = run(careful=False)
    return lax.cond(spoiled(found), lambda: run(careful=True), lambda: found) if guard else found


def has_nan(*tiles: jax.Array) -> jax.Array:
    """Whether there is a NaN in any of the tiles (or infinities of both signs)."""
    total = sum((tile.sum() for tile in tiles[1:]), tiles[0].sum())
    return total != total


def launch(
    kernel: functools.partial,
    grid: tuple[int, int, int],
    specs: tuple[Any, Any],
    outputs: Any,
    tile: Tile,
    spec: AttentionSpec,
    name: str | None = None,
    aliases: dict[int, int] | None = None,
) -> Callable:
    """A pallas_call of `kernel` over `grid`, with (input, output) block `specs`, named as the kernel is by default.

    `aliases` says, by the number of each, which input an output takes the place of.
    """
    in_specs, out_specs = specs
    return pl.pallas_call(
        kernel,
        grid=grid,
        in_specs=in_specs,
        out_specs=out_specs,
        out_shape=outputs,
        compiler_params=plgpu.CompilerParams(num_warps=tile.num_warps, num_stages=tile.num_stages),
        input_output_aliases=aliases or {},
        interpret=spec.interpret,
        name=name or kernel.func.__name__,
    )


def flat_output(x: jax.ShapeDtypeStruct, rank: int) -> jax.ShapeDtypeStruct:
    """The struct with its leading dims flattened into one."""
    own = x.shape[len(x.shape) - rank :]
    return output((_product(x.shape[: len(x.shape) - rank]), *own), x.dtype, x)


def output(shape: tuple[int, ...], dtype: Any, like: Any) -> jax.ShapeDtypeStruct:
    """An output that varies over the manual axes of `like`."""
    return compat.shape_like(shape, dtype, like)


def _product(dims: tuple[int, ...]) -> int:
    n = 1
    for d in dims:
        n *= d
    return n
