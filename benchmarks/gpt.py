"""A GPT for benchmarks, in plain JAX: parameters in float32, computation in bfloat16, nothing recomputed.

Pre-norm blocks of attention and an MLP four times as wide, positions learned, biases nowhere, the embedding tied to the
output. Token and position embeddings are gathers, so that their gradients are scatters: what most users write. Layers
are unrolled, since a scan over them copies what the backward pass needs into stacks.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

VOCABULARY = 50304  # 50257 padded to a multiple of 128


@dataclasses.dataclass(frozen=True)
class GPT:
    """Sizes of a model and of a step."""

    layers: int
    dim: int
    heads: int
    length: int
    batch: int
    vocabulary: int = VOCABULARY

    @property
    def head_dim(self) -> int:
        """Width of a head."""
        return self.dim // self.heads

    def weights(self) -> int:
        """Parameters, embeddings among them, the tied one counted once."""
        return sum(x.size for x in jax.tree.leaves(jax.eval_shape(self.initial)))

    def flops(self) -> float:
        """Model FLOPs of a step as the FlashAttention-2 paper counts them; it does not halve the causal products."""
        T = self.length
        return self.batch * (6.0 * T * self.weights() + 12.0 * self.layers * self.dim * T**2)

    def initial(self) -> dict[str, Any]:
        """Parameters before the first step."""
        keys = iter(jax.random.split(jax.random.key(0), 2 + 4 * self.layers))
        dim, small = self.dim, 0.02 / (2 * self.layers) ** 0.5

        def normal(*shape, scale=0.02):
            return scale * jax.random.normal(next(keys), shape)

        def layer():
            return {
                "norm1": jnp.ones(dim),
                "qkv": normal(dim, 3, self.heads, self.head_dim),
                "out": normal(self.heads, self.head_dim, dim, scale=small),
                "norm2": jnp.ones(dim),
                "up": normal(dim, 4 * dim),
                "down": normal(4 * dim, dim, scale=small),
            }

        return {
            "tokens": normal(self.vocabulary, dim),
            "positions": normal(self.length, dim),
            "layers": [layer() for _ in range(self.layers)],
            "norm": jnp.ones(dim),
        }

    def data(self) -> jax.Array:
        """Random tokens [batch, length + 1]: one batch, trained on again and again, so that the loss must fall."""
        return jax.random.randint(jax.random.key(1), (self.batch, self.length + 1), 0, self.vocabulary)


def norm(x: jax.Array, weight: jax.Array) -> jax.Array:
    """Layer norm without bias, its statistics in float32."""
    y = x.astype(jnp.float32)
    y = (y - y.mean(-1, keepdims=True)) * jax.lax.rsqrt(y.var(-1, keepdims=True) + 1e-5)
    return (y * weight).astype(x.dtype)


def mean_loss(params: dict[str, Any], data: jax.Array, attend: Callable) -> jax.Array:
    """Cross-entropy of each next token in nats; `attend(q, k, v, {})` is causal attention."""
    tokens, targets = data[:, :-1], data[:, 1:]
    low = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
    x = low["tokens"][tokens] + low["positions"]
    for p, full in zip(low["layers"], params["layers"], strict=True):
        q, k, v = jnp.moveaxis(jnp.einsum("btd,dchw->btchw", norm(x, full["norm1"]), p["qkv"]), 2, 0)
        x += jnp.einsum("bthw,hwd->btd", attend(q, k, v, {}), p["out"])
        x += jax.nn.gelu(norm(x, full["norm2"]) @ p["up"]) @ p["down"]
    x = norm(x, params["norm"])
    logits = jnp.einsum("btd,vd->btv", x, low["tokens"], preferred_element_type=jnp.float32)
    own = jnp.take_along_axis(logits, targets[..., None], -1)[..., 0]
    return jnp.mean(jax.nn.logsumexp(logits, -1) - own)


def optimizer() -> optax.GradientTransformation:
    """AdamW, its moments in float32."""
    return optax.adamw(3e-4, b1=0.9, b2=0.95, weight_decay=0.1)


def step(state: tuple, data: jax.Array, attend: Callable) -> tuple[tuple, jax.Array]:
    """((parameters, moments), loss before it) of one step."""
    params, moments = state
    loss, gradient = jax.value_and_grad(mean_loss)(params, data, attend)
    updates, moments = optimizer().update(gradient, moments, params)
    return (optax.apply_updates(params, updates), moments), loss


def start(model: GPT) -> tuple:
    """The state before the first step."""
    params = model.initial()
    return params, optimizer().init(params)
