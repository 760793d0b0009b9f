"""The linen modules compute their definition, decode like the whole sequence, and refuse what they cannot serve."""

import functools
import inspect
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax.linen.spmd import logical_to_mesh_sharding
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from flash_jax import dropout_mask, flash_attention
from flash_jax.flax.linen import SelfAttention, attention_fn
from tests.support.accuracy import assert_accurate, assert_same_in_float64, judges
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
    layer = SelfAttention(4, num_kv_heads=2, qk_norm=True, use_bias=True, sinks=True)
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
        "sinks": ("heads",),
    }


def test_logical_names_shard_the_parameters():
    mesh = jax.make_mesh((8,), ("model",), axis_types=(jax.sharding.AxisType.Auto,))
    layer, x = SelfAttention(8, head_dim=4), normal(1, BATCH, LENGTH, FEATURES)
    shapes = jax.eval_shape(layer.init, jax.random.key(0), x)
    shardings = logical_to_mesh_sharding(nn.get_partition_spec(shapes), mesh, [("heads", "model")])
    params = nn.unbox(jax.jit(layer.init, out_shardings=shardings)(jax.random.key(0), x))["params"]
    assert params["query"]["kernel"].sharding.spec == jax.P(None, "model", None)
    assert params["out"]["kernel"].sharding.spec == jax.P("model", None, None)


def test_a_call_narrows_what_is_attended():
    x, params = inputs("defaults")
    apply = jax.jit(SelfAttention(**CASES["defaults"]).apply)
    ids = np.array([[0] * 5 + [1] * 8, [3] * 10 + [-1] * 3])
    hold_call(apply({"params": params}, x, segment_ids=ids), "defaults", segment_ids=ids)
    mask = normal(2, 1, 4, LENGTH, LENGTH) > 0
    for given in (mask, mask.astype(np.float32)):
        hold_call(apply({"params": params}, x, mask=given), "defaults", mask=mask)


def test_dropout_is_applied_unless_deterministic():
    x, params = inputs("defaults")
    key, config = jax.random.key(5), CASES["defaults"]
    layer = SelfAttention(**config, dropout_rate=0.4)
    apply = jax.jit(layer.apply, static_argnames="deterministic")
    hold_output(apply({"params": params}, x, deterministic=True), "defaults")
    dropped = apply({"params": params}, x, deterministic=False, dropout_rng=key)
    hold_call(dropped, "defaults", dropout_rate=0.4, dropout_key=key)
    training = jax.jit(SelfAttention(**config, dropout_rate=0.4, deterministic=False).apply)
    first, second = (training({"params": params}, x, rngs={"dropout": k}) for k in jax.random.split(key))
    assert np.abs(np.subtract(first, second)).max() > 0.1
    with pytest.raises(ValueError, match="a positive `dropout_rate` needs `deterministic`"):
        layer.apply({"params": params}, x)


@pytest.mark.parametrize("deterministic", [True, False])
def test_the_future_is_never_seen(deterministic):
    x, params = inputs("every-option")
    layer = SelfAttention(**CASES["every-option"], dropout_rate=0.3, deterministic=deterministic)
    first, second = outputs_of_the_past(
        lambda x: layer.apply({"params": params}, x, rngs={"dropout": jax.random.key(0)}), x
    )
    np.testing.assert_array_equal(first, second)


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


def test_a_mask_hides_the_padding_before_a_prompt():
    x, params = inputs("every-option")
    layer, cache = decoder(CASES["every-option"], LENGTH)
    there = np.ones((BATCH, 1, 1, LENGTH), bool)
    there[0, ..., :4] = False  # the first prompt is shorter, and stands at the right of its row
    step = jax.jit(lambda cache, x: layer.apply({"params": params, "cache": cache}, x, mask=there, mutable=["cache"]))
    outs = []
    for piece in np.split(x, [6, 7], axis=1):
        out, state = step(cache, piece)
        cache = state["cache"]
        outs.append(out)
    outs = np.concatenate(outs, axis=1)
    whole = SelfAttention(**CASES["every-option"])
    np.testing.assert_allclose(outs[0, 4:], whole.apply({"params": params}, x[0, 4:]), atol=1e-5)
    np.testing.assert_allclose(outs[1], whole.apply({"params": params}, x[1]), atol=1e-5)


def test_segments_in_a_cache_are_refused():
    x, params = inputs("defaults")
    layer, cache = decoder(CASES["defaults"], LENGTH)
    with pytest.raises(NotImplementedError, match="`segment_ids` while decoding is not supported.*`mask`"):
        layer.apply({"params": params, "cache": cache}, x, segment_ids=np.zeros(LENGTH, int), mutable=["cache"])


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


