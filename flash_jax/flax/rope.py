"""Rotary positions (RoPE): a query or key is turned by an angle that grows with its position.

Su et al., RoFormer (arXiv:2104.09864). The score of two rotated vectors depends on the distance of their positions
only.
"""

import jax
import jax.numpy as jnp
import numpy as np


def rotate(x: jax.Array, positions: jax.Array, theta: float) -> jax.Array:
    """x [..., T, H, D] with row t turned by the angles of `positions[t]`; positions [T] of any integer dtype.

    Dimension c of the first half pairs with c + D/2 (the layout of GPT-NeoX and Llama checkpoints as Hugging Face
    stores them); the pair turns by positions * theta ** (-2c / D). Computed in float32 or wider, returned in x's dtype.
    """
    half = x.shape[-1] // 2
    wide = np.promote_types(x.dtype, np.float32)
    frequencies = theta ** (-jnp.arange(half, dtype=wide) / half)  # [D/2], radians per position
    angles = positions.astype(wide)[:, None, None] * frequencies  # [T, 1, D/2], the same for every head
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    first, second = jnp.split(x.astype(wide), 2, axis=-1)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.astype(x.dtype)


def first_position(x: jax.Array, context_axis: str | None) -> jax.Array | int:
    """The position of the first of the tokens of x [..., T, H, D]: 0, but on a device that has a part of them."""
    mesh = jax.sharding.get_abstract_mesh()
    kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    if context_axis is None or kinds.get(context_axis) != jax.sharding.AxisType.Manual:
        return 0
    return jax.lax.axis_index(context_axis) * x.shape[-3]


def rotate_both(query: jax.Array, key: jax.Array, start: jax.Array | int, theta: float | None):
    """query [..., T, H, D] and key [..., T, K, D], row t rotated for position start + t; unchanged if theta is None."""
    if theta is None:
        return query, key
    positions = start + jnp.arange(query.shape[-3], dtype=jnp.int32)
    return rotate(query, positions, theta), rotate(key, positions, theta)
