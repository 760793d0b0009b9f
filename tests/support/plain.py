"""Dense attention as anyone would write it in JAX: the yardstick of the accuracy rule, never the judge."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


def plain_attention(query, key, value, *, scale=None, return_lse=False, **options):
    """Attention by a matrix of float32 scores `[..., K, H // K, T, S]`, differentiated by JAX.

    The probabilities are rounded to the inputs' dtype before they meet the values; float32 products are at HIGHEST;
    float64 inputs are computed in float64 throughout. `options` are those of `visible`.
    """
    exact = np.promote_types(query.dtype, np.float32)
    (*batch, T, H, D), (S, K, Dv) = query.shape, (*key.shape[-3:-1], value.shape[-1])
    scale = D**-0.5 if scale is None else jnp.asarray(scale).astype(exact)
    grouped = jnp.reshape(query, (*batch, T, K, H // K, D))
    scores = scale * _product("...tkgd,...skd->...kgts", grouped, key, exact)
    seen = visible(T, S, tuple(batch), **options)[..., None, None, :, :]
    scores = jnp.where(seen, scores, -jnp.inf)
    top = lax.stop_gradient(jnp.max(scores, axis=-1, keepdims=True, initial=-jnp.inf))
    top = jnp.where(top == -jnp.inf, jnp.zeros_like(top), top)
    weights = jnp.exp(scores - top)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    dead = total == 0
    total = jnp.where(dead, jnp.ones_like(total), total)
    probabilities = _rounded(weights / total, value.dtype)
    out = _product("...kgts,...skd->...tkgd", probabilities, value, exact)
    out = jnp.reshape(out.astype(query.dtype), (*batch, T, H, Dv))
    lse = jnp.where(dead, -jnp.inf, top + jnp.log(total))
    return (out, jnp.reshape(lse, (*batch, H, T))) if return_lse else out


def visible(T, S, batch, *, causal=False, window=None, q_offset=None, q_lengths=None, kv_lengths=None):
    """A bool matrix `[..., T, S]` with the leading dims `batch`: True where the row may attend the key."""

    def per_example(x):
        return jnp.broadcast_to(jnp.asarray(x, jnp.int32), batch)[..., None, None]

    rows = per_example(T if q_lengths is None else jnp.clip(jnp.asarray(q_lengths), 0, T))
    keys = per_example(S if kv_lengths is None else jnp.clip(jnp.asarray(kv_lengths), 0, S))
    offset = keys - rows if q_offset is None else per_example(q_offset)
    i, j = jnp.arange(T, dtype=jnp.int32)[:, None], jnp.arange(S, dtype=jnp.int32)[None, :]
    distance = j - (i + offset)
    seen = (i < rows) & (j < keys)
    left, right = window or (None, None)
    if causal:
        seen &= distance <= 0
    if left is not None:
        seen &= distance >= -left
    if right is not None:
        seen &= distance <= right
    return seen


def _rounded(x, dtype):
    """`x` in `dtype`; spelled out, since a compiler may drop a cast that the next operation undoes."""
    kind = jnp.finfo(dtype)
    return lax.reduce_precision(x, kind.nexp, kind.nmant).astype(dtype)


def _product(subscripts, a, b, exact):
    return jnp.einsum(subscripts, a, b, precision=jax.lax.Precision.HIGHEST, preferred_element_type=exact)
