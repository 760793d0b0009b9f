"""FlashAttention for `flax.linen`: `attention_fn` for Flax's own attention module, and `SelfAttention`."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.linen.dtypes import promote_dtype
from jax.typing import DTypeLike

from flash_jax import BlockSizes
from flash_jax.flax import cache as kv_cache
from flash_jax.flax import heads
from flash_jax.flax.attend import as_bool, attend, dropout_options, says_deterministic
from flash_jax.flax.refusals import refuse_given
from flash_jax.flax.rope import first_position, rotate_both
from flash_jax.flax.serve import serve

__all__ = ["SelfAttention", "attention_fn"]


# linen passes only those of its keywords that it finds in this signature, so each is named, also the unsupported ones.
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
    module: nn.Module | None = None,
    force_fp32_for_softmax: bool = False,
    einsum_dot_general: Callable[..., jax.Array] | None = None,
    qk_attn_weights_einsum: Callable[..., jax.Array] | None = None,
    attn_weights_value_einsum: Callable[..., jax.Array] | None = None,
    *,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    implementation: str | None = None,
    block_sizes: BlockSizes | None = None,
) -> jax.Array:
    """Attention for `flax.linen.MultiHeadDotProductAttention(attention_fn=...)`, in linear memory.

    Args:
      query: [..., T, H, D].
      key: [..., S, K, D], where K divides H.
      value: [..., S, K, Dv].
      bias: added to the scores; broadcastable to [..., H, T, S].
      mask: bool, or numbers of which 0 does not attend, as Flax's helpers make them; broadcastable to [..., H, T, S].
      dropout_rate, deterministic, dropout_rng: entries of the attention weights are dropped with this probability and
        key, unless deterministic.
      broadcast_dropout: whether all examples and heads drop the same entries.
      dtype: the three arrays are cast to it; None promotes them to their common dtype, as Flax does.
      precision: of the products, see `flash_jax.flash_attention`.
      module: where given, it sows the attention weights, as with Flax; a warning says that they take quadratic memory.
      force_fp32_for_softmax: either value; the softmax is always computed in float32.
      einsum_dot_general, qk_attn_weights_einsum, attn_weights_value_einsum: must be None.
      causal, window, implementation, block_sizes: see `flash_jax.flash_attention`; Flax passes none of them, so set
        them with `functools.partial`. A `causal` diagonal is aligned bottom-right where T != S, so that it may stay for
        Flax's own `decode=True`.

    Returns:
      [..., T, H, Dv] in the dtype of the promoted query. A row that attends nothing gives 0, where Flax gives the mean
      of the values.

    Raises:
      NotImplementedError: for an argument that cannot be served, naming it; a `window` together with a mask where
        T != S, which is how Flax's own `decode=True` calls.
      ValueError: dropout without a `dropout_rng`; otherwise as `flash_jax.flash_attention`.

    Example:
      >>> import functools, jax, jax.numpy as jnp
      >>> from flax import linen as nn
      >>> from flash_jax.flax.linen import attention_fn
      >>> causal = functools.partial(attention_fn, causal=True)
      >>> layer = nn.MultiHeadDotProductAttention(num_heads=4, attention_fn=causal)
      >>> x = jnp.ones((2, 16, 32))
      >>> layer.apply(layer.init(jax.random.key(0), x), x).shape
      (2, 16, 32)
    """
    refuse_given(
        einsum_dot_general=einsum_dot_general,
        qk_attn_weights_einsum=qk_attn_weights_einsum,
        attn_weights_value_einsum=attn_weights_value_einsum,
    )
    query, key, value = promote_dtype(query, key, value, dtype=dtype)
    return serve(
        query,
        key,
        value,
        bias,
        mask,
        dropout=dropout_options(dropout_rate, deterministic, dropout_rng),
        broadcast_dropout=broadcast_dropout,
        sow=None if module is None else functools.partial(module.sow, "intermediates", "attention_weights"),
        causal=causal,
        window=window,
        precision=precision,
        implementation=implementation,
        block_sizes=block_sizes,
    )


class _Projection(nn.Module):
    """A dense layer from the last `inputs` dims of its input to `outputs`; its parameters carry logical names."""

    inputs: int
    outputs: tuple[int, ...]
    names: tuple[str, ...]
    use_bias: bool
    dtype: DTypeLike | None
    param_dtype: DTypeLike
    kernel_init: Callable[..., jax.Array]
    precision: Any = None

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        shape = (*x.shape[x.ndim - self.inputs :], *self.outputs)
        kernel_init = nn.with_logical_partitioning(heads.flattened(self.kernel_init, self.inputs), self.names)
        kernel = self.param("kernel", kernel_init, shape, self.param_dtype)
        bias = None
        if self.use_bias:
            bias_init = nn.with_logical_partitioning(nn.initializers.zeros_init(), self.names[self.inputs :])
            bias = self.param("bias", bias_init, self.outputs, self.param_dtype)
        return heads.project(x, kernel, bias, inputs=self.inputs, dtype=self.dtype, precision=self.precision)


class _HeadNorm(nn.Module):
    """RMS normalisation of each head's vector, with a learned scale per dimension."""

    param_dtype: DTypeLike

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        scale_init = nn.with_logical_partitioning(nn.initializers.ones_init(), heads.NORM_NAMES)
        scale: Any = self.param("scale", scale_init, x.shape[-1:], self.param_dtype)
        return heads.rms_norm(x, scale)


