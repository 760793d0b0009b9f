"""Dense attention as anyone would write it in JAX: the yardstick of the accuracy rule, never the judge."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from flash_jax.tiles import dropout

SCORING = ("softcap", "alibi_slopes")


def plain_attention(query, key, value, bias=None, mask=None, *, return_lse=False, **options):
    """Attention by a matrix of float32 scores `[..., H, T, S]`, differentiated by JAX.

    The probabilities are exp(score - lse), as in the contract's formulas. (Divided by their sum instead, a row of one
    large entry happens to be exact to the last bit, which makes for a yardstick of luck: with it one gradient in some
    hundreds of float32 cases failed, another one on another CPU.) They are rounded to the inputs' dtype before they
    meet the values; float32 products are at HIGHEST;
    float64 inputs are computed in float64 throughout. `options` are the keywords of `flash_attention`; dropout keeps
    what the library's own bits say, since it is no matter of accuracy.
    """
    exact = np.promote_types(query.dtype, np.float32)
    (*batch, T, H, D), (S, K, Dv) = query.shape, (*key.shape[-3:-1], value.shape[-1])
    sinks, rate, dropout_key = (options.pop(name, None) for name in ("sinks", "dropout_rate", "dropout_key"))
    score_mod, mask_mod = (options.pop(name, None) for name in ("score_mod", "mask_mod"))
    tables = tuple(map(Table, options.pop("mod_operands", ())))
    options.pop("block_mask", None)
    scale = options.pop("scale", None)
    scale = D**-0.5 if scale is None else jnp.asarray(scale).astype(exact)
    scoring = {name: options.pop(name, None) for name in SCORING}
    at = positions(T, S, tuple(batch), **options)

    grouped = jnp.reshape(query, (*batch, T, K, H // K, D))
    products = _product("...tkgd,...skd->...kgts", grouped, key, exact)
    scores = scale * jnp.reshape(products, (*batch, H, T, S))
    entries = indices((*batch, H, T, S))
    mod = None if score_mod is None else lambda s: score_mod(s, *entries, *tables)
    scores = modified(scores, bias, at, mod, **scoring)
    seen = visible(T, S, tuple(batch), at, **options)
    if mask_mod is not None:
        seen &= mask_mod(*entries, *tables)
    for allowed in (mask, None if bias is None else jnp.asarray(bias) != -jnp.inf):
        seen = seen if allowed is None else seen & allowed
    scores = jnp.where(seen, scores, -jnp.inf)

    sink = None if sinks is None else jnp.asarray(sinks).astype(exact)[..., None, None]
    top = lax.stop_gradient(jnp.max(scores, axis=-1, keepdims=True, initial=-jnp.inf))
    top = top if sink is None else jnp.maximum(top, lax.stop_gradient(sink))
    top = jnp.where(top == -jnp.inf, jnp.zeros_like(top), top)
    total = jnp.sum(jnp.exp(scores - top), axis=-1, keepdims=True)
    total = total if sink is None else total + jnp.exp(sink - top)
    dead = total == 0
    lse = top + jnp.log(jnp.where(dead, jnp.ones_like(total), total))
    probabilities = jnp.exp(scores - lse)
    if rate:
        kept = dropout_kept(dropout_key, rate, (*batch, H, T, S))
        probabilities = jnp.where(kept, probabilities / (1 - rate), 0)
    probabilities = jnp.reshape(_rounded(probabilities, value.dtype), (*batch, K, H // K, T, S))
    out = _product("...kgts,...skd->...tkgd", probabilities, value, exact)
    out = jnp.reshape(out.astype(query.dtype), (*batch, T, H, Dv))
    lse = jnp.where(dead, -jnp.inf, lse)
    return (out, jnp.reshape(lse, (*batch, H, T))) if return_lse else out


def modified(scores, bias, at, mod=None, *, softcap=None, alibi_slopes=None):
    """Scores `[..., H, T, S]` after softcap, the function `mod` of scores, bias and alibi."""
    if softcap is not None:
        scores = softcap * jnp.tanh(scores / softcap)
    if mod is not None:
        scores = mod(scores)
    if bias is not None:
        scores = scores + jnp.asarray(bias).astype(scores.dtype)
    if alibi_slopes is not None:
        slopes = jnp.asarray(alibi_slopes).astype(scores.dtype)[..., None, None]
        scores = scores - slopes * jnp.abs(at[0] - at[1]).astype(scores.dtype)[..., None, :, :]
    return scores


class Table:
    """An operand of a mod: indexed by arrays of one shape, each moved to the nearest end; 16 bits read as float32."""

    def __init__(self, x):
        self._x = jnp.asarray(x)
        if jnp.issubdtype(self._x.dtype, jnp.floating):
            self._x = self._x.astype(np.promote_types(self._x.dtype, np.float32))

    def __getitem__(self, index):
        index = index if isinstance(index, tuple) else (index,)
        sizes = zip(() if index == (...,) else index, self._x.shape, strict=True)
        return self._x[tuple(i % n if isinstance(i, int) else jnp.clip(i, 0, n - 1) for i, n in sizes)]


def indices(shape):
    """Example (counted over all leading dims), head, row and key of each entry of scores of this shape."""
    *batch, _, _, _ = shape
    example = jnp.arange(np.prod(batch, dtype=int), dtype=jnp.int32).reshape(*batch, 1, 1, 1)
    own = (
        jnp.arange(n, dtype=jnp.int32).reshape(-1, *(1,) * after)
        for n, after in zip(shape[-3:], (2, 1, 0), strict=True)
    )
    return tuple(jnp.broadcast_to(x, shape) for x in (example, *own))


def rows_and_keys(T, S, batch, *, q_lengths=None, kv_lengths=None, **_):
    """How many rows and keys of each example are no padding, as `[..., 1, 1]`."""
    rows = _per_example(T if q_lengths is None else jnp.clip(jnp.asarray(q_lengths), 0, T), batch)
    return rows, _per_example(S if kv_lengths is None else jnp.clip(jnp.asarray(kv_lengths), 0, S), batch)


def positions(T, S, batch, *, q_offset=None, q_positions=None, kv_positions=None, **lengths):
    """Where the queries `[..., T, 1]` and the keys `[..., 1, S]` stand."""
    rows, keys = rows_and_keys(T, S, batch, **lengths)
    offset = keys - rows if q_offset is None else _per_example(q_offset, batch)
    at_i = jnp.arange(T, dtype=jnp.int32)[:, None] + offset
    at_j = jnp.arange(S, dtype=jnp.int32)[None, :]
    at_i = at_i if q_positions is None else _per_slot(q_positions, batch)[..., :, None]
    return at_i, at_j if kv_positions is None else _per_slot(kv_positions, batch)[..., None, :]


def visible(T, S, batch, at, *, causal=False, window=None, prefix_lengths=None, chunk_size=None, **arrays):
    """A bool array `[..., 1, T, S]`: True where positions, segments and lengths let the row attend the key."""
    rows, keys = rows_and_keys(T, S, batch, **arrays)
    i, j = jnp.arange(T, dtype=jnp.int32)[:, None], jnp.arange(S, dtype=jnp.int32)[None, :]
    seen = (i < rows) & (j < keys)
    at_i, at_j = at
    distance = at_j - at_i
    left, right = window or (None, None)
    if causal:
        seen &= (
            distance <= 0 if prefix_lengths is None else (distance <= 0) | (at_j < _per_example(prefix_lengths, batch))
        )
    if chunk_size is not None:
        seen &= jnp.floor_divide(at_i, chunk_size) == jnp.floor_divide(at_j, chunk_size)
    if left is not None:
        seen &= distance >= -left
    if right is not None:
        seen &= distance <= right
    both = arrays.get("segment_ids")
    ids = arrays.get("q_segment_ids", both), arrays.get("kv_segment_ids", both)
    if ids[0] is not None:
        of_row, of_key = _per_slot(ids[0], batch)[..., :, None], _per_slot(ids[1], batch)[..., None, :]
        seen &= (of_row == of_key) & (of_row >= 0) & (of_key >= 0)
    return seen[..., None, :, :]


def dropout_kept(key, rate, shape):
    """A bool array `[..., H, T, S]`, the entries that the library's dropout keeps."""
    if not jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        key = jax.random.wrap_key_data(jnp.asarray(key))
    words = dropout.head_words(key, shape[:-3], shape[-3])[..., None, None]
    i, j = jnp.arange(shape[-2], dtype=jnp.int32)[:, None], jnp.arange(shape[-1], dtype=jnp.int32)[None, :]
    return dropout.kept(words[..., 0, :, :], words[..., 1, :, :], i, j, rate)


def _per_example(x, batch):
    return jnp.broadcast_to(jnp.asarray(x).astype(jnp.int32), batch)[..., None, None]


def _per_slot(x, batch):
    x = jnp.asarray(x).astype(jnp.int32)
    return jnp.broadcast_to(x, (*batch, x.shape[-1]))


def _rounded(x, dtype):
    """`x` in `dtype`; spelled out, since a compiler may drop a cast that the next operation undoes."""
    kind = jnp.finfo(dtype)
    return lax.reduce_precision(x, kind.nexp, kind.nmant).astype(dtype)


def _product(subscripts, a, b, exact):
    return jnp.einsum(subscripts, a, b, precision=jax.lax.Precision.HIGHEST, preferred_element_type=exact)
