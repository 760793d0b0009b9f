"""The nnx modules compute their definition, decode like the whole sequence, and refuse what they cannot serve."""

import functools
import inspect
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from flash_jax import dropout_mask, flash_attention
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
    hold_call,
    hold_gradients,
    hold_output,
    inputs,
    normal,
    outputs_of_the_past,
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
    layer = made({"num_heads": 4}, num_kv_heads=2, qk_norm=True, use_bias=True, sinks=True)
    names = nnx.to_pure_dict(nnx.get_partition_spec(nnx.state(layer, nnx.Param)))
    kv = {"kernel": jax.P("embed", "kv_heads", "head_dim"), "bias": jax.P("kv_heads", "head_dim")}
    assert names == {
        "query": {"kernel": jax.P("embed", "heads", "head_dim"), "bias": jax.P("heads", "head_dim")},
        "key": kv,
        "value": kv,
        "out": {"kernel": jax.P("heads", "head_dim", "embed"), "bias": jax.P("embed")},
        "query_norm": {"scale": jax.P("head_dim")},
        "key_norm": {"scale": jax.P("head_dim")},
        "sinks": jax.P("heads"),
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


def test_a_call_narrows_what_is_attended():
    x, params = inputs("defaults")
    run = nnx.jit(lambda layer, x, **call: layer(x, **call))
    layer = made(CASES["defaults"], params)
    ids = np.array([[0] * 5 + [1] * 8, [3] * 10 + [-1] * 3])
    hold_call(run(layer, x, segment_ids=ids), "defaults", segment_ids=ids)
    mask = normal(2, 1, 4, LENGTH, LENGTH) > 0
    hold_call(run(layer, x, mask=mask.astype(np.float32)), "defaults", mask=mask)


def test_dropout_is_applied_unless_deterministic():
    x, params = inputs("defaults")
    key = jax.random.key(5)
    layer = made(CASES["defaults"], params, dropout_rate=0.4)
    with pytest.raises(ValueError, match="a positive `dropout_rate` needs `deterministic`"):
        layer(x)
    hold_output(layer(x, deterministic=True), "defaults")
    hold_call(layer(x, deterministic=False, rngs=key), "defaults", dropout_rate=0.4, dropout_key=key)
    layer.train()
    first = layer(x, rngs=nnx.Rngs(dropout=1))
    np.testing.assert_array_equal(layer(x, rngs=nnx.Rngs(dropout=1)), first)
    run = nnx.jit(lambda layer, x: layer(x))
    assert np.abs(run(layer, x) - run(layer, x)).max() > 0.1  # each call takes the next key of the module's stream
    hold_output(nnx.view(layer, deterministic=True)(x), "defaults")
    layer.eval()
    hold_output(layer(x), "defaults")


def test_a_module_without_dropout_keeps_no_stream():
    assert made(CASES["defaults"]).rngs is None
    assert not jax.tree.leaves(nnx.state(made(CASES["defaults"], dropout_rate=0.0), nnx.RngState))


@pytest.mark.parametrize("deterministic", [True, False])
def test_the_future_is_never_seen(deterministic):
    x, params = inputs("every-option")
    layer = made(CASES["every-option"], params, dropout_rate=0.3, deterministic=deterministic)
    first, second = outputs_of_the_past(lambda x: layer(x, rngs=jax.random.key(0)), x)
    np.testing.assert_array_equal(first, second)


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
    layer = made({"num_heads": 4})
    layer.init_cache((1, 2, FEATURES))
    with pytest.raises(NotImplementedError, match="`segment_ids` while decoding is not supported"):
        layer(normal(1, 1, 2, FEATURES), decode=True, segment_ids=np.zeros(2, int))
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


def test_masks_mean_what_flax_means():
    x = jnp.asarray(normal(30, BATCH, LENGTH, FEATURES))
    some = normal(2, BATCH, 1, LENGTH, LENGTH) > -1
    masks = nnx.make_causal_mask(x[..., 0]), some.astype(np.float32)
    ours = flax_module(attention_fn)(x, mask=nnx.combine_masks(*masks))
    np.testing.assert_array_equal(ours, flax_module(attention_fn)(x, mask=some, is_causal=True))
    theirs = flax_module(nnx.dot_product_attention)(x, mask=nnx.combine_masks(*masks))
    live = np.any(np.tri(LENGTH, dtype=bool) & some[:, 0], axis=-1)
    np.testing.assert_allclose(ours[live], theirs[live], atol=1e-5)


def test_a_bias_is_added():
    q, bias = jnp.asarray(normal(1, 2, 5, 3, 8)), jnp.asarray(normal(2, 3, 5, 5))
    np.testing.assert_array_equal(attention_fn(q, q, q, bias=bias), flash_attention(q, q, q, bias=bias))


def test_flaxs_own_decoding():
    x = jnp.asarray(normal(30, BATCH, LENGTH, FEATURES))
    causal = functools.partial(attention_fn, causal=True)
    decoding = flax_module(causal, decode=True)
    decoding.init_cache(x.shape)
    step = nnx.jit(lambda layer, x: layer(x))
    outs = [step(decoding, token) for token in np.split(x, LENGTH, axis=1)]
    np.testing.assert_allclose(np.concatenate(outs, axis=1), flax_module(causal)(x), atol=1e-5)


@pytest.mark.parametrize("shared", [True, False])
def test_dropout_keeps_what_it_says(shared):
    key, q = jax.random.key(4), jnp.zeros((2, 7, 4, 8))
    units = jnp.broadcast_to(jnp.eye(7)[:, None], (2, 7, 4, 7))  # the output is the weights, each 1 / 7
    out = attention_fn(q, q, units, dropout_rate=0.4, dropout_rng=key, broadcast_dropout=shared)
    kept = dropout_mask(key, 0.4, (1, 7, 7) if shared else (2, 4, 7, 7))
    np.testing.assert_array_equal(np.moveaxis(out, 1, 2) > 0, np.broadcast_to(kept, (2, 4, 7, 7)))
    with pytest.raises(ValueError, match="`dropout_rate` 0.4 with deterministic=False needs a `dropout_rng`"):
        attention_fn(q, q, q, dropout_rate=0.4)


@pytest.mark.parametrize("sow_weights", [False, True])
@pytest.mark.parametrize("dropout_rate", [0.0, 0.4])
def test_flaxs_own_module_never_sees_the_future(dropout_rate, sow_weights):
    x = normal(30, BATCH, LENGTH, FEATURES)
    module = flax_module(attention_fn, dropout_rate=dropout_rate, deterministic=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        first, second = outputs_of_the_past(
            lambda x: module(x, is_causal=True, sow_weights=sow_weights, rngs=nnx.Rngs(0)), x
        )
    np.testing.assert_array_equal(first, second)


def test_weights_are_sown_as_flax_sows_them():
    x = jnp.asarray(normal(30, BATCH, LENGTH, FEATURES))
    ours, theirs = flax_module(attention_fn), flax_module(nnx.dot_product_attention)

    def run(module):
        return nnx.capture(module, nnx.Intermediate)(x, is_causal=True, sow_weights=True)

    with pytest.warns(UserWarning, match="sow_weights=True computes the attention weights by the reference") as warned:
        out, sown = run(ours)
    assert len(warned) == 1
    np.testing.assert_array_equal(out, ours(x, is_causal=True))
    sown, wanted = map(nnx.to_pure_dict, (sown, run(theirs)[1]))
    assert jax.tree.leaves(sown)[0].shape == (BATCH, 4, LENGTH, LENGTH)
    jax.tree.map(functools.partial(np.testing.assert_allclose, atol=1e-6), sown, wanted)


def test_what_cannot_be_served_is_refused():
    q = normal(1, 2, 5, 3, 8)
    with pytest.raises(NotImplementedError, match=r"`input_positions` is not supported; got int64\[5\]"):
        attention_fn(q, q, q, input_positions=np.arange(5))
    decoding = flax_module(functools.partial(attention_fn, causal=True, window=(3, 0)), decode=True)
    decoding.init_cache((BATCH, LENGTH, FEATURES))
    with pytest.raises(NotImplementedError, match="`window` with a `mask` and 1 queries for 13 keys.*SelfAttention"):
        decoding(normal(1, BATCH, 1, FEATURES))


@pytest.mark.multi_device
def test_tokens_that_devices_share():
    """Inside shard_map: as on one device, rotary positions included; and no cache is shared."""
    layer = SelfAttention(4, 16, window=(9, 0), implementation="xla", rngs=nnx.Rngs(0))
    shared = SelfAttention(4, 16, window=(9, 0), implementation="xla", context_axis="seq", rngs=nnx.Rngs(0))
    x, tokens = jax.random.normal(jax.random.key(0), (2, 32, 16)), jax.sharding.PartitionSpec(None, "seq")
    automatic = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((4,), ("seq",), axis_types=automatic, devices=jax.devices()[:4])
    part = jax.jit(jax.shard_map(lambda x: shared(x), mesh=mesh, in_specs=tokens, out_specs=tokens))
    np.testing.assert_allclose(part(x), layer(x), rtol=2e-5, atol=2e-5)
    with pytest.raises(NotImplementedError, match="`context_axis` while decoding is not supported"):
        shared(x, decode=True)
