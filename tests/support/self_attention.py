"""The self-attention modules' definition, written a second time: what the linen and nnx modules must compute.

Rotary positions are complex numbers here, and nothing is shared with the package.
"""

import functools

import jax
import jax.numpy as jnp

from tests.support.accuracy import assert_accurate, judges
from tests.support.programs import Program

HIGHEST = jax.lax.Precision.HIGHEST

# Each a set of options that both modules take; `features` is the width of the input.
CASES = {
    "defaults": {"num_heads": 4},
    "grouped-normed-biased": {"num_heads": 4, "num_kv_heads": 2, "qk_norm": True, "use_bias": True},
    "one-kv-head-window": {"num_heads": 4, "num_kv_heads": 1, "window": (5, 0), "head_dim": 10},
    "no-rotation": {"num_heads": 2, "rope_theta": None, "head_dim": 5},
    "both-ways": {"num_heads": 4, "causal": False, "rope_theta": 100.0},
}
FEATURES = 24


def definition(
    attend,
    x,
    params,
    *,
    num_heads,
    num_kv_heads=None,
    head_dim=None,
    causal=True,
    window=None,
    rope_theta=10_000.0,
    qk_norm=False,
    use_bias=False,
):
    """x [..., T, features] through the module with `params` (a dict of dicts), attention by `attend`."""
    query, key, value = (_project(x, params[name], "...tf,fhd->...thd") for name in ("query", "key", "value"))
    assert query.shape[-2:] == (num_heads, head_dim or x.shape[-1] // num_heads)
    assert key.shape[-2] == value.shape[-2] == (num_kv_heads or num_heads)
    assert ("bias" in params["out"]) == use_bias
    if qk_norm:
        query, key = _normed(query, params["query_norm"]["scale"]), _normed(key, params["key_norm"]["scale"])
    if rope_theta is not None:
        query, key = _turned(query, rope_theta), _turned(key, rope_theta)
    return _project(attend(query, key, value, causal=causal, window=window), params["out"], "...thd,hdf->...tf")


@functools.cache
def output(name):
    """`program(attend, x, params)`: what the module of case `name` gives."""
    return Program(lambda attend, x, params: definition(attend, x, params, **CASES[name]), {})


@functools.cache
def gradients(name):
    """`program(attend, x, params, cotangent)`: the gradients of input and parameters."""

    def program(attend, x, params, cotangent):
        return jax.vjp(lambda x, params: definition(attend, x, params, **CASES[name]), x, params)[1](cotangent)

    return Program(program, {})


def hold(actual, program, *arrays, derivative=False):
    """Holds `actual` to what the program gives for these arrays, by the accuracy rule."""
    oracle, plain = judges(program, *arrays)
    jax.tree.map(functools.partial(assert_accurate, derivative=derivative), actual, oracle, plain)


def normal(seed, *shape):
    """Standard-normal float32 numbers."""
    return jax.random.normal(jax.random.key(seed), shape)


def scattered(params, seed=7):
    """`params` with every leaf moved a little, so that no bias is zero and no scale is one."""
    leaves, tree = jax.tree.flatten(params)
    return tree.unflatten(x + 0.1 * normal(seed + i, *x.shape).astype(x.dtype) for i, x in enumerate(leaves))


def _project(x, layer, subscripts):
    product = jnp.einsum(subscripts, x, layer["kernel"], precision=HIGHEST)
    return product + layer["bias"] if "bias" in layer else product


def _normed(x, scale):
    return x / jnp.sqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6) * scale


def _turned(x, theta):
    length, half = x.shape[-3], x.shape[-1] // 2
    exponents = -jnp.arange(half, dtype=x.dtype) / half
    angles = jnp.arange(length, dtype=x.dtype)[:, None] * theta**exponents
    turned = jax.lax.complex(x[..., :half], x[..., half:]) * jax.lax.complex(jnp.cos(angles), jnp.sin(angles))[:, None]
    return jnp.concatenate([turned.real, turned.imag], axis=-1)
