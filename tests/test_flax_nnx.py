"""The nnx modules compute their definition, decode like the whole sequence, and refuse what they cannot serve."""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from flash_jax.flax import linen as flash_linen
from flash_jax.flax.nnx import SelfAttention, attention_fn
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


def made(config, params=None, **options):
    """The module, with `params` (a dict of dicts) where given."""
    layer = SelfAttention(in_features=FEATURES, **config, **options, rngs=nnx.Rngs(0))
    if params is not None:
        nnx.update(layer, jax.tree.map(jnp.asarray, params))
    return layer


def parameters(layer):
    return nnx.to_pure_dict(nnx.state(layer, nnx.Param))


@pytest.mark.parametrize("name", CASES)
def test_output_and_gradients_are_the_definitions(name):
    x, params = inputs(name)
    layer = made(CASES[name], params)
    assert jax.tree.map(np.shape, parameters(layer)) == jax.tree.map(np.shape, params)

    @nnx.jit
    def run(layer, x):
        def loss(layer, x):
            out = layer(x)
            return jnp.sum(out * cotangent()), out

        (dlayer, dx), out = nnx.grad(loss, argnums=(0, 1), has_aux=True)(layer, x)
        return out, dx, dlayer

    out, dx, dlayer = run(layer, jnp.asarray(x))
    hold_output(out, name)
    hold_gradients((dx, nnx.to_pure_dict(dlayer)), name)


def test_each_implementation_serves_the_module(implementation):
    x, params = inputs("every-option")
    layer = made(CASES["every-option"], params, implementation=implementation)
    hold_output(nnx.jit(lambda layer, x: layer(x))(layer, x), "every-option")


def test_dtype_is_of_the_computation_and_param_dtype_of_the_parameters():
    def traced(x_dtype, **dtypes):
        layer = nnx.eval_shape(lambda: made({"num_heads": 4}, qk_norm=True, use_bias=True, **dtypes))
        out = nnx.eval_shape(lambda layer, x: layer(x), layer, jax.ShapeDtypeStruct((2, LENGTH, FEATURES), x_dtype))
        return out.dtype, {p.dtype for p in jax.tree.leaves(parameters(layer))}

    float32, bfloat16, float16 = (jnp.dtype(name) for name in ("float32", "bfloat16", "float16"))
    assert traced(float32) == (float32, {float32})
    assert traced(float32, dtype=bfloat16) == (bfloat16, {float32})
    assert traced(float16, param_dtype=float16) == (float16, {float16})


def test_parameters_carry_the_names_that_linen_gives_them():
    layer = made({"num_heads": 4}, num_kv_heads=2, qk_norm=True, use_bias=True)
    names = nnx.to_pure_dict(nnx.get_partition_spec(nnx.state(layer, nnx.Param)))
    kv = {"kernel": jax.P("embed", "kv_heads", "head_dim"), "bias": jax.P("kv_heads", "head_dim")}
    assert names == {
        "query": {"kernel": jax.P("embed", "heads", "head_dim"), "bias": jax.P("heads", "head_dim")},
        "key": kv,
        "value": kv,
        "out": {"kernel": jax.P("heads", "head_dim", "embed"), "bias": jax.P("embed")},
        "query_norm": {"scale": jax.P("head_dim")},
        "key_norm": {"scale": jax.P("head_dim")},
    }


def test_logical_names_shard_the_parameters():
    mesh = jax.make_mesh((8,), ("model",), axis_types=(jax.sharding.AxisType.Auto,))
    rules = [("heads", "model"), ("kv_heads", None), ("embed", None), ("head_dim", None)]
    with jax.set_mesh(mesh), nnx.logical_axis_rules(rules):
        layer = SelfAttention(8, FEATURES, head_dim=4, num_kv_heads=4, rngs=nnx.Rngs(0))
    assert layer.query.kernel[...].sharding.spec == jax.P(None, "model", None)
    assert layer.out.kernel[...].sharding.spec == jax.P("model", None, None)


def test_a_mesh_without_rules_leaves_the_parameters_alone():
    mesh = jax.make_mesh((8,), ("model",), axis_types=(jax.sharding.AxisType.Auto,))
    with jax.set_mesh(mesh):
        layer = made(CASES["defaults"])
    assert layer.query.kernel[...].shape == (FEATURES, 4, 6)


# Decoding


