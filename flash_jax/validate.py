"""Every error that a user's arguments can cause, one function per argument, raised while the call is traced."""

import math
import numbers

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.typing import ArrayLike

from flash_jax.spec import Band, BlockMask, BlockSizes

STRATEGIES = ("ring", "all_gather", "heads")
IMPLEMENTATIONS = ("triton", "mosaic_gpu", "xla", "reference")
_UNBOUNDED = 2**29
_DTYPES = ("bfloat16", "float16", "float32", "float64")


def query_key_value(query: ArrayLike, key: ArrayLike, value: ArrayLike) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The three as arrays of one dtype, of shapes `[..., T, H, D]`, `[..., S, K, D]` and `[..., S, K, Dv]`."""
    named = {"query": query, "key": key, "value": value}
    for name, x in named.items():
        if not isinstance(x, (jax.Array, np.ndarray)):
            raise TypeError(f"`{name}` must be a JAX or NumPy array; got {type(x).__name__}.")
    _dtypes_agree(named)
    q, k, v = (x if isinstance(x, jax.Array) else jnp.asarray(x) for x in named.values())
    shapes = f"query {q.shape}, key {k.shape}, value {v.shape}"
    for name, x in (("query", q), ("key", k), ("value", v)):
        if not all(isinstance(n, int) for n in x.shape):
            raise NotImplementedError(
                f"`{name}` has the symbolic shape {x.shape}; flash_attention needs sizes that are known when it is "
                "traced. Export a program for each shape that you serve."
            )
        if x.ndim < 3:
            raise ValueError(f"`{name}` must have shape [..., length, heads, head_dim]; got {x.shape}.")
    if q.shape[:-3] != k.shape[:-3] or k.shape[:-1] != v.shape[:-1] or q.shape[-1] != k.shape[-1]:
        raise ValueError(
            "`query` [..., T, H, D], `key` [..., S, K, D] and `value` [..., S, K, Dv] must agree in batch dims, S, K "
            f"and D; got {shapes}.{_swap_hint(q, k, v)}"
        )
    heads, kv_heads = q.shape[-2], k.shape[-2]
    if kv_heads == 0 and heads > 0 or kv_heads and heads % kv_heads:
        raise ValueError(
            f"The {heads} heads of `query` must be a multiple of the {kv_heads} heads of `key` and `value`; "
            f"got {shapes}.{_swap_hint(q, k, v)}"
        )
    if q.shape[-1] == 0 or v.shape[-1] == 0:
        raise ValueError(f"Each head dim must be at least 1; got {shapes}.")
    return q, k, v


def _dtypes_agree(named: dict[str, ArrayLike]) -> None:
    dtypes = {name: jnp.result_type(x) for name, x in named.items()}
    listed = ", ".join(f"{name} {dtype}" for name, dtype in dtypes.items())
    if len(set(dtypes.values())) > 1:
        raise TypeError(
            f"`query`, `key` and `value` must have the same dtype; got {listed}. Cast them first, for example "
            f"`key.astype({dtypes['query']})`."
        )
    if dtypes["query"].name not in _DTYPES:
        raise TypeError(
            f"`query`, `key` and `value` must be bfloat16, float16 or float32 (or float64 for 'xla' and 'reference'); "
            f"got {listed}. Cast them first, for example `query.astype(jnp.bfloat16)`."
        )


def _swap_hint(*arrays: jax.Array) -> str:
    """Says so if the shapes would agree with the length and heads dims swapped: [batch, heads, length, dim]."""
    q, k, v = (x.shape[:-3] + (x.shape[-2], x.shape[-3], x.shape[-1]) for x in arrays)
    agree = q[:-3] == k[:-3] and k[:-1] == v[:-1] and q[-1] == k[-1] and k[-2] and q[-2] % k[-2] == 0
    if not agree:
        return ""
    return " They would agree as [..., heads, length, head_dim]: swap the two dims with `jnp.swapaxes(x, -3, -2)`."


def scale(value: float | ArrayLike | None, head_dim: int) -> float | jax.Array:
    """The scale as a float where it is a Python or NumPy number, as a 0-d array where it is a JAX array."""
    if value is None:
        return head_dim**-0.5
    is_array = isinstance(value, (jax.Array, np.ndarray, np.generic))
    got = f"dtype {value.dtype}" if is_array else type(value).__name__
    if is_array and jnp.ndim(value) != 0:
        raise ValueError(f"`scale` must be a number or a scalar array; got shape {jnp.shape(value)}.")
    if isinstance(value, jax.Array):
        is_number = jnp.issubdtype(value.dtype, jnp.floating)
    elif is_array:
        is_number = jnp.issubdtype(value.dtype, jnp.floating) or jnp.issubdtype(value.dtype, jnp.integer)
    else:
        is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not is_number:
        raise TypeError(f"`scale` must be a real number or a floating-point scalar; got {got}.")
    if isinstance(value, jax.Array):
        return value
    try:
        number = float(value)  # pyright: ignore[reportArgumentType]
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise ValueError(f"`scale` must be finite; got {number}.")
    return number


def flag(name: str, value: bool) -> bool:
    """A Python bool for the argument called `name`."""
    if not isinstance(value, (bool, np.bool_)):
        raise TypeError(f"`{name}` must be True or False; got {type(value).__name__}.")
    return bool(value)


def window(value: Band | None) -> Band | None:
    """A pair of non-negative ints or Nones; (None, None) is no window at all."""
    if value is None:
        return None
    help_ = "Use None for an unbounded side."
    if not isinstance(value, (tuple, list)) or len(value) != 2:
        raise ValueError(f"`window` must be a pair of non-negative ints or None; got {value!r}. {help_}")
    for side in value:
        if side is not None and (isinstance(side, bool) or not isinstance(side, (int, np.integer))):
            raise TypeError(f"`window` must be a pair of non-negative ints or None; got {value!r}. {help_}")
        if side is not None and side < 0:
            raise ValueError(f"`window` must be a pair of non-negative ints or None; got {value!r}. {help_}")
    # A side longer than any array is no bound; left as it is, positions plus sides would not fit in 32 bits.
    left, right = (None if side is None or side >= _UNBOUNDED else int(side) for side in value)
    return None if left is None and right is None else (left, right)


def per_example(name: str, value: int | ArrayLike | None, batch: tuple[int, ...]) -> int | jax.Array | None:
    """An int, or an int32 array of the batch's rank with the batch's dims or 1, for the argument called `name`."""
    if value is None or isinstance(value, (int, np.integer)) and not isinstance(value, bool):
        return None if value is None else int(value)
    if not isinstance(value, (jax.Array, np.ndarray)) or not jnp.issubdtype(jnp.result_type(value), jnp.integer):
        got = getattr(value, "dtype", type(value).__name__)
        raise TypeError(f"`{name}` must be an int or an integer array; got {got}.")
    shape = jnp.shape(value)
    if len(shape) > len(batch) or any(n not in (1, b) for n, b in zip(shape[::-1], batch[::-1], strict=False)):
        raise ValueError(f"`{name}` must be broadcastable to the batch shape {batch}; got shape {shape}.")
    # Cut in its own dtype: what lies beyond 32 bits lies beyond every length too, and must not wrap.
    info, int32 = jnp.iinfo(value.dtype), jnp.iinfo(jnp.int32)
    if info.bits >= 32 and value.dtype != jnp.int32:
        clip = np.clip if isinstance(value, np.ndarray) else jnp.clip
        value = clip(value, max(info.min, int32.min), min(info.max, int32.max))
    value = jnp.asarray(value)  # since jnp.reshape leaves a NumPy array a NumPy array
    return jnp.reshape(value, (1,) * (len(batch) - len(shape)) + shape).astype(jnp.int32)


def per_slot(
    name: str, value: ArrayLike | None, batch: tuple[int, ...], length: int, cut: int | None = None
) -> jax.Array | None:
    """int32 [..., length] with the batch's rank, for positions (cut to [-cut, cut]) or ids called `name`."""
    if value is None:
        return None
    if not isinstance(value, (jax.Array, np.ndarray)) or not jnp.issubdtype(jnp.result_type(value), jnp.integer):
        got = getattr(value, "dtype", type(value).__name__)
        raise TypeError(f"`{name}` must be an integer array; got {got}.")
    shape = jnp.shape(value)
    if not _broadcasts(shape, (*batch, length)) or shape[-1:] != (length,):
        raise ValueError(f"`{name}` must have shape {(*batch, length)}, batch dims may be 1 or absent; got {shape}.")
    value = _within(value, cut) if cut else _in_32_bits(name, value)
    return value.reshape((1,) * (len(batch) + 1 - len(shape)) + shape)


