"""FlashAttention for `flax.nnx`: `attention_fn` for Flax's own attention module, and `SelfAttention`."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen, nnx
from flax.nnx.nn import dtypes
from jax.typing import DTypeLike

from flash_jax import BlockSizes
from flash_jax.flax import cache as kv_cache
from flash_jax.flax import heads
from flash_jax.flax.attend import as_bool, attend, dropout_options, says_deterministic
from flash_jax.flax.refusals import refuse_given
from flash_jax.flax.rope import first_position, rotate_both
from flash_jax.flax.serve import serve

__all__ = ["SelfAttention", "attention_fn"]


# nnx passes all of its keywords, so each is named, also the unsupported ones.
def attention_fn(  # noqa: PLR0913, PLR0917
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    bias: jax.Array | None = None,
    mask: jax.Array | None = None,
    broadcast_dropout: bool = True,
    dropout_rng: jax.Array | None = None,
    dropout_rate: float = 0.0,
    deterministic: bool = False,
    dtype: DTypeLike | None = None,
    precision: Any = None,
    module: nnx.Module | None = None,
    promote_dtype: Callable[..., Any] = dtypes.promote_dtype,
    is_causal: bool = False,
    *,
    input_positions: jax.Array | None = None,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    implementation: str | None = None,
    block_sizes: BlockSizes | None = None,
) -> jax.Array:
    """Attention for `flax.nnx.MultiHeadAttention(attention_fn=...)`, in linear memory.

    Args:
      query: [..., T, H, D].
      key: [..., S, K, D], where K divides H.
      value: [..., S, K, Dv].
      bias: added to the scores; broadcastable to [..., H, T, S].
      mask: bool, or numbers of which 0 does not attend, as Flax's helpers make them; broadcastable to [..., H, T, S].
      dropout_rate, deterministic, dropout_rng: entries of the attention weights are dropped with this probability and
        key, unless deterministic.
      broadcast_dropout: whether all examples and heads drop the same entries.
      dtype, promote_dtype: the arrays become promote_dtype((query, key, value), dtype=dtype), by default their
        common dtype.
      precision: of the products, see `flash_jax.flash_attention`.
      module: where given, it sows the attention weights, as with Flax; a warning says that they take quadratic memory.
      is_causal: Flax's own keyword, for T == S, where its causal mask and this library's are one and the same.
      input_positions: must be None.
      causal, window, implementation, block_sizes: see `flash_jax.flash_attention`; Flax passes none of them, so set
        them with `functools.partial`. A `causal` diagonal is aligned bottom-right where T != S, so that it may stay for
        Flax's own `decode=True`.

    Returns:
      [..., T, H, Dv] in the dtype of the promoted query. A row that attends nothing gives 0, where Flax gives the mean
      of the values.

    Raises:
      NotImplementedError: for an argument that cannot be served, naming it; a `window` together with a mask where
        T != S, which is how Flax's own `decode=True` calls.
      ValueError: is_causal=True with T != S, dropout without a `dropout_rng`; otherwise as
        `flash_jax.flash_attention`.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> from flash_jax.flax.nnx import attention_fn
      >>> layer = nnx.MultiHeadAttention(4, in_features=32, attention_fn=attention_fn, decode=False, rngs=nnx.Rngs(0))
      >>> layer(jnp.ones((2, 16, 32)), is_causal=True).shape
      (2, 16, 32)
    """
    refuse_given(input_positions=input_positions)
    if is_causal and query.shape[-3] != key.shape[-3]:
        raise ValueError(
            "`is_causal` needs as many queries as keys, since Flax aligns them at the first position and this "
            f"library at the last; got {query.shape[-3]} and {key.shape[-3]}. Use "
            "functools.partial(attention_fn, causal=True) for the alignment at the last, which is right for decoding."
        )
    query, key, value = promote_dtype((query, key, value), dtype=dtype)
    return serve(
        query,
        key,
        value,
        bias,
        mask,
        dropout=dropout_options(dropout_rate, deterministic, dropout_rng),
        broadcast_dropout=broadcast_dropout,
        sow=None if module is None else functools.partial(module.sow, nnx.Intermediate, "attention_weights"),
        causal=causal or is_causal,
        window=window,
        precision=precision,
        implementation=implementation,
        block_sizes=block_sizes,
    )


def _parameter(value: jax.Array, names: tuple[str, ...]) -> nnx.Param:
    """A parameter that carries its logical axis names.

    The names mean something once rules map them to a mesh. With both in force Flax shards the new parameter by them
    (if it is set to do so at all); without, an eager Flax would refuse the annotation, so it is told to only keep it.
    """
    mapped = linen.get_logical_axis_rules() and not jax.sharding.get_abstract_mesh().empty
    return nnx.Param(value, out_sharding=names, eager_sharding=None if mapped else False)


class _Projection(nnx.Module):
    """A dense layer from dims `inputs` at the end of the input to dims `outputs`."""

    def __init__(  # noqa: PLR0913
        self,
        inputs: tuple[int, ...],
        outputs: tuple[int, ...],
        names: tuple[str, ...],
        *,
        use_bias: bool,
        dtype: DTypeLike | None,
        param_dtype: DTypeLike,
        kernel_init: Callable[..., jax.Array],
        precision: Any,
        rngs: nnx.Rngs,
    ):
        init = heads.flattened(kernel_init, len(inputs))
        self.kernel = _parameter(init(rngs.params(), (*inputs, *outputs), param_dtype), names)
        self.bias: nnx.Param | None = nnx.data(None)
        if use_bias:
            self.bias = _parameter(jnp.zeros(outputs, param_dtype), names[len(inputs) :])
        self.inputs = inputs
        self.dtype = dtype
        self.precision = precision

    def __call__(self, x: jax.Array) -> jax.Array:
        if x.shape[x.ndim - len(self.inputs) :] != self.inputs:
            raise ValueError(f"the input must end in dims {self.inputs}; got shape {x.shape}.")
        bias = None if self.bias is None else self.bias[...]
        inputs = len(self.inputs)
        return heads.project(x, self.kernel[...], bias, inputs=inputs, dtype=self.dtype, precision=self.precision)


class _HeadNorm(nnx.Module):
    """RMS normalisation of each head's vector, with a learned scale per dimension."""

    def __init__(self, head_dim: int, param_dtype: DTypeLike):
        self.scale = _parameter(jnp.ones((head_dim,), param_dtype), heads.NORM_NAMES)

    def __call__(self, x: jax.Array) -> jax.Array:
        return heads.rms_norm(x, self.scale[...])