def decoder(config, params, length, **options):
    """A module whose empty cache holds NaN in every slot: no unfilled slot may be read."""
    layer = made(config, params, decode=True, **options)
    layer.init_cache((BATCH, length, FEATURES))
    layer.cached_key[...] = jnp.full_like(layer.cached_key[...], jnp.nan)
    layer.cached_value[...] = jnp.full_like(layer.cached_value[...], jnp.nan)
    return layer


def decoded(layer, x, chunks):
    step = nnx.jit(lambda layer, x: layer(x))
    return np.concatenate([step(layer, piece) for piece in np.split(x, np.cumsum(chunks)[:-1], axis=1)], axis=1)


@pytest.mark.parametrize(
    ("name", "chunks"),
    [("defaults", [1] * LENGTH), ("every-option", [6, 1, 1, 4, 1])],
    ids=["by-token", "by-chunk"],
)
def test_decoding_gives_what_the_whole_sequence_gives(name, chunks):
    x, params = inputs(name)
    layer = decoder(CASES[name], params, LENGTH + 3)
    hold_output(decoded(layer, x, chunks), name)
    assert int(layer.cache_index[...]) == LENGTH
    assert np.isnan(layer.cached_key[:, LENGTH:]).all()


def test_each_implementation_decodes(implementation):
    x, params = inputs("every-option")
    layer = decoder(CASES["every-option"], params, LENGTH, implementation=implementation)
    hold_output(decoded(layer, x, [LENGTH - 2, 1, 1]), "every-option")


def test_an_overflowing_cache_is_an_error_outside_jit():
    x, params = inputs("defaults")
    layer = decoder(CASES["defaults"], params, 4)
    with pytest.raises(ValueError, match="holds 4 tokens; got 5 more on top of 0"):
        layer(x[:, :5])
    layer.cache_index[...] = jnp.int32(3)
    with pytest.raises(ValueError, match="holds 4 tokens; got 2 more on top of 3"):
        layer(x[:, :2])


def test_an_overflowing_cache_gives_nan_under_jit_and_keeps_its_contents():
    x, params = inputs("defaults")
    layer = decoder(CASES["defaults"], params, 4)
    assert np.isfinite(decoded(layer, x[:, :3], [3])).all()
    full = np.asarray(layer.cached_key[...])
    assert np.isnan(decoded(layer, x[:, 3:8], [2, 1, 2])).all()
    np.testing.assert_array_equal(layer.cached_key[...], full)
    assert int(layer.cache_index[...]) == 8


def test_a_call_says_whether_it_decodes_and_needs_a_cache_for_it():
    x, params = inputs("defaults")
    layer = made(CASES["defaults"], params)
    with pytest.raises(ValueError, match="call `init_cache`"):
        layer(x, decode=True)
    layer.init_cache(x.shape, jnp.float16)
    assert layer.cached_key[...].dtype == jnp.float16
    hold_output(layer(x), "defaults")
    assert int(layer.cache_index[...]) == 0
    layer(x[:, :2], decode=True)
    assert int(layer.cache_index[...]) == 2


def test_a_view_decodes_with_a_cache_of_its_own():
    x, params = inputs("defaults")
    layer = made(CASES["defaults"], params)
    view = nnx.view(layer, decode=True, batch_size=BATCH, max_length=LENGTH)
    hold_output(decoded(view, x, [5, 8]), "defaults")
    assert layer.cached_key is None


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ({"num_heads": 5}, "divisible by `num_heads`; got 24 and 5"),
        ({"num_heads": 4, "num_kv_heads": 3}, "`num_kv_heads` must divide `num_heads`; got 3 and 4"),
        ({"num_heads": 4, "head_dim": 3}, "`head_dim` must be even; got 3"),
    ],
)
def test_numbers_that_do_not_fit_are_errors(config, text):
    with pytest.raises(ValueError, match=text):
        made(config)


def test_inputs_that_do_not_fit_are_errors():
    with pytest.raises(ValueError, match="`decode` needs causal=True"):
        made({"num_heads": 4, "causal": False})(normal(1, 1, 2, FEATURES), decode=True)
    with pytest.raises(ValueError, match=r"must end in dims \(24,\); got shape \(1, 2, 25\)"):
        made({"num_heads": 4})(normal(1, 1, 2, FEATURES + 1))


def test_linen_and_nnx_give_the_same():
    x, params = inputs("every-option")
    in_linen = flash_linen.SelfAttention(**CASES["every-option"])
    linen_out = jax.jit(lambda params, x: in_linen.apply({"params": params}, x))(params, x)
    graph, state = nnx.split(made(CASES["every-option"], params))
    nnx_out = jax.jit(lambda state, x: nnx.merge(graph, state)(x))(state, x)
    np.testing.assert_array_equal(linen_out, nnx_out)