def _within(value: ArrayLike, cut: int) -> jax.Array:
    """int32, cut to [-cut, cut] in the dtype that the array has."""
    info = jnp.iinfo(jnp.result_type(value))
    clip = np.clip if isinstance(value, np.ndarray) else jnp.clip
    return jnp.asarray(clip(value, max(-cut, int(info.min)), min(cut, int(info.max)))).astype(jnp.int32)


def _in_32_bits(name: str, value: jax.Array | np.ndarray) -> jax.Array:
    """int32, of an array whose values must not be cut, since two of them could then be equal."""
    if jnp.iinfo(value.dtype).max > 2**31 - 1:
        if isinstance(value, Tracer):
            raise TypeError(
                f"`{name}` must be int32 or narrower where its values are not known yet; got {value.dtype}. Cast it "
                "with `.astype(jnp.int32)`."
            )
        known = np.asarray(value)
        if known.size and not -(2**31) <= int(known.min()) <= int(known.max()) < 2**31:
            raise ValueError(f"`{name}` must fit int32; got values from {known.min()} to {known.max()}.")
    return jnp.asarray(value).astype(jnp.int32)


def per_head(name: str, value: ArrayLike | None, batch: tuple[int, ...], heads: int, dtype) -> jax.Array | None:
    """[..., heads] of `dtype` with the batch's rank, for one number a head (or a head and example) called `name`."""
    if value is None:
        return None
    if not isinstance(value, (jax.Array, np.ndarray)) or not jnp.issubdtype(jnp.result_type(value), jnp.floating):
        got = getattr(value, "dtype", type(value).__name__)
        raise TypeError(f"`{name}` must be a floating-point array; got {got}.")
    shape = jnp.shape(value)
    if not _broadcasts(shape, (*batch, heads)) or shape[-1:] != (heads,):
        raise ValueError(f"`{name}` must have one number for each of the {heads} heads of `query`; got shape {shape}.")
    return jnp.asarray(value).astype(dtype).reshape((1,) * (len(batch) + 1 - len(shape)) + shape)


