"""Attention by its definition: quadratic, dense, written straight from the contract and differentiated by JAX itself.

This is the judge of every other implementation, so it shares no code with them but the random bits of dropout. Read
beside docs/semantics.md.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from flash_jax.spec import AttentionSpec, Mod, Operands
from flash_jax.tiles import dropout


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

    allowed = _allowed(T, S, operands, spec)  # [..., H or 1, T, S]
    if spec.mask_mod is not None:
        allowed &= _modified(spec.mask_mod, [], operands, (H, T, S))
    dead_query = ~allowed.any(axis=-1)  # [..., H or 1, T]: attends nothing
    dead_key = ~_by_kv_head(allowed, K).any(axis=(-3, -2))  # [..., K or 1, S]: attended by none

    # What takes part in nothing is replaced before any product, since 0 * NaN is NaN.
    q = jnp.where(_as_rows(dead_query), 0, query).astype(dtype)
    k = jnp.where(_as_rows(dead_key), 0, key).astype(dtype)
    v = jnp.where(_as_rows(dead_key), 0, value).astype(dtype)

    q = q.reshape(*q.shape[:-2], K, groups, q.shape[-1])  # query head h = kv head * groups + g
    scores = jnp.einsum("...tkgd,...skd->...kgts", q, k, precision="highest")
    scores = scores.reshape(*scores.shape[:-4], H, T, S) * _scale(operands, spec, dtype)
    if spec.softcap is not None:
        scores = spec.softcap * jnp.tanh(scores / spec.softcap)
    if spec.score_mod is not None:
        scores = _modified(spec.score_mod, [scores], operands, (H, T, S)).astype(dtype)
        allowed &= scores != -jnp.inf
        dead_query = ~allowed.any(axis=-1)
    if operands.bias is not None:
        scores += operands.bias.astype(dtype)
    if operands.alibi_slopes is not None:
        position_q, position_k = _positions(T, S, operands, spec)
        scores -= operands.alibi_slopes[..., None, None] * jnp.abs(position_q - position_k).astype(dtype)
    scores = jnp.where(allowed, scores, -jnp.inf)

    # A dead row gets harmless scores here and its true values (0, and -inf or the sink) at the end, so that no
    # derivative meets a NaN.
    scores = jnp.where(dead_query[..., None], 0, scores)
    sink = None if operands.sinks is None else operands.sinks[..., None, None]
    p, lse = _softmax(scores, sink) if S else (scores, jnp.zeros(scores.shape[:-1], dtype))
    if operands.dropout_words is not None:
        p = jnp.where(_kept(T, S, operands.dropout_words, spec.dropout_rate), p / (1 - spec.dropout_rate), 0)

    p = p.reshape(*p.shape[:-3], K, groups, T, S)
    out = jnp.einsum("...kgts,...skd->...tkgd", p, v, precision="highest")
    out = out.reshape(*out.shape[:-3], H, out.shape[-1]).astype(query.dtype)
    dead_lse = -jnp.inf if operands.sinks is None else operands.sinks[..., None]
    return jnp.where(_as_rows(dead_query), 0, out), jnp.where(dead_query, dead_lse, lse)


def _softmax(scores: jax.Array, sink: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """(probabilities [..., H, T, S], lse [..., H, T]); the sink [..., H, 1, 1] is one more score of each row.

    Divided by the sum, not as exp(score - lse): lse rounds away the sum of a row whose scores are all huge.
    """
    top = scores.max(axis=-1, keepdims=True)
    top = lax.stop_gradient(top if sink is None else jnp.maximum(top, sink))
    weights = jnp.exp(scores - top)
    total = weights.sum(axis=-1, keepdims=True)
    if sink is not None:
        total += jnp.exp(sink - top)
    return weights / total, (top + jnp.log(total))[..., 0]


def _allowed(T: int, S: int, operands: Operands, spec: AttentionSpec) -> jax.Array:
    """bool [..., H or 1, T, S]: whether query i attends key j; all conditions must hold."""
    q_length, kv_length = _lengths(T, S, operands, spec)
    i = jnp.arange(T, dtype=jnp.int32)[:, None]
    j = jnp.arange(S, dtype=jnp.int32)[None, :]
    allowed = (i < q_length) & (j < kv_length)

    at_i, at_j = _positions(T, S, operands, spec)
    if spec.causal:
        before = at_j <= at_i
        prefix = _lift(operands.prefix_lengths, spec.prefix_length)
        if prefix is not None:
            before |= at_j < prefix
        allowed &= before
    if spec.chunk_size is not None:
        allowed &= at_i // spec.chunk_size == at_j // spec.chunk_size
    if spec.window is not None:
        left, right = spec.window
        if left is not None:
            allowed &= at_j >= at_i - left
        if right is not None:
            allowed &= at_j <= at_i + right

    if operands.q_segment_ids is not None and operands.kv_segment_ids is not None:
        id_i = operands.q_segment_ids[..., None, :, None]
        id_j = operands.kv_segment_ids[..., None, None, :]
        allowed &= (id_i == id_j) & (id_i >= 0)
    if operands.mask is not None:
        allowed &= operands.mask
    if operands.bias is not None:
        allowed &= operands.bias != -jnp.inf
    return jnp.broadcast_to(allowed, (*allowed.shape[:-2], T, S)) if allowed.ndim > 2 else allowed[None]


def _modified(mod: Mod, first: list, operands: Operands, sizes: tuple[int, int, int]) -> jax.Array:
    """The user's function at each entry, [..., H, T, S]: a function of scalars, mapped over all of them."""
    tables = [Table(x.reshape(x.shape[len(mod.batch) :])) for x in operands.mods]
    full = (*mod.batch, *sizes)
    b = jnp.arange(int(np.prod(mod.batch, dtype=np.int64)), dtype=jnp.int32).reshape(*mod.batch, 1, 1, 1)
    h, i, j = (jnp.arange(n, dtype=jnp.int32).reshape(-1, *(1,) * (2 - axis)) for axis, n in enumerate(sizes))

    def entry(*args):
        return mod.function(*args, *tables)

    for _ in full:
        entry = jax.vmap(entry)
    return entry(*(jnp.broadcast_to(x, full) for x in (*first, b, h, i, j)))


