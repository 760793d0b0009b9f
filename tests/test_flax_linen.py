"""The linen modules compute their definition, decode like the whole sequence, and refuse what they cannot serve."""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax.linen.spmd import logical_to_mesh_sharding

from flash_jax.flax.linen import SelfAttention, attention_fn
from tests.support.accuracy import assert_accurate, judges
from tests.support.programs import Program
from tests.support.self_attention import (
    BATCH,
    CASES,
    FEATURES,
    LENGTH,
    cotangent,
    hold_gradients,
    hold_output,
    inputs,
    normal,
)


def test_parameters_have_the_documented_shapes():
    for name, config in CASES.items():
        x, params = inputs(name)
        made = nn.unbox(jax.eval_shape(SelfAttention(**config).init, jax.random.key(0), x))["params"]
        assert jax.tree.map(np.shape, made) == jax.tree.map(np.shape, params)


@pytest.mark.parametrize("name", CASES)
def test_output_and_gradients_are_the_definitions(name):
    layer = SelfAttention(**CASES[name])

    @jax.jit
    def run(x, params):
        out, pull = jax.vjp(lambda x, params: layer.apply({"params": params}, x), x, params)
        return out, pull(cotangent())

    out, gradients = run(*inputs(name))
    hold_output(out, name)
    hold_gradients(gradients, name)


def test_each_implementation_serves_the_module(implementation):
    x, params = inputs("every-option")
    layer = SelfAttention(**CASES["every-option"], implementation=implementation)
    hold_output(jax.jit(layer.apply)({"params": params}, x), "every-option")


def test_no_batch_dimension():
    x, params = inputs("defaults")
    layer = SelfAttention(**CASES["defaults"])
    rows = [layer.apply({"params": params}, row) for row in x]
    hold_output(np.stack(rows), "defaults")


def test_dtype_is_of_the_computation_and_param_dtype_of_the_parameters():
    def traced(x_dtype, **dtypes):
        layer = SelfAttention(4, qk_norm=True, use_bias=True, **dtypes)
        x = jax.ShapeDtypeStruct((BATCH, LENGTH, FEATURES), x_dtype)
        params = jax.eval_shape(layer.init, jax.random.key(0), x)
        return jax.eval_shape(layer.apply, params, x).dtype, {p.dtype for p in jax.tree.leaves(params)}

    float32, bfloat16, float16 = (jnp.dtype(name) for name in ("float32", "bfloat16", "float16"))
    assert traced(float32) == (float32, {float32})
    assert traced(float32, dtype=bfloat16) == (bfloat16, {float32})
    assert traced(float16, param_dtype=float16) == (float16, {float16})


def test_kernels_are_initialised_as_matrices():
    kernel = nn.unbox(SelfAttention(8, head_dim=64).init(jax.random.key(0), normal(1, 2, 256)))["params"]["query"][
        "kernel"
    ]
    assert kernel.shape == (256, 8, 64)
    assert float(jnp.std(kernel)) == pytest.approx(256**-0.5, rel=0.02)  # lecun_normal: fan-in is the features alone


def test_parameters_carry_logical_names():
    layer = SelfAttention(4, num_kv_heads=2, qk_norm=True, use_bias=True)
    spec = nn.get_partition_spec(jax.eval_shape(layer.init, jax.random.key(0), normal(1, BATCH, LENGTH, FEATURES)))[
        "params"
    ]
    names = jax.tree.map(tuple, spec, is_leaf=lambda s: isinstance(s, jax.sharding.PartitionSpec))
    kv = {"kernel": ("embed", "kv_heads", "head_dim"), "bias": ("kv_heads", "head_dim")}
    assert names == {
        "query": {"kernel": ("embed", "heads", "head_dim"), "bias": ("heads", "head_dim")},
        "key": kv,
        "value": kv,
        "out": {"kernel": ("heads", "head_dim", "embed"), "bias": ("embed",)},
        "query_norm": {"scale": ("head_dim",)},
        "key_norm": {"scale": ("head_dim",)},
    }


def test_logical_names_shard_the_parameters():
    mesh = jax.make_mesh((8,), ("model",), axis_types=(jax.sharding.AxisType.Auto,))
    layer, x = SelfAttention(8, head_dim=4), normal(1, BATCH, LENGTH, FEATURES)
    shapes = jax.eval_shape(layer.init, jax.random.key(0), x)
    shardings = logical_to_mesh_sharding(nn.get_partition_spec(shapes), mesh, [("heads", "model")])
    params = nn.unbox(jax.jit(layer.init, out_shardings=shardings)(jax.random.key(0), x))["params"]
    assert params["query"]["kernel"].sharding.spec == jax.P(None, "model", None)
    assert params["out"]["kernel"].sharding.spec == jax.P("model", None, None)


