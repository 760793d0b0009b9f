"""How full arrays are cut into tiles, and products and sums over tiles; plain JAX.

Arrays are laid out by head group: queries [..., T, K, G, D] with G = H // K, keys [..., S, K, D], scores of a tile
[..., K, G, block_q, block_kv]. Leading dims stay as they are; a size-1 dim (an operand that is not mapped under vmap)
meets a full one by broadcasting within a tile.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from flash_jax.spec import AttentionSpec
from flash_jax.tiles.sums import sum_to


def product(subscripts: str, a: jax.Array, b: jax.Array, spec: AttentionSpec) -> jax.Array:
    """einsum summed in float32 (float64 for float64 inputs), with float32 operands at the precision of the call."""
    precision = lax.Precision.DEFAULT if spec.precision == "tf32" else lax.Precision.HIGHEST
    dtype = np.promote_types(a.dtype, np.float32)
    return jnp.einsum(subscripts, a, b, precision=precision, preferred_element_type=dtype)


def add_tile(total: jax.Array, x: jax.Array, start: jax.Array, axis: int) -> jax.Array:
    """`total` with tile `x` added from `start` on along `axis` (negative), summed over what `total` holds at size 1."""
    axis += total.ndim
    size = x.shape[axis]
    x = sum_to(x, (*total.shape[:axis], size, *total.shape[axis + 1 :]))
    old = lax.dynamic_slice_in_dim(total, start, size, axis)
    return lax.dynamic_update_slice_in_dim(total, old + x, start, axis)


def dense_tile(x: jax.Array, starts: tuple[jax.Array, jax.Array], blocks: tuple[int, int]) -> jax.Array:
    """The tile of x [..., T or 1, S or 1] at `starts`, cut in place: padding would cost a copy of x.

    What lies past the end of x, in the last tiles, is some other entry of x.
    """
    for axis, start, block in zip((-2, -1), starts, blocks, strict=True):
        size = x.shape[axis]
        if size == 1:
            continue
        x = lax.dynamic_slice_in_dim(x, start, block, axis + x.ndim)  # moved back where it would pass the end ...
        if size % block:
            x = jnp.roll(x, _moved(start, size, block), axis)  # ... so entries are moved back to their places
    return x


def add_dense_tile(total: jax.Array, x: jax.Array, starts: tuple[jax.Array, jax.Array]) -> jax.Array:
    """`total` [..., T or 1, S or 1] with tile x added at `starts`; what of x lies past the end must be 0."""
    sizes, blocks = total.shape[-2:], x.shape[-2:]
    here = [block if size > 1 else 1 for size, block in zip(sizes, blocks, strict=True)]
    x = sum_to(x, (*total.shape[:-2], *here))
    index = [jnp.zeros((), jnp.int32)] * total.ndim
    for axis, start, size, block in zip((-2, -1), starts, sizes, blocks, strict=True):
        if size == 1:
            continue
        index[axis] = jnp.minimum(start, size - block)
        if size % block:
            x = jnp.roll(x, -_moved(start, size, block), axis)
    old = lax.dynamic_slice(total, index, x.shape)
    return lax.dynamic_update_slice(total, old + x, index)


def diagonal_sums(x: jax.Array) -> jax.Array:
    """Sums over the diagonals of x [..., n, m], those of the least row - column first: [..., n + m - 1]."""
    n, m = x.shape[-2:]
    x = jnp.flip(x, -1)  # entries of a diagonal now lie at the same row + column
    x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, n)]).reshape(*x.shape[:-2], n * (n + m))
    # Read with rows one shorter, each row begins one entry further right.
    return x[..., : n * (n + m - 1)].reshape(*x.shape[:-1], n, n + m - 1).sum(-2)


def _moved(start: jax.Array, size: int, block: int) -> jax.Array:
    """By how much a slice of `block` entries from `start` is moved to lie inside `size`: 0, or negative."""
    return jnp.minimum(start, size - block) - start


def broadcast_lead(*arrays: tuple[jax.Array | None, int]) -> tuple[int, ...]:
    """The common leading dims of (array, number of trailing dims) pairs, Nones left out."""
    return np.broadcast_shapes(*(x.shape[: x.ndim - trailing] for x, trailing in arrays if x is not None))


def pad(x: jax.Array, axis: int, block: int) -> jax.Array:
    """x with zeros at the end of `axis` (negative), up to a whole number of tiles."""
    axis += x.ndim
    missing = round_up(x.shape[axis], block) - x.shape[axis]
    return jnp.pad(x, [(0, missing if d == axis else 0) for d in range(x.ndim)]) if missing else x


def round_up(n: int, block: int) -> int:
    """The next multiple of `block`."""
    return -(-n // block) * block