class SelfAttention(nn.Module):
    """Multi-head self-attention with grouped-query heads, rotary positions, a window and a key/value cache.

    Attributes:
      num_heads: query heads, H.
      num_kv_heads: key/value heads, K, a divisor of H; None means H. Each serves H / K query heads.
      head_dim: width of a head, D; None means features / H.
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
        dropout_rate is positive. The key comes from the rng collection "dropout".
      decode: whether to read and extend the cache, see below. The parameters are the same with and without.

    The input is [..., T, features], the output has its shape. Parameters and their logical axis names, by
    `flax.linen.with_logical_partitioning`:

      query/kernel [features, H, D]               ("embed", "heads", "head_dim")
      key/kernel, value/kernel [features, K, D]   ("embed", "kv_heads", "head_dim")
      out/kernel [H, D, features]                 ("heads", "head_dim", "embed")
      bias, where use_bias: the names of its kernel's outputs; query_norm/scale, key_norm/scale [D]: ("head_dim",)
      sinks [H]: ("heads",)

    Decoding: initialise with an input as long as the cache shall be, which makes the collection "cache" with
    `cached_key`, `cached_value` [..., max_length, K, D] and `cache_index`; then apply to one or more new tokens at a
    time with mutable=["cache"]. What each token gets is what the forward pass of the whole sequence would give it.
    When the cache overflows, ValueError is raised where the index is known, outside `jit`; inside, the output is NaN,
    nothing is written and `cache_index` goes past the cache's length.

    Raises:
      ValueError: where the head counts and widths do not fit together, or decode=True is used with causal=False.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from flash_jax.flax.linen import SelfAttention
      >>> layer, decoder = SelfAttention(num_heads=4, num_kv_heads=2), SelfAttention(4, num_kv_heads=2, decode=True)
      >>> x = jax.random.normal(jax.random.key(0), (1, 8, 32))
      >>> params = layer.init(jax.random.key(1), x)["params"]
      >>> cache = decoder.init(jax.random.key(1), x)["cache"]
      >>> first, state = decoder.apply({"params": params, "cache": cache}, x[:, :1], mutable=["cache"])
      >>> bool(jnp.allclose(first, layer.apply({"params": params}, x)[:, :1], atol=1e-5))
      True
    """

    num_heads: int
    num_kv_heads: int | None = None
    head_dim: int | None = None
    causal: bool = True
    window: tuple[int | None, int | None] | None = None
    softcap: float | None = None
    sinks: bool = False
    alibi_slopes: tuple[float, ...] | None = None
    dropout_rate: float = 0.0
    rope_theta: float | None = 10_000.0
    qk_norm: bool = False
    use_bias: bool = False
    dtype: DTypeLike | None = None
    param_dtype: DTypeLike = jnp.float32
    kernel_init: Callable[..., jax.Array] = nn.initializers.lecun_normal()
    precision: Any = None
    context_axis: str | None = None
    context_strategy: str | None = None
    implementation: str | None = None
    block_sizes: BlockSizes | None = None
    deterministic: bool | None = None
    decode: bool = False

    @nn.compact
    def __call__(
        self,
        x: jax.Array,
        *,
        mask: jax.Array | None = None,
        segment_ids: jax.Array | None = None,
        deterministic: bool | None = None,
        dropout_rng: jax.Array | None = None,
    ) -> jax.Array:
        """Attention of x [..., T, features] to itself, and to the cache where `decode`; returns [..., T, features].

        mask: bool, or numbers of which 0 does not attend, broadcastable to [..., H, T, T], where decoding to
          [..., H, T, max_length]; it narrows what the module's own options allow.
        segment_ids: ints [..., T]; tokens attend those of the same id, and where it is negative none. Not for decoding.
        deterministic: whether nothing is dropped; None means as the attribute says.
        dropout_rng: the key for dropout, in place of the rng collection's.
        """
        heads.require_causal(self.decode, self.causal)
        heads.require_no_segments(self.decode, segment_ids)
        heads.require_no_context(self.decode, self.context_axis)
        features = x.shape[-1]
        kv_heads, head_dim = heads.head_counts(
            features, self.num_heads, self.num_kv_heads, self.head_dim, self.rope_theta
        )
        query = self._projection("query", (self.num_heads, head_dim), heads.QUERY_NAMES)(x)
        key = self._projection("key", (kv_heads, head_dim), heads.KEY_VALUE_NAMES)(x)
        value = self._projection("value", (kv_heads, head_dim), heads.KEY_VALUE_NAMES)(x)
        if self.qk_norm:
            query = _HeadNorm(self.param_dtype, name="query_norm")(query)
            key = _HeadNorm(self.param_dtype, name="key_norm")(key)
        attended = (self._decode if self.decode else self._attend)(
            query,
            key,
            value,
            mask=as_bool(mask),
            segment_ids=segment_ids,
            **self._dropout(deterministic, dropout_rng),
            **self._options(),
        )
        return self._projection("out", (features,), heads.OUT_NAMES, inputs=2)(attended)

    def _projection(self, name: str, outputs: tuple[int, ...], names: tuple[str, ...], inputs: int = 1) -> _Projection:
        return _Projection(
            inputs=inputs,
            outputs=outputs,
            names=names,
            use_bias=self.use_bias,
            dtype=self.dtype,
            param_dtype=self.param_dtype,
            kernel_init=self.kernel_init,
            precision=self.precision,
            name=name,
        )

    def _dropout(self, deterministic: bool | None, dropout_rng: jax.Array | None) -> dict:
        if self.dropout_rate == 0:
            return {}
        deterministic = says_deterministic(self.deterministic, deterministic)
        if not deterministic and dropout_rng is None:
            dropout_rng = self.make_rng("dropout")
        return dropout_options(self.dropout_rate, deterministic, dropout_rng)

    def _options(self) -> dict:
        sinks_init = nn.with_logical_partitioning(nn.initializers.zeros_init(), heads.SINK_NAMES)
        return {
            "window": self.window,
            "softcap": self.softcap,
            "sinks": self.param("sinks", sinks_init, (self.num_heads,), self.param_dtype) if self.sinks else None,
            "alibi_slopes": heads.slopes(self.alibi_slopes),
            "precision": self.precision,
            "context_axis": self.context_axis,
            "context_strategy": self.context_strategy,
            "implementation": self.implementation,
            "block_sizes": self.block_sizes,
        }

    def _attend(self, query, key, value, **options):
        query, key = rotate_both(query, key, first_position(query, self.context_axis), self.rope_theta)
        return attend(query, key, value, causal=self.causal, **options)

    def _decode(self, query, key, value, *, segment_ids, **options):
        filled = self.has_variable("cache", "cached_key")
        cached_key = self.variable("cache", "cached_key", jnp.zeros, key.shape, key.dtype)
        cached_value = self.variable("cache", "cached_value", jnp.zeros, value.shape, value.dtype)
        index = self.variable("cache", "cache_index", jnp.zeros, (), jnp.int32)
        if not filled:  # initialising: only the shapes count, as in Flax's own attention
            return self._attend(query, key, value, **options | {"mask": None})
        query, key = rotate_both(query, key, index.value, self.rope_theta)
        state = kv_cache.extend(kv_cache.Cache(cached_key.value, cached_value.value, index.value), key, value)
        cached_key.value, cached_value.value, index.value = state
        return kv_cache.attend_cache(query, state, **options)