def decoder(config, length, **options):
    """A decoding module and its empty cache, of which every slot holds NaN: no unfilled slot may be read."""
    layer = SelfAttention(**config, **options, decode=True)
    x = jax.ShapeDtypeStruct((BATCH, length, FEATURES), np.float32)
    shapes = jax.eval_shape(layer.init, jax.random.key(0), x)["cache"]
    empty = {name: np.full(s.shape, np.nan if s.ndim else 0, s.dtype) for name, s in shapes.items()}
    return layer, empty


def decoded(layer, params, cache, x, chunks):
    """x [B, T, features] given to a jitted decoder in chunks; (the outputs side by side, the last cache)."""

    @jax.jit
    def step(cache, x):
        out, state = layer.apply({"params": params, "cache": cache}, x, mutable=["cache"])
        return out, state["cache"]

    outs = []
    for piece in np.split(x, np.cumsum(chunks)[:-1], axis=1):
        out, cache = step(cache, piece)
        outs.append(out)
    return np.concatenate(outs, axis=1), cache


def test_a_cache_starts_empty():
    cache = SelfAttention(4, decode=True).init(jax.random.key(0), normal(1, BATCH, 5, FEATURES))["cache"]
    assert int(cache["cache_index"]) == 0
    assert cache["cached_key"].shape == cache["cached_value"].shape == (BATCH, 5, 4, 6)
    assert not np.any(cache["cached_key"])


@pytest.mark.parametrize(
    ("name", "chunks"),
    [("defaults", [1] * LENGTH), ("every-option", [6, 1, 1, 4, 1])],
    ids=["by-token", "by-chunk"],
)
def test_decoding_gives_what_the_whole_sequence_gives(name, chunks):
    x, params = inputs(name)
    layer, cache = decoder(CASES[name], LENGTH + 3)
    out, cache = decoded(layer, params, cache, x, chunks)
    hold_output(out, name)
    assert int(cache["cache_index"]) == LENGTH
    assert np.isnan(cache["cached_key"][:, LENGTH:]).all()


def test_each_implementation_decodes(implementation):
    x, params = inputs("every-option")
    layer, cache = decoder(CASES["every-option"], LENGTH, implementation=implementation)
    out, _ = decoded(layer, params, cache, x, [LENGTH - 2, 1, 1])
    hold_output(out, "every-option")


def test_an_overflowing_cache_is_an_error_outside_jit():
    layer, cache = decoder(CASES["defaults"], 4)
    x, params = inputs("defaults")
    with pytest.raises(ValueError, match="holds 4 tokens; got 5 more on top of 0"):
        layer.apply({"params": params, "cache": cache}, x[:, :5], mutable=["cache"])
    with pytest.raises(ValueError, match="holds 4 tokens; got 2 more on top of 3"):
        layer.apply({"params": params, "cache": cache | {"cache_index": np.int32(3)}}, x[:, :2], mutable=["cache"])


def test_an_overflowing_cache_gives_nan_under_jit_and_keeps_its_contents():
    layer, empty = decoder(CASES["defaults"], 4)
    x, params = inputs("defaults")
    _, full = decoded(layer, params, empty, x[:, :3], [3])
    out, cache = decoded(layer, params, full, x[:, 3:8], [2, 1, 2])
    assert np.isnan(out).all()
    np.testing.assert_array_equal(cache["cached_key"], full["cached_key"])
    np.testing.assert_array_equal(cache["cached_value"], full["cached_value"])
    assert int(cache["cache_index"]) == 8


def test_a_cache_of_another_batch_is_an_error():
    layer, cache = decoder(CASES["defaults"], 4)
    _, params = inputs("defaults")
    with pytest.raises(ValueError, match=r"key/value cache's, \(2,\); got \(3,\)"):
        layer.apply({"params": params, "cache": cache}, normal(1, 3, 1, FEATURES), mutable=["cache"])


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ({"num_heads": 5}, "divisible by `num_heads`; got 24 and 5"),
        ({"num_heads": 4, "num_kv_heads": 3}, "`num_kv_heads` must divide `num_heads`; got 3 and 4"),
        ({"num_heads": 4, "num_kv_heads": 0}, "`num_kv_heads` must divide `num_heads`; got 0 and 4"),
        ({"num_heads": 0}, "`num_heads` must be at least 1; got 0"),
        ({"num_heads": 4, "head_dim": 0}, "`head_dim` must be at least 1; got 0"),
        ({"num_heads": 4, "head_dim": 3}, "`head_dim` must be even; got 3"),
        ({"num_heads": 4, "causal": False, "decode": True}, "`decode` needs causal=True"),
    ],
)
def test_numbers_that_do_not_fit_are_errors(config, text):
    with pytest.raises(ValueError, match=text):
        jax.eval_shape(SelfAttention(**config).init, jax.random.key(0), normal(1, BATCH, LENGTH, FEATURES))