def bias(value: ArrayLike | None, full: tuple[int, ...], dtype) -> jax.Array | None:
    """An additive bias, of the rank of `full`, the shape of the scores [..., H, T, S]."""
    if value is None:
        return None
    is_array = isinstance(value, (jax.Array, np.ndarray))
    kind = jnp.result_type(value) if is_array else type(value).__name__
    if not is_array or kind not in _DTYPES:
        hint = " Pass a mask of True and False as `mask`." if kind == "bool" else ""
        raise TypeError(f"`bias` must be a bfloat16, float16 or float32 array, added to the scores; got {kind}.{hint}")
    if kind == "float64" and dtype != "float64":
        raise TypeError(f"`bias` may be float64 only where `query` is; got bias float64 and query {dtype}.")
    return _score_shaped("bias", jnp.asarray(value, kind), full)


def mask(value: ArrayLike | None, full: tuple[int, ...]) -> jax.Array | None:
    """A bool mask, of the rank of `full`, the shape of the scores [..., H, T, S]."""
    if value is None:
        return None
    kind = getattr(value, "dtype", type(value).__name__)
    if not isinstance(value, (jax.Array, np.ndarray)) or kind != "bool":
        raise TypeError(f"`mask` must be bool (True = attend); got {kind}. Pass additive scores as `bias`.")
    return _score_shaped("mask", jnp.asarray(value), full)