class Table:
    """An operand of a mod: `table[i, j]` is one entry, and an index outside is moved to the nearest end."""

    def __init__(self, x: jax.Array):
        narrow = jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize < 4  # read as float32
        self._x = x.astype(jnp.float32) if narrow else x
        self.shape, self.dtype, self.ndim = x.shape, self._x.dtype, x.ndim

    def __getitem__(self, index):
        index = index if isinstance(index, tuple) else (index,)
        index = () if index == (...,) else index
        pairs = zip(index, self.shape, strict=True)
        return self._x[tuple(i % n if isinstance(i, int) else jnp.clip(i, 0, n - 1) for i, n in pairs)]


def _lengths(T: int, S: int, operands: Operands, spec: AttentionSpec):
    """Rows and keys from these on are dead: numbers, or [..., 1, 1, 1]."""
    q_length = _lift(operands.q_lengths, T if spec.q_length is None else spec.q_length)
    kv_length = _lift(operands.kv_lengths, S if spec.kv_length is None else spec.kv_length)
    return q_length, kv_length


def _positions(T: int, S: int, operands: Operands, spec: AttentionSpec) -> tuple[jax.Array, jax.Array]:
    """Position of query i as [..., T, 1], and of key j as [..., 1, S]."""
    q_length, kv_length = _lengths(T, S, operands, spec)
    default_offset = kv_length - q_length
    q_offset = _lift(operands.q_offset, default_offset if spec.q_offset is None else spec.q_offset)
    at_i = jnp.arange(T, dtype=jnp.int32)[:, None] + q_offset
    at_j = jnp.arange(S, dtype=jnp.int32)[None, :]
    if operands.q_positions is not None:
        at_i = operands.q_positions[..., None, :, None]
    if operands.kv_positions is not None:
        at_j = operands.kv_positions[..., None, None, :]
    return at_i, at_j


def _kept(T: int, S: int, words: jax.Array, rate: float) -> jax.Array:
    """bool [..., H, T, S]: what dropout keeps."""
    i = jnp.arange(T, dtype=jnp.int32)[:, None]
    j = jnp.arange(S, dtype=jnp.int32)[None, :]
    return dropout.kept(words[..., 0, None, None], words[..., 1, None, None], i, j, rate)


def _lift(array, otherwise):
    """A per-example array [...] as [..., 1, 1, 1], so that it meets [..., H, T, S]; the static value where None."""
    return otherwise if array is None else array[..., None, None, None]


def _scale(operands: Operands, spec: AttentionSpec, dtype):
    return jnp.asarray(spec.scale, dtype) if operands.scale is None else operands.scale[..., None, None, None]


def _by_kv_head(allowed: jax.Array, K: int) -> jax.Array:
    """[..., H or 1, T, S] as [..., K or 1, heads of the group, T, S]."""
    heads = allowed.shape[-3]
    K = K if heads > 1 else 1
    return allowed.reshape(*allowed.shape[:-3], K, heads // K, *allowed.shape[-2:])


def _as_rows(dead: jax.Array) -> jax.Array:
    """[..., heads, T] as [..., T, heads, 1], to select rows of [..., T, heads, D]."""
    return jnp.moveaxis(dead, -2, -1)[..., None]