# attention_fn


def flax_module(attention, **options):
    return nnx.MultiHeadAttention(
        4, FEATURES, attention_fn=attention, decode=options.pop("decode", False), rngs=nnx.Rngs(0), **options
    )


@pytest.mark.parametrize(
    ("options", "is_causal", "masking"),
    [
        ({}, True, {"causal": True}),
        ({"causal": True, "window": (3, 0), "implementation": "xla"}, False, {"causal": True, "window": (3, 0)}),
    ],
    ids=["is_causal", "by-partial"],
)
def test_attention_fn_serves_flaxs_own_module(options, is_causal, masking):
    x = normal(30, BATCH, LENGTH, FEATURES)

    def through(attention, x, is_causal):
        graph, state = nnx.split(flax_module(attention))
        state = jax.tree.map(lambda p: p.astype(x.dtype), state)
        return nnx.merge(graph, state)(x, is_causal=is_causal)

    def program(attend, x):
        return through(lambda q, k, v, **_: attend(q, k, v), x, False)

    oracle, plain = judges(Program(program, masking), x)
    actual = jax.jit(lambda x: through(functools.partial(attention_fn, **options), x, is_causal))(x)
    assert_accurate(actual, oracle, plain)


def test_attention_fn_names_every_keyword_that_flax_knows():
    named = set(inspect.signature(attention_fn).parameters)
    assert set(inspect.signature(nnx.dot_product_attention).parameters) <= named
    call = inspect.getsource(nnx.MultiHeadAttention.__call__).split("self.attention_fn(")[1].split("# back to")[0]
    passed = {line.strip().split("=")[0] for line in call.splitlines() if "=" in line}
    assert {"mask", "is_causal", "module"} <= passed <= named


def test_is_causal_needs_as_many_queries_as_keys():
    q, k = jnp.zeros((1, 1, 2, 8)), jnp.zeros((1, 6, 2, 8))
    with pytest.raises(ValueError, match="`is_causal` needs as many queries as keys.*got 1 and 6.*causal=True"):
        attention_fn(q, k, k, is_causal=True)


def test_attention_fn_casts_to_dtype():
    q = jnp.asarray(normal(1, 2, 5, 3, 8))
    assert attention_fn(q, q, q, dtype=jnp.float16).dtype == jnp.float16
    with jax.numpy_dtype_promotion("standard"):
        assert attention_fn(q.astype(jnp.bfloat16), q, q).dtype == jnp.float32

    def to_bfloat16(arrays, dtype):
        return tuple(x.astype(jnp.bfloat16) for x in arrays)

    assert attention_fn(q, q, q, promote_dtype=to_bfloat16).dtype == jnp.bfloat16


def test_harmless_values_pass():
    q = jnp.asarray(normal(1, 2, 5, 3, 8))
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
        input_positions=None,
    )
    np.testing.assert_array_equal(attention_fn(q, q, q), same)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"bias": np.zeros((3, 5, 5), np.float32)}, r"`bias` is not supported; got float32\[3, 5, 5\]"),
        ({"mask": np.ones((1, 5, 5), bool)}, r"`mask` is not supported; got bool\[1, 5, 5\].*causal=True"),
        ({"dropout_rate": 0.1}, "`dropout_rate` above 0 is not supported; got 0.1 with deterministic=False"),
        ({"input_positions": np.arange(5)}, r"`input_positions` is not supported; got int64\[5\]"),
    ],
)
def test_what_cannot_be_served_is_refused(arguments, text):
    q = normal(1, 2, 5, 3, 8)
    with pytest.raises(NotImplementedError, match=text):
        attention_fn(q, q, q, **arguments)


def test_flaxs_own_module_passes_on_what_is_refused():
    x = jnp.asarray(normal(1, BATCH, LENGTH, FEATURES))
    with pytest.raises(NotImplementedError, match="`mask`"):
        flax_module(attention_fn)(x, mask=nnx.make_causal_mask(x[..., 0]))
    with pytest.raises(NotImplementedError, match="`dropout_rate`"):
        flax_module(attention_fn, dropout_rate=0.1, deterministic=False)(x)
    with pytest.raises(NotImplementedError, match="`module` is not supported; got MultiHeadAttention"):
        flax_module(attention_fn)(x, sow_weights=True)
    decoding = flax_module(attention_fn, decode=True)
    decoding.init_cache(x.shape)
    with pytest.raises(NotImplementedError, match="`mask`.*SelfAttention"):
        decoding(x[:, :1], is_causal=True)