def _score_shaped(name: str, x: jax.Array, full: tuple[int, ...]) -> jax.Array:
    if not _broadcasts(x.shape, full):
        raise ValueError(
            f"`{name}` must be broadcastable to [..., H, T, S], here {full}: each dim of that size, 1, or absent on "
            f"the left; got shape {x.shape}."
        )
    return x.reshape((1,) * (len(full) - x.ndim) + x.shape)


def _broadcasts(shape: tuple[int, ...], full: tuple[int, ...]) -> bool:
    return len(shape) <= len(full) and all(n in (1, m) for n, m in zip(shape[::-1], full[::-1], strict=False))


def block_mask(value: BlockMask | None, full: tuple[int, ...]) -> jax.Array | None:
    """The states of a BlockMask for a call of scores `full` [..., H, T, S], of that rank."""
    if value is None:
        return None
    if not isinstance(value, BlockMask):
        raise TypeError(f"`block_mask` must be what `flash_jax.block_mask` returns; got {type(value).__name__}.")
    if value.shape[-2:] != full[-2:] or not _broadcasts(value.shape[:-2], full[:-2]):
        raise ValueError(
            f"`block_mask` was made for scores of shape {value.shape}, and these are {full}: T and S must be the same, "
            "the other dims too, or 1."
        )
    return value.states.reshape((1,) * (len(full) - value.states.ndim) + value.states.shape)


def segments(segment_ids, q_segment_ids, kv_segment_ids, batch: tuple[int, ...], T: int, S: int):
    """(ids of queries, ids of keys), both None or both given; of padding -1 and -2, so that it meets nothing."""
    if segment_ids is not None:
        if q_segment_ids is not None or kv_segment_ids is not None:
            raise ValueError("Give either `segment_ids` or the pair `q_segment_ids` and `kv_segment_ids`, not both.")
        if T != S:
            raise ValueError(
                f"`segment_ids` serves queries and keys alike, so their lengths must be equal; got T = {T} and S = {S}."
                " Give `q_segment_ids` and `kv_segment_ids`."
            )
        ids = per_slot("segment_ids", segment_ids, batch, T)
        return _padding_as(-1, ids), _padding_as(-2, ids)
    if (q_segment_ids is None) != (kv_segment_ids is None):
        missing = "q_segment_ids" if q_segment_ids is None else "kv_segment_ids"
        raise ValueError(f"`q_segment_ids` and `kv_segment_ids` must come together; got no `{missing}`.")
    if q_segment_ids is None:
        return None, None
    q_ids = per_slot("q_segment_ids", q_segment_ids, batch, T)
    kv_ids = per_slot("kv_segment_ids", kv_segment_ids, batch, S)
    return _padding_as(-1, q_ids), _padding_as(-2, kv_ids)


def _padding_as(number: int, ids):
    return jnp.where(ids < 0, number, ids)


def softcap(value: float | None) -> float | None:
    """A positive number, or None."""
    if value is None:
        return None
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, numbers.Real):
        raise TypeError(f"`softcap` must be a positive Python number or None; got {type(value).__name__}.")
    if not 1e-30 <= value <= 1e30:
        raise ValueError(f"`softcap` must lie between 1e-30 and 1e30; got {value}. Use None for no cap.")
    return float(value)


def chunk_size(value: int | None) -> int | None:
    """A positive int, or None."""
    if value is None:
        return None
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, (int, np.integer)):
        raise TypeError(f"`chunk_size` must be a positive int or None; got {type(value).__name__}.")
    if value < 1:
        raise ValueError(f"`chunk_size` must be a positive int or None; got {value}.")
    return min(int(value), _UNBOUNDED)


def dropout(rate: float, key: ArrayLike | None) -> tuple[float, jax.Array | None]:
    """(rate, typed key), the key None where the rate is 0."""
    if isinstance(rate, (bool, np.bool_)) or not isinstance(rate, numbers.Real):
        raise TypeError(f"`dropout_rate` must be a Python number; got {type(rate).__name__}.")
    if not 0 <= rate < 1:
        raise ValueError(f"`dropout_rate` must be at least 0 and less than 1; got {rate}.")
    typed = None if key is None else prng_key(key)
    if rate > 0 and typed is None:
        raise ValueError(f"`dropout_rate` {rate} needs a `dropout_key`, such as `jax.random.key(0)`.")
    return float(rate), typed if rate > 0 else None