class SelfAttention(nnx.Module):
    """Multi-head self-attention with grouped-query heads, rotary positions, a window and a key/value cache.

    Args:
      num_heads: query heads, H.
      in_features: width of the input, and of the output.
      num_kv_heads: key/value heads, K, a divisor of H; None means H. Each serves H / K query heads.
      head_dim: width of a head, D; None means in_features / H.
      causal: a token attends itself and what is before it; False lets every token attend every other.
      window: (left, right), the farthest distances attended, both inclusive, None for no bound; a model's "sliding
        window of W tokens" is (W - 1, 0). None means no window.
      softcap: scores become softcap * tanh(score / softcap); None for no cap.
      sinks: whether each head has a learned score that takes part in every softmax and stands for no token, so that a
        row may attend less than fully. Initialised to 0.
      alibi_slopes: H numbers; a head's scores are lowered by its slope times the distance. None for none.
      dropout_rate: probability with which an attention weight is dropped, independently for each example and head.
      rope_theta: base of the rotary positions; None for none. D must be even with them.
      qk_norm: whether queries and keys are RMS-normalised per head, with a learned scale, before they are rotated.
      use_bias: whether the four projections add a bias.
      dtype: of the computation; None means what input and parameters promote to.
      param_dtype: of the parameters.
      kernel_init: of the projections' kernels, called with the shape of a matrix.
      precision: of the products, in the projections and in attention.
      context_axis, context_strategy: a mesh axis over which the tokens are sharded, in their order, and how devices
        attend those of the others; see `flash_jax.flash_attention`. Not for decoding.
      implementation, block_sizes: see `flash_jax.flash_attention`.
      deterministic: whether nothing is dropped, unless the call says otherwise; one of the two must say so where
        dropout_rate is positive. The key comes from the stream "dropout".
      decode: whether calls read and extend the cache, unless the call says otherwise.
      rngs: random number streams; "params" is used, and with a positive dropout_rate a fork of "dropout" is kept.

    The input is [..., T, in_features], the output has its shape. Parameters and their logical axis names, kept as the
    metadata `out_sharding`:

      query.kernel [in_features, H, D]                ("embed", "heads", "head_dim")
      key.kernel, value.kernel [in_features, K, D]    ("embed", "kv_heads", "head_dim")
      out.kernel [H, D, in_features]                  ("heads", "head_dim", "embed")
      bias, where use_bias: the names of its kernel's outputs; query_norm.scale, key_norm.scale [D]: ("head_dim",)
      sinks [H]: ("heads",)

    Decoding: `init_cache`, then calls with one or more new tokens at a time and decode=True. What each token gets is
    what the forward pass of the whole sequence would give it. When the cache overflows, ValueError is raised where
    the index is known, outside `jit`; inside, the output is NaN, nothing is written and `cache_index` goes past the
    cache's length.

    Raises:
      ValueError: where the head counts and widths do not fit together, where a call decodes with causal=False or
        without a cache.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from flax import nnx
      >>> from flash_jax.flax.nnx import SelfAttention
      >>> layer = SelfAttention(num_heads=4, in_features=32, num_kv_heads=2, rngs=nnx.Rngs(0))
      >>> x = jax.random.normal(jax.random.key(1), (1, 8, 32))
      >>> layer.init_cache(x.shape)
      >>> bool(jnp.allclose(layer(x[:, :1], decode=True), layer(x)[:, :1], atol=1e-5))
      True
    """

    def __init__(  # noqa: PLR0913
        self,
        num_heads: int,
        in_features: int,
        *,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        causal: bool = True,
        window: tuple[int | None, int | None] | None = None,
        softcap: float | None = None,
        sinks: bool = False,
        alibi_slopes: tuple[float, ...] | None = None,
        dropout_rate: float = 0.0,
        rope_theta: float | None = 10_000.0,
        qk_norm: bool = False,
        use_bias: bool = False,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        kernel_init: Callable[..., jax.Array] = nnx.initializers.lecun_normal(),  # noqa: B008 (a pure function)
        precision: Any = None,
        context_axis: str | None = None,
        context_strategy: str | None = None,
        implementation: str | None = None,
        block_sizes: BlockSizes | None = None,
        deterministic: bool | None = None,
        decode: bool = False,
        rngs: nnx.Rngs,
    ):
        kv_heads, head_dim = heads.head_counts(in_features, num_heads, num_kv_heads, head_dim, rope_theta)
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, kv_heads, head_dim
        self.causal, self.rope_theta, self.decode = causal, rope_theta, decode
        self.dtype, self.param_dtype = dtype, param_dtype
        self.dropout_rate, self.deterministic, self.alibi_slopes = dropout_rate, deterministic, alibi_slopes
        self.options = {
            "window": window,
            "softcap": softcap,
            "precision": precision,
            "context_axis": context_axis,
            "context_strategy": context_strategy,
            "implementation": implementation,
            "block_sizes": block_sizes,
        }

        def projection(inputs, outputs, names):
            return _Projection(
                inputs,
                outputs,
                names,
                use_bias=use_bias,
                dtype=dtype,
                param_dtype=param_dtype,
                kernel_init=kernel_init,
                precision=precision,
                rngs=rngs,
            )

        self.query = projection((in_features,), (num_heads, head_dim), heads.QUERY_NAMES)
        self.key = projection((in_features,), (kv_heads, head_dim), heads.KEY_VALUE_NAMES)
        self.value = projection((in_features,), (kv_heads, head_dim), heads.KEY_VALUE_NAMES)
        self.out = projection((num_heads, head_dim), (in_features,), heads.OUT_NAMES)
        self.query_norm: _HeadNorm | None = nnx.data(None)
        self.key_norm: _HeadNorm | None = nnx.data(None)
        if qk_norm:
            self.query_norm = _HeadNorm(head_dim, param_dtype)
            self.key_norm = _HeadNorm(head_dim, param_dtype)
        self.sinks: nnx.Param | None = nnx.data(None)
        if sinks:
            self.sinks = _parameter(jnp.zeros((num_heads,), param_dtype), heads.SINK_NAMES)
        self.rngs: nnx.RngStream | None = nnx.data(None)
        if dropout_rate > 0:
            self.rngs = rngs["dropout"].fork()
        self.cached_key: nnx.Cache | None = nnx.data(None)
        self.cached_value: nnx.Cache | None = nnx.data(None)
        self.cache_index: nnx.Cache | None = nnx.data(None)

    def __call__(
        self,
        x: jax.Array,
        *,
        mask: jax.Array | None = None,
        segment_ids: jax.Array | None = None,
        deterministic: bool | None = None,
        rngs: nnx.Rngs | nnx.RngStream | jax.Array | None = None,
        decode: bool | None = None,
    ) -> jax.Array:
        """Attention of x [..., T, in_features] to itself, and to the cache where decoding; returns its shape.

        mask: bool, or numbers of which 0 does not attend, broadcastable to [..., H, T, T], where decoding to
          [..., H, T, max_length]; it narrows what the module's own options allow.
        segment_ids: ints [..., T]; tokens attend those of the same id, and where it is negative none. Not for decoding.
        deterministic: whether nothing is dropped; None means as the module was made, or set by `nnx.view`.
        rngs: for dropout, in place of the module's own stream.
        decode: whether to read and extend the cache; None means as the module was made, or set by `nnx.view`.
        """
        decode = self.decode if decode is None else decode
        heads.require_causal(decode, self.causal)
        heads.require_no_segments(decode, segment_ids)
        heads.require_no_context(decode, self.options["context_axis"])
        query, key, value = self.query(x), self.key(x), self.value(x)
        if self.query_norm is not None and self.key_norm is not None:
            query, key = self.query_norm(query), self.key_norm(key)
        options = {
            **self.options,
            **self._dropout(deterministic, rngs),
            "mask": as_bool(mask),
            "sinks": None if self.sinks is None else self.sinks[...],
            "alibi_slopes": heads.slopes(self.alibi_slopes),
        }
        if decode:
            return self.out(self._decode(query, key, value, **options))
        return self.out(self._attend(query, key, value, segment_ids=segment_ids, **options))

    def init_cache(self, input_shape: tuple[int, ...], dtype: DTypeLike | None = None) -> None:
        """Makes an empty cache for inputs of shape [..., max_length, in_features].

        dtype: of the cached keys and values; None means the module's dtype, or its parameters' where that is None.
        """
        dtype = dtype or self.dtype or self.param_dtype
        shape = (*input_shape[:-1], self.num_kv_heads, self.head_dim)
        self.cached_key = nnx.Cache(jnp.zeros(shape, dtype))
        self.cached_value = nnx.Cache(jnp.zeros(shape, dtype))
        self.cache_index = nnx.Cache(jnp.zeros((), jnp.int32))

    def set_view(
        self,
        decode: bool | None = None,
        batch_size: int | tuple[int, ...] | None = None,
        max_length: int | None = None,
        deterministic: bool | None = None,
    ) -> None:
        """For `nnx.view`: sets whether calls decode or drop, and makes an empty cache of batch_size and max_length.

        decode, deterministic: as in the constructor; None leaves it.
        batch_size: the batch shape of the inputs to decode.
        max_length: tokens that the cache can hold.
        """
        if decode is not None:
            self.decode = decode
        if deterministic is not None:
            self.deterministic = deterministic
        if batch_size is not None and max_length is not None:
            batch = (batch_size,) if isinstance(batch_size, int) else tuple(batch_size)
            self.init_cache((*batch, max_length, 0))

    def _dropout(self, deterministic: bool | None, rngs: nnx.Rngs | nnx.RngStream | jax.Array | None) -> dict:
        if self.dropout_rate == 0 or says_deterministic(self.deterministic, deterministic):
            return {}
        stream = rngs if rngs is not None else self.rngs
        if isinstance(stream, nnx.Rngs):
            stream = stream["dropout"]
        key = stream() if isinstance(stream, nnx.RngStream) else stream
        return dropout_options(self.dropout_rate, False, key)

    def _attend(self, query, key, value, **options):
        start = first_position(query, self.options["context_axis"])
        query, key = rotate_both(query, key, start, self.rope_theta)
        return attend(query, key, value, causal=self.causal, **options)

    def _decode(self, query, key, value, **options):
        if self.cached_key is None or self.cached_value is None or self.cache_index is None:
            raise ValueError("decoding needs a cache; call `init_cache` with the input's shape first.")
        index = self.cache_index[...]
        query, key = rotate_both(query, key, index, self.rope_theta)
        state = kv_cache.extend(kv_cache.Cache(self.cached_key[...], self.cached_value[...], index), key, value)
        self.cached_key[...], self.cached_value[...], self.cache_index[...] = state
        return kv_cache.attend_cache(query, state, **options)