# attention_fn


def layer_shape(name):
    return (FEATURES,) if name == "out" else (4, FEATURES // 4)


def flax_module(attention, **options):
    return nn.MultiHeadDotProductAttention(num_heads=4, attention_fn=attention, **options)


@pytest.mark.parametrize(
    "options",
    [{}, {"causal": True, "window": (3, 0), "implementation": "xla"}],
    ids=["as-it-is", "by-partial"],
)
def test_attention_fn_serves_flaxs_own_module(options):
    x, params = inputs("defaults")
    params = {"params": {name: layer | {"bias": normal(9, *layer_shape(name))} for name, layer in params.items()}}
    masking = {name: value for name, value in options.items() if name != "implementation"}
    program = Program(lambda attend, x, params: flax_module(lambda q, k, v: attend(q, k, v)).apply(params, x), masking)
    actual = jax.jit(flax_module(functools.partial(attention_fn, **options)).apply)(params, x)
    oracle, plain = judges(program, x, params)
    assert_accurate(actual, oracle, plain)


def test_attention_fn_names_every_keyword_that_flax_knows():
    assert set(inspect.signature(nn.dot_product_attention).parameters) <= set(
        inspect.signature(attention_fn).parameters
    )


def test_attention_fn_casts_to_dtype():
    x = normal(1, BATCH, LENGTH, FEATURES)
    out, _ = flax_module(attention_fn, dtype=jnp.bfloat16).init_with_output(jax.random.key(0), x)
    assert out.dtype == jnp.bfloat16
    q = jnp.asarray(normal(1, 2, 5, 3, 8))
    assert attention_fn(q, q, q, dtype=jnp.float16).dtype == jnp.float16
    with jax.numpy_dtype_promotion("standard"):
        assert attention_fn(q.astype(jnp.bfloat16), q, q).dtype == jnp.float32


def test_harmless_values_pass():
    q = jnp.asarray(normal(1, 2, 5, 3, 8))
    plain = attention_fn(q, q, q)
    same = attention_fn(
        q,
        q,
        q,
        bias=None,
        mask=None,
        broadcast_dropout=False,
        dropout_rng=jax.random.key(0),
        dropout_rate=0.5,
        deterministic=True,
        module=None,
        force_fp32_for_softmax=True,
    )
    np.testing.assert_array_equal(plain, same)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"bias": np.zeros((3, 5, 5), np.float32)}, r"`bias` is not supported; got float32\[3, 5, 5\]"),
        ({"mask": np.ones((1, 5, 5), bool)}, r"`mask` is not supported; got bool\[1, 5, 5\].*causal=True"),
        ({"dropout_rate": 0.1}, "`dropout_rate` above 0 is not supported; got 0.1 with deterministic=False"),
        ({"module": nn.Dense(1)}, "`module` is not supported; got Dense.*sow_weights=False"),
        ({"einsum_dot_general": jax.lax.dot_general}, "`einsum_dot_general` is not supported; got function"),
        ({"qk_attn_weights_einsum": jnp.einsum}, "`qk_attn_weights_einsum` is not supported"),
        ({"attn_weights_value_einsum": jnp.einsum}, "`attn_weights_value_einsum` is not supported"),
    ],
)
def test_what_cannot_be_served_is_refused(arguments, text):
    q = jnp.asarray(normal(1, 2, 5, 3, 8))
    with pytest.raises(NotImplementedError, match=text):
        attention_fn(q, q, q, **arguments)


def test_flaxs_own_module_passes_on_what_is_refused():
    x = normal(1, BATCH, LENGTH, FEATURES)
    causal = functools.partial(attention_fn, causal=True)
    with pytest.raises(NotImplementedError, match="`mask`"):
        flax_module(attention_fn).init(jax.random.key(0), x, mask=nn.make_causal_mask(x[..., 0]))
    with pytest.raises(NotImplementedError, match="`dropout_rate`"):
        flax_module(attention_fn, dropout_rate=0.1, deterministic=False).init(jax.random.split(jax.random.key(0))[0], x)
    with pytest.raises(NotImplementedError, match="`module`"):
        flax_module(attention_fn).init(jax.random.key(0), x, sow_weights=True)
    decoding = flax_module(causal, decode=True)
    variables = decoding.init(jax.random.key(0), x)
    with pytest.raises(NotImplementedError, match="`mask`.*SelfAttention"):
        decoding.apply(variables, x[:, :1], mutable=["cache"])