def flaxs_parameters():
    x, params = inputs("defaults")
    return x, {"params": {name: layer | {"bias": normal(9, *layer_shape(name))} for name, layer in params.items()}}


@pytest.mark.parametrize("dtype", [np.float32, np.int32, bool])
def test_masks_mean_what_flax_means(dtype):
    x, params = flaxs_parameters()
    some = (normal(2, BATCH, 4, LENGTH, LENGTH) > -1).astype(np.float32)
    mask = nn.combine_masks(nn.make_causal_mask(x[..., 0]), some, dtype=dtype)
    seen = np.asarray(mask) != 0
    assert mask.dtype == dtype
    program = Program(lambda attend, x, params: flax_module(lambda q, k, v: attend(q, k, v)).apply(params, x))
    program.options = {"mask": seen}
    oracle, plain = judges(program, x, params)
    actual = jax.jit(flax_module(attention_fn).apply)(params, x, mask=mask)
    assert_accurate(actual, oracle, plain)


def test_a_bias_is_added():
    q, bias = jnp.asarray(normal(1, 2, 5, 3, 8)), jnp.asarray(normal(2, 3, 5, 5))
    np.testing.assert_array_equal(attention_fn(q, q, q, bias=bias), flash_attention(q, q, q, bias=bias))


def test_flaxs_own_decoding():
    x, params = flaxs_parameters()
    causal = functools.partial(attention_fn, causal=True)
    module = flax_module(causal, decode=True)
    cache = module.init(jax.random.key(0), x)["cache"]

    @jax.jit
    def step(cache, x):
        out, state = module.apply(params | {"cache": cache}, x, mutable=["cache"])
        return out, state["cache"]

    outs = []
    for token in np.split(x, LENGTH, axis=1):
        out, cache = step(cache, token)
        outs.append(out)
    whole = flax_module(causal).apply(params, x)
    np.testing.assert_allclose(np.concatenate(outs, axis=1), whole, atol=1e-5)


@pytest.mark.thorough
@pytest.mark.parametrize("shared", [True, False])
def test_dropout_keeps_what_it_says(shared):
    """`broadcast_dropout`: whether all examples and heads drop the same. Values and every gradient, in float64."""
    with jax.enable_x64(True):
        rng, key = np.random.default_rng(0), jax.random.key(4)
        shapes = (2, 3, 5, 4, 8), (2, 3, 7, 2, 8), (2, 3, 7, 2, 6), (3, 4, 1, 7), (2, 3, 5, 4, 6)
        q, k, v, bias, cotangent = (rng.standard_normal(shape) for shape in shapes)
        mask = rng.random((2, 1, 1, 5, 7)) < 0.8
        kept = dropout_mask(key, 0.4, (1, 5, 7) if shared else (2, 3, 4, 5, 7))

        def with_weights(q, k, v, bias):
            units = jnp.broadcast_to(jnp.eye(7)[:, None], (2, 3, 7, 2, 7))
            weights = jnp.moveaxis(flash_attention(q, k, units, bias, mask, implementation="reference"), -2, -3)
            return jnp.einsum("...hts,...shd->...thd", weights * kept.astype(float) / 0.6, jnp.repeat(v, 2, axis=-2))

        def dropping(q, k, v, bias):
            options = {"dropout_rate": 0.4, "dropout_rng": key, "broadcast_dropout": shared}
            return attention_fn(q, k, v, bias, mask, **options, implementation="xla")

        def run(function):
            out, pull = jax.vjp(function, q, k, v, bias)
            return out, pull(cotangent)

        jax.tree.map(assert_same_in_float64, jax.jit(run, static_argnums=0)(dropping), run(with_weights))


def test_shared_dropout_says_what_is_wrong_of_the_arguments_as_they_are():
    q, options = jnp.zeros((2, 5, 4, 8)), {"dropout_rate": 0.1, "dropout_rng": jax.random.key(0)}
    with pytest.raises(ValueError, match=r"`mask` must be broadcastable.*\(2, 4, 5, 5\).*got shape \(3, 1, 5, 5\)"):
        attention_fn(q, q, q, mask=np.ones((3, 1, 5, 5), bool), **options)
    with pytest.raises(ValueError, match="`dropout_rate` must be at least 0 and less than 1; got 1.5"):
        attention_fn(q, q, q, **options | {"dropout_rate": 1.5})
    with pytest.raises(ValueError, match="`dropout_rate` 0.1 with deterministic=False needs a `dropout_rng`"):
        attention_fn(q, q, q, dropout_rate=0.1)