def prng_key(key: ArrayLike) -> jax.Array:
    """A typed JAX key, of a typed key or of the raw words that `jax.random.PRNGKey` makes."""
    if isinstance(key, (jax.Array, np.ndarray)):
        if jnp.issubdtype(key.dtype, jax.dtypes.prng_key) and key.ndim == 0:
            return jnp.asarray(key)
        if key.dtype == jnp.uint32 and key.ndim == 1:
            return jax.random.wrap_key_data(jnp.asarray(key))
    got = f"{jnp.result_type(key)} {jnp.shape(key)}" if hasattr(key, "dtype") else type(key).__name__
    raise TypeError(f"`dropout_key` must be one JAX key, such as `jax.random.key(0)`; got {got}.")


def implementation(value: str | None) -> str | None:
    """One of the names in the contract, or None."""
    if value is not None and value not in IMPLEMENTATIONS:
        names = ", ".join(map(repr, IMPLEMENTATIONS))
        raise ValueError(f"`implementation` must be None or one of {names}; got {value!r}.")
    return value


def context(axis: str | None, strategy: str | None) -> None:
    """A name of a mesh axis or None; a strategy only with an axis."""
    if axis is not None and not isinstance(axis, str):
        raise TypeError(f"`context_axis` must be the name of a mesh axis or None; got {type(axis).__name__}.")
    if strategy is not None and strategy not in STRATEGIES:
        names = ", ".join(map(repr, STRATEGIES))
        raise ValueError(f"`context_strategy` must be None or one of {names}; got {strategy!r}.")
    if strategy is not None and axis is None:
        raise ValueError("`context_strategy` says how to attend over `context_axis`; none is given.")


def block_sizes(value: BlockSizes | None) -> BlockSizes | None:
    """A BlockSizes or None."""
    if value is not None and not isinstance(value, BlockSizes):
        raise TypeError(f"`block_sizes` must be a flash_jax.BlockSizes or None; got {type(value).__name__}.")
    return value


# How float32 operands are multiplied, for each of JAX's precision values: a request is a floor, never undercut.
# "ieee": IEEE float32 products; "x3": three TF32 products, float32 accuracy; "tf32": one TF32 product.
_PRECISIONS = {
    "highest": "ieee", "float32": "ieee", "F32_F32_F32": "ieee", "BF16_BF16_F32_X9": "ieee",
    "high": "x3", "bfloat16_3x": "x3", "BF16_BF16_F32_X3": "x3", "BF16_BF16_F32_X6": "x3", "TF32_TF32_F32_X3": "x3",
    "default": "tf32", "fastest": "tf32", "tensorfloat32": "tf32", "bfloat16": "tf32", "TF32_TF32_F32": "tf32",
    "BF16_BF16_F32": "tf32",
}  # fmt: skip


def precision(value: object) -> str:
    """`precision=`, else `jax.default_matmul_precision`, as "ieee", "x3" or "tf32"; "x3" where both are None."""
    source = "`precision`"
    if value is None:
        value = jax.config.jax_default_matmul_precision  # pyright: ignore[reportAttributeAccessIssue]
        source = "`jax.default_matmul_precision`"
    if isinstance(value, (tuple, list)) and len(value) == 2 and value[0] == value[1]:
        value = value[0]
    if value is None or value == "DEFAULT" or value is jax.lax.DotAlgorithmPreset.DEFAULT:
        return "x3"
    name = value.name if isinstance(value, jax.lax.DotAlgorithmPreset) else value
    if isinstance(value, jax.lax.Precision):
        name = value.name.lower()
    if isinstance(name, str) and name in _PRECISIONS:
        return _PRECISIONS[name]
    known = ", ".join(map(repr, _PRECISIONS))
    message = f"{source} must be None, a jax.lax.Precision or one of {known}; got {value!r}."
    if isinstance(value, (str, jax.lax.DotAlgorithmPreset, tuple, list)):
        raise ValueError(message)
    raise TypeError(message)
