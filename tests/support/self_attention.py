"""The self-attention modules' definition, written a second time: what the linen and nnx modules must compute.

Rotary positions are complex numbers here, and nothing is shared with the package.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tests.support.accuracy import assert_accurate, judges
from tests.support.programs import Program

HIGHEST = jax.lax.Precision.HIGHEST
BATCH, LENGTH, FEATURES = 2, 13, 24

# Each a set of options that both modules take.
CASES = {
    "defaults": {"num_heads": 4},
    "every-option": {
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 10,
        "window": (5, 0),
        "softcap": 3.0,
        "sinks": True,
        "alibi_slopes": (0.5, 0.25, 0.1, 0.0),
        "rope_theta": 100.0,
        "qk_norm": True,
        "use_bias": True,
    },
    "both-ways": {"num_heads": 3, "num_kv_heads": 1, "head_dim": 5, "causal": False, "rope_theta": None},
}


def normal(seed, *shape):
    """Standard-normal float32 numbers."""
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def inputs(name) -> tuple[np.ndarray, dict[str, Any]]:
    """The input and the parameters (a dict of dicts) of case `name`, none of them at a special value."""
    config = CASES[name]
    H = config["num_heads"]
    K, D = config.get("num_kv_heads", H), config.get("head_dim", FEATURES // H)
    shapes = {"query": (FEATURES, H, D), "key": (FEATURES, K, D), "value": (FEATURES, K, D), "out": (H, D, FEATURES)}
    params = {layer: {"kernel": normal(i, *shape) / 4} for i, (layer, shape) in enumerate(shapes.items())}
    if config.get("use_bias"):
        for i, (layer, shape) in enumerate(shapes.items()):
            params[layer]["bias"] = normal(10 + i, *(shape[2:] if layer == "out" else shape[1:]))
    if config.get("qk_norm"):
        params |= {"query_norm": {"scale": 1 + normal(20, D) / 4}, "key_norm": {"scale": 1 + normal(21, D) / 4}}
    if config.get("sinks"):
        params |= {"sinks": normal(22, H)}
    return normal(30, BATCH, LENGTH, FEATURES), params


def cotangent():
    """A cotangent of the output."""
    return normal(31, BATCH, LENGTH, FEATURES)


def definition(attend, x, params, *, causal=True, rope_theta=10_000.0, alibi_slopes=None, **more):
    """x [..., T, features] through the module with `params`, attention by `attend`."""
    options = {"causal": causal, **{name: more[name] for name in ("window", "softcap") if name in more}}
    if alibi_slopes is not None:
        options["alibi_slopes"] = jnp.asarray(alibi_slopes, jnp.float32)
    if "sinks" in params:
        options["sinks"] = params["sinks"]
    query, key, value = (_project(x, params[name], "...tf,fhd->...thd") for name in ("query", "key", "value"))
    if "query_norm" in params:
        query, key = _normed(query, params["query_norm"]["scale"]), _normed(key, params["key_norm"]["scale"])
    if rope_theta is not None:
        query, key = _turned(query, rope_theta), _turned(key, rope_theta)
    return _project(attend(query, key, value, **options), params["out"], "...thd,hdf->...tf")


@functools.cache
def judged(name):
    """(oracle, plain) of case `name`, each (output, (input gradient, parameter gradients))."""

    def program(attend, x, params, cotangent):
        out, pull = jax.vjp(lambda x, params: definition(attend, x, params, **CASES[name]), x, params)
        return out, pull(cotangent)

    return judges(Program(program, {}), *inputs(name), cotangent())


def hold_output(actual, name):
    """Holds the output of case `name` to its definition by the accuracy rule."""
    oracle, plain = judged(name)
    assert_accurate(actual, oracle[0], plain[0])


def hold_call(actual, name, **options):
    """Holds the output of case `name`, where attention is called with more `options`, to its definition."""
    program = Program(_PLAIN_CALLS[name], options)
    oracle, plain = judges(program, *inputs(name))
    assert_accurate(actual, oracle, plain)


_PLAIN_CALLS = {
    name: lambda attend, x, params, config=config: definition(attend, x, params, **config)
    for name, config in CASES.items()
}


def outputs_of_the_past(run, x):
    """What `run(x)` gives for the first half of x, twice: with the second half as it is, and with another."""
    half = x.shape[1] // 2
    changed = np.concatenate([x[:, :half], 1 - x[:, half:]], axis=1)
    return [jax.tree.map(lambda y: np.asarray(y)[:, :half], run(each)) for each in (x, changed)]


def hold_gradients(actual, name):
    """Holds the gradients (of the input, of the parameters) of case `name` to its definition by the accuracy rule."""
    oracle, plain = judged(name)
    assert jax.tree.map(np.shape, actual[1]) == jax.tree.map(np.shape, oracle[1][1])
    assert_accurate(actual[0], oracle[1][0], plain[1][0], derivative=True)
    assert_accurate(*map(flat, (actual[1], oracle[1][1], plain[1][1])), derivative=True)


def flat(gradients):
    """The parameters' gradient as the one vector it is: a bias of twenty numbers is too small a sample of rounding."""
    return np.concatenate([np.ravel(x) for x in jax.tree.leaves(gradients)])


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