@pytest.mark.parametrize("sow_weights", [False, True])
@pytest.mark.parametrize("dropout_rate", [0.0, 0.4])
def test_flaxs_own_module_never_sees_the_future(dropout_rate, sow_weights):
    x, params = flaxs_parameters()
    causal = functools.partial(attention_fn, causal=True)
    module = flax_module(causal, dropout_rate=dropout_rate, deterministic=False)

    def run(x):
        options = {"sow_weights": sow_weights, "rngs": {"dropout": jax.random.key(0)}, "mutable": ["intermediates"]}
        return module.apply(params, x, **options)[0]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        first, second = outputs_of_the_past(run, x)
    np.testing.assert_array_equal(first, second)


def test_weights_are_sown_as_flax_sows_them():
    x, params = flaxs_parameters()
    mask = nn.make_causal_mask(x[..., 0])

    def run(module, **options):
        return module.apply(params, x, mask=mask, mutable=["intermediates"], **options)

    with pytest.warns(UserWarning, match="sow_weights=True computes the attention weights by the reference") as warned:
        out, sown = run(flax_module(attention_fn), sow_weights=True)
    assert len(warned) == 1
    np.testing.assert_array_equal(out, run(flax_module(attention_fn))[0])
    _, theirs = run(nn.MultiHeadDotProductAttention(num_heads=4), sow_weights=True)
    jax.tree.map(functools.partial(np.testing.assert_allclose, atol=1e-6), sown, theirs)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"einsum_dot_general": jax.lax.dot_general}, "`einsum_dot_general` is not supported; got function"),
        ({"qk_attn_weights_einsum": jnp.einsum}, "`qk_attn_weights_einsum` is not supported"),
        ({"attn_weights_value_einsum": jnp.einsum}, "`attn_weights_value_einsum` is not supported"),
    ],
)
def test_what_cannot_be_served_is_refused(arguments, text):
    q = jnp.asarray(normal(1, 2, 5, 3, 8))
    with pytest.raises(NotImplementedError, match=text):
        attention_fn(q, q, q, **arguments)


def test_a_window_cannot_be_placed_in_the_cache_that_flax_decodes_from():
    x, params = flaxs_parameters()
    decoding = flax_module(functools.partial(attention_fn, causal=True, window=(3, 0)), decode=True)
    cache = decoding.init(jax.random.key(0), x)["cache"]
    with pytest.raises(NotImplementedError, match="`window` with a `mask` and 1 queries for 13 keys.*SelfAttention"):
        decoding.apply(params | {"cache": cache}, x[:, :1], mutable=["cache"])


@pytest.mark.multi_device
@pytest.mark.parametrize("strategy", ["ring", "heads"])
def test_tokens_that_devices_share(strategy):
    """Inside shard_map, and on a mesh with explicit axes: as on one device, rotary positions included."""
    options = {"num_heads": 4, "sinks": True, "window": (9, 0), "implementation": "xla"}
    layer = SelfAttention(**options)
    shared = SelfAttention(**options, context_axis="seq", context_strategy=strategy)
    x = jax.random.normal(jax.random.key(0), (2, 32, 16))
    params = nn.unbox(layer.init(jax.random.key(1), x))

    def loss(layer, params, x):
        return (layer.apply(params, x) ** 2).sum()

    expected = jax.grad(loss, (1, 2))(layer, params, x)
    tokens = P(None, "seq")
    mesh = jax.make_mesh((4,), ("seq",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])

    def part(params, x):
        return jax.shard_map(shared.apply, mesh=mesh, in_specs=(P(), tokens), out_specs=tokens)(params, x)

    found = jax.jit(jax.grad(lambda params, x: jnp.square(part(params, x)).sum(), (0, 1)))(params, x)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=2e-4, atol=2e-4), found, expected)
    mesh = jax.make_mesh((4,), ("seq",), axis_types=(AxisType.Explicit,), devices=jax.devices()[:4])
    with jax.set_mesh(mesh):
        placed = jax.device_put(x, NamedSharding(mesh, tokens))
        found = jax.jit(jax.grad(functools.partial(loss, shared), (0, 1)))(params, placed)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=2e-4, atol=2e-4), found, expected)


def test_devices_share_no_cache():
    layer = SelfAttention(num_heads=2, decode=True, context_axis="seq")
    with pytest.raises(NotImplementedError, match="`context_axis` while decoding is not supported"):
        layer.init(jax.random.key(0), jnp.ones((1, 4, 8)))
