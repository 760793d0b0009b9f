"""Attention by its definition: quadratic, dense, written straight from the contract and differentiated by JAX itself.

This is the judge of every other implementation, so it shares no code with them. Read beside docs/semantics.md.
"""

import jax
import jax.numpy as jnp
import numpy as np

from flash_jax.spec import AttentionSpec, Operands


def attention(
    query: jax.Array, key: jax.Array, value: jax.Array, operands: Operands, spec: AttentionSpec
) -> tuple[jax.Array, jax.Array]:
    """(out [..., T, H, Dv] in query's dtype, lse [..., H, T] float32) of query, key and value.

    Scores, probabilities and sums are float32 (float64 for float64 inputs), products at the highest precision.
    """
    T, H = query.shape[-3:-1]
    S, K = key.shape[-3:-1]
    groups = H // K if K else 0
    dtype = np.promote_types(query.dtype, np.float32)

    allowed = _allowed(T, S, operands, spec)  # [..., 1, T, S]
    dead_query = ~allowed.any(axis=-1)  # [..., 1, T]: attends nothing
    dead_key = ~allowed.any(axis=-2)  # [..., 1, S]: attended by none

    # What takes part in nothing is replaced before any product, since 0 * NaN is NaN.
    q = jnp.where(_as_rows(dead_query), 0, query).astype(dtype)
    k = jnp.where(_as_rows(dead_key), 0, key).astype(dtype)
    v = jnp.where(_as_rows(dead_key), 0, value).astype(dtype)

    q = q.reshape(*q.shape[:-2], K, groups, q.shape[-1])  # query head h = kv head * groups + g
    scores = jnp.einsum("...tkgd,...skd->...kgts", q, k, precision="highest")
    scores = scores.reshape(*scores.shape[:-4], H, T, S) * _scale(operands, spec, dtype)
    scores = jnp.where(allowed, scores, -jnp.inf)

    # A dead row gets harmless scores here and its true values (0 and -inf) at the end, so that no derivative meets a
    # NaN.
    scores = jnp.where(dead_query[..., None], 0, scores)
    lse = jax.nn.logsumexp(scores, axis=-1) if S else jnp.zeros(scores.shape[:-1], dtype)  # [..., H, T]
    p = jnp.exp(scores - lse[..., None])

    p = p.reshape(*p.shape[:-3], K, groups, T, S)
    out = jnp.einsum("...kgts,...skd->...tkgd", p, v, precision="highest")
    out = out.reshape(*out.shape[:-3], H, out.shape[-1]).astype(query.dtype)
    return jnp.where(_as_rows(dead_query), 0, out), jnp.where(dead_query, -jnp.inf, lse)


def _allowed(T: int, S: int, operands: Operands, spec: AttentionSpec) -> jax.Array:
    """bool [..., 1, T, S]: whether query i attends key j."""
    q_length = _lift(operands.q_lengths, T if spec.q_length is None else spec.q_length)
    kv_length = _lift(operands.kv_lengths, S if spec.kv_length is None else spec.kv_length)
    default_offset = kv_length - q_length
    q_offset = _lift(operands.q_offset, default_offset if spec.q_offset is None else spec.q_offset)

    i = jnp.arange(T, dtype=jnp.int32)[:, None]
    j = jnp.arange(S, dtype=jnp.int32)[None, :]
    allowed = (i < q_length) & (j < kv_length)
    position = i + q_offset  # of the query; key j stands at position j
    if spec.causal:
        allowed &= j <= position
    if spec.window is not None:
        left, right = spec.window
        if left is not None:
            allowed &= j >= position - left
        if right is not None:
            allowed &= j <= position + right
    return allowed if allowed.ndim > 2 else allowed[None]


def _lift(array, otherwise):
    """A per-example array [...] as [..., 1, 1, 1], so that it meets [..., H, T, S]; the static value where None."""
    return otherwise if array is None else array[..., None, None, None]


def _scale(operands: Operands, spec: AttentionSpec, dtype):
    return jnp.asarray(spec.scale, dtype) if operands.scale is None else operands.scale[..., None, None, None]


def _as_rows(dead: jax.Array) -> jax.Array:
    """[..., 1, T] as [..., T, 1, 1], to select rows of [..., T, H, D]."""
    return jnp.moveaxis(dead, -2, -1)[..., None]
