"""`dot_product_attention` is `jax.nn`'s: the same signature, the same results where those are defined."""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import flash_jax
from flash_jax import dot_product_attention
from tests.support.accuracy import assert_accurate
from tests.support.cases import case, poisoned
from tests.support.oracle import reference_attention
from tests.support.plain import plain_attention

JAXS = jax.nn.dot_product_attention
SMALL = "B2-T9-S12-H4-K2-D8-f32"


def test_the_signature_is_jaxs():
    ours, jaxs = (inspect.signature(f).parameters for f in (dot_product_attention, JAXS))
    assert [(p.name, p.kind, p.default) for p in ours.values()] == [(p.name, p.kind, p.default) for p in jaxs.values()]


def under_jaxs_names(attend):
    """`attend`, which is called as `flash_attention` is, called as `jax.nn.dot_product_attention` is."""

    def attention(q, k, v, bias, mask, *, is_causal=False, local_window_size=None, return_residual=False, **more):
        names = {"query_seq_lengths": "q_lengths", "key_value_seq_lengths": "kv_lengths", "scale": "scale"}
        options = {names[name]: value for name, value in more.items()}
        if local_window_size is not None:
            options["window"] = tuple(np.broadcast_to(local_window_size, 2).tolist())
        out, lse = attend(q, k, v, bias, mask, causal=is_causal, q_offset=0, return_lse=True, **options)
        return out, jnp.swapaxes(lse, -1, -2)

    return attention


def hold_to_jaxs(name, bias=None, mask=None, **options):
    """Holds ours and jax.nn's to one oracle, forward and gradients: so they are the same function of live rows."""
    c = case(name)
    q, k, v = c.arrays()
    out, lse = jax.jit(functools.partial(dot_product_attention, mask=mask, return_residual=True, **options))(
        q, k, v, bias
    )
    live = np.isfinite(lse)
    dout = np.where(live[..., None], c.cotangents()[0], 0).astype(c.dtype)

    def run(attention, q, k, v, bias, dout):
        function = functools.partial(attention, mask=mask, return_residual=True, **options)
        (out, lse), pull = jax.vjp(lambda q, k, v, bias: function(q, k, v, bias), q, k, v, bias)
        return out, lse, pull((dout, jnp.zeros_like(lse)))

    given = (q, k, v, bias, dout)
    attentions = dot_product_attention, JAXS, under_jaxs_names(plain_attention)
    ours, theirs, plain = (jax.jit(functools.partial(run, attention))(*given) for attention in attentions)
    with jax.enable_x64(True):
        wide = (None if x is None else np.asarray(x, np.float64) for x in given)
        oracle = jax.jit(functools.partial(run, under_jaxs_names(reference_attention)))(*wide)
    ours, theirs, plain, oracle = jax.tree.map(np.asarray, (ours, theirs, plain, oracle))

    assert live.any()
    assert_accurate(ours[0], oracle[0], plain[0])
    assert_accurate(ours[1], oracle[1], plain[1])
    assert_accurate(theirs[0][live], oracle[0][live], plain[0][live], derivative=True)
    assert_accurate(theirs[1][live], oracle[1][live], oracle[1][live].astype(c.dtype), derivative=True)
    for x, y, r, p in zip(*map(jax.tree.leaves, (ours[2], theirs[2], oracle[2], plain[2])), strict=True):
        assert_accurate(x, r, p, derivative=True)
        assert_accurate(y, r, p, derivative=True)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        (SMALL, {"local_window_size": 2, "scale": 0.3}),
        (SMALL, {"local_window_size": (1, 3), "is_causal": True}),
        ("B2-T12-S9-D8-f32", {"local_window_size": (2, 4), "is_causal": True}),
        (
            SMALL,
            {
                "query_seq_lengths": np.array([3, 9], np.int32),
                "key_value_seq_lengths": np.array([12, 5], np.int32),
                "is_causal": True,
            },
        ),
    ],
    ids=["window-scale", "window-causal", "more-queries", "lengths-causal"],
)
def test_results_are_jaxs(name, options):
    hold_to_jaxs(name, **options)


@pytest.mark.thorough
@pytest.mark.parametrize("shape", [(2, 4, 1, 12), (2, 1, 9, 1), (9, 12)], ids=str)
def test_bias_and_mask_broadcast_as_jaxs(shape):
    c = case(SMALL)
    bias = c.normal(shape, 0, "bias")
    mask = c.normal(shape[-2:], 0, "mask") < 0.8
    hold_to_jaxs(SMALL, bias=bias, mask=mask)


JAXS_MODES = {
    "bias": ["bias"],
    "causal": ["causal"],
    "padding": ["padding"],
    "custom": ["custom"],
    "causal-padding": ["causal", "padding"],
    "custom-padding": ["custom", "padding"],
    "bias-causal": ["bias", "causal"],
    "causal-window": ["causal", "window"],
}


@pytest.mark.thorough
@pytest.mark.parametrize("mode", JAXS_MODES)
def test_jaxs_own_cases(mode):
    """The ways of masking that JAX's tests try, at their size, with their tolerances."""
    modes, c, options = JAXS_MODES[mode], case("B2-T128-H4-D32-bf16"), {"is_causal": "causal" in JAXS_MODES[mode]}
    bias = c.normal((1, 4, 128, 128), 0, "bias") if "bias" in modes else None
    mask = np.tri(128, dtype=bool)[None, None] if "custom" in modes else None
    if "window" in modes:
        options["local_window_size"] = (3, 2)
    lengths = (np.array([64, 32], np.int32), np.array([32, 64], np.int32)) if "padding" in modes else (None, None)

    @functools.partial(jax.jit, static_argnums=0)
    def run(attention, *primals):
        def call(*primals):
            *arrays, of_queries, of_keys = primals
            lengths = {"query_seq_lengths": of_queries, "key_value_seq_lengths": of_keys}
            return attention(*arrays, **lengths, **options)

        out, pull = jax.vjp(call, *primals)
        return out, pull(c.cotangents()[0])[:4]  # what is no float has a cotangent too, of no numbers

    with jax.numpy_dtype_promotion("standard"):
        ours, theirs = (run(f, *c.arrays(), bias, mask, *lengths) for f in (dot_product_attention, JAXS))
    dead = np.zeros((2, 128, 1, 1), bool)
    if "padding" in modes:
        dead = np.arange(128)[:, None, None] >= lengths[0][:, None, None, None]
    jax.tree.map(functools.partial(assert_close_in_jaxs_way, tolerance=0.02), ours[1], theirs[1])
    assert_close_in_jaxs_way(ours[0], np.where(dead, 0, theirs[0].astype(np.float32)), tolerance=0.01)


def assert_close_in_jaxs_way(x, y, tolerance):
    assert x.shape == y.shape
    np.testing.assert_allclose(np.asarray(x, np.float32), np.asarray(y, np.float32), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("kv_heads", [2, 1])
def test_vmap_over_unbatched_calls(kv_heads):
    """As JAX's tests do it, with a bias or mask that is not mapped."""
    c = case(f"B2-T16-H4-K{kv_heads}-D8-f32")
    bias, mask = c.normal((1, 16, 16), 0, "bias"), np.tri(16, k=2, dtype=bool)[None, None]

    @functools.partial(jax.jit, static_argnums=0)
    def run(attention, q, k, v):
        out, pull = jax.vjp(lambda q, k, v, bias: attention(q, k, v, bias, mask), q, k, v, bias)
        return out, pull(c.cotangents()[0])

    mapped = jax.vmap(dot_product_attention, in_axes=(0, 0, 0, None, None))
    ours, theirs = (run(f, *c.arrays()) for f in (mapped, JAXS))
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-4), ours, theirs)


@pytest.mark.thorough
@pytest.mark.parametrize("rank", [2, 3, 4])
def test_fewer_dims(rank):
    q, k, v = (x[(0,) * (4 - rank)] for x in case("B2-T5-S7-H4-K2-D8-f32").arrays())
    out, residual = dot_product_attention(q, k, v, is_causal=True, return_residual=True)
    theirs, theirs_residual = JAXS(q, k, v, is_causal=True, return_residual=True)
    assert (out.shape, residual.shape) == (theirs.shape, theirs_residual.shape) == (q.shape, q.shape[:-1])
    np.testing.assert_allclose(out, theirs, atol=1e-5)
    np.testing.assert_allclose(residual, theirs_residual, atol=1e-5)


@pytest.mark.parametrize("window", [(-2, 4), (4, -2), (2, -3), (-3, 2)], ids=str)
@pytest.mark.parametrize("is_causal", [False, True])
def test_windows_that_leave_the_query_out(window, is_causal):
    """JAX lets an end be negative. Where that leaves a row nothing, the row is dead."""
    q, k, v = case(SMALL).arrays()
    call = functools.partial(dot_product_attention, is_causal=is_causal, return_residual=True)
    out, lse = call(q, k, v, local_window_size=window)
    mask = np.tri(9, 12, min(window[1], 0 if is_causal else 12)) - np.tri(9, 12, -window[0] - 1) > 0
    expected, expected_lse = dot_product_attention(q, k, v, mask=mask[None, None], return_residual=True)
    np.testing.assert_allclose(out, expected, atol=1e-6)
    np.testing.assert_allclose(lse, expected_lse, atol=1e-6)


@pytest.mark.parametrize(
    "scale",
    [0.5, 2, True, np.float64(0.5), np.int32(2), jnp.float32(0.5), jnp.int32(2), jnp.full((1, 1), 0.5)],
    ids=lambda x: f"{type(x).__name__}{x}",
)
def test_scale_is_anything_that_is_one_number(scale):
    q, k, v = case("B1-T4-H1-D4-f32").arrays()
    with jax.numpy_dtype_promotion("standard"):
        theirs = JAXS(q, k, v, scale=scale)
    np.testing.assert_allclose(dot_product_attention(q, k, v, scale=scale), theirs, atol=1e-5)
    if isinstance(scale, jax.Array):
        np.testing.assert_allclose(jax.jit(dot_product_attention)(q, k, v, scale=scale), theirs, atol=1e-5)


def test_scale_is_differentiable():
    q, k, v = case("B1-T4-H1-D4-f32").arrays()
    ours, theirs = (jax.grad(lambda s, f=f: f(q, k, v, scale=s).sum())(0.7) for f in (dot_product_attention, JAXS))
    np.testing.assert_allclose(ours, theirs, rtol=1e-5)


def test_lists_numpy_arrays_and_biases_of_any_dtype_are_taken():
    q, k, v = (x.tolist() for x in case("B2-T4-H1-D4-f32").arrays())
    with jax.numpy_dtype_promotion("standard"):
        for bias in (np.arange(4), np.arange(4) > 1, np.arange(4.0), [0.0, 1.0, 2.0, 3.0]):
            options = {"bias": bias, "key_value_seq_lengths": [3, 2], "query_seq_lengths": np.array([4, 4])}
            np.testing.assert_allclose(dot_product_attention(q, k, v, **options), JAXS(q, k, v, **options), atol=1e-5)


def test_what_differs_is_documented():
    """Dead rows, the residual's dtype and gradient, a value head dim of its own; see docs/semantics.md."""
    q, k, v = case("B2-T4-D8-Dv6-bf16").arrays()
    lengths = np.array([0, 3], np.int32)
    poisoned_v = poisoned(v, (1, slice(3, None)))
    out, residual = dot_product_attention(q, k, poisoned_v, key_value_seq_lengths=lengths, return_residual=True)
    assert out.shape == (2, 4, 2, 6)
    assert residual.dtype == jnp.float32
    assert not np.any(out[0])
    assert (np.asarray(residual[0]) == -np.inf).all()
    assert np.isfinite(out).all()
    slope = jax.grad(lambda q: dot_product_attention(q, k, v, return_residual=True)[1].sum().astype(jnp.float32))(q)
    assert np.any(slope)


def test_a_program_runs_unchanged(monkeypatch):
    """With ours in jax.nn's place, a program that uses jax.nn, and Flax, which does so inside."""
    x = jnp.asarray(case("B2-T8-H1-D24-f32").arrays()[0][..., 0, :])
    layer = nnx.MultiHeadAttention(4, 24, decode=False, rngs=nnx.Rngs(0))

    def program(x):
        q = x.reshape(2, 8, 3, 8)
        y = jax.nn.dot_product_attention(q, q[..., :1, :], q[..., :1, :], is_causal=True, implementation="cudnn")
        return layer(y.reshape(x.shape), mask=nnx.make_causal_mask(x[..., 0])).sum()

    monkeypatch.setattr(jax.nn, "dot_product_attention", lambda *a, **k: JAXS(*a, **k | {"implementation": "xla"}))
    expected = jax.value_and_grad(program)(x)
    called = []

    def ours(*args, **kwargs):
        called.append(kwargs)
        return dot_product_attention(*args, **kwargs)

    monkeypatch.setattr(jax.nn, "dot_product_attention", ours)
    actual = jax.value_and_grad(program)(x)
    assert len(called) == 2
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), actual, expected)


@pytest.mark.parametrize(("implementation", "ours"), [(None, None), ("xla", "xla"), ("cudnn", None)])
def test_implementations_are_translated(monkeypatch, implementation, ours):
    named = []

    def record(*_, implementation, **__):
        named.append(implementation)
        return jnp.zeros((1, 2, 1, 4))

    monkeypatch.setattr("flash_jax.jax_nn.flash_attention", record)
    x = jnp.zeros((1, 2, 1, 4))
    dot_product_attention(x, x, x, implementation=implementation)
    assert named == [ours]


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"implementation": "triton"}, ValueError, "`implementation` must be None, 'xla' or 'cudnn'.*got 'triton'"),
        ({"query": jnp.zeros((1, 1, 3, 2, 4))}, ValueError, r"`query` must have at most four dims; got.*\(1, 1, 3, 2"),
        ({"key": jnp.zeros((2, 3, 2, 4))}, ValueError, "must agree in batch dims"),
        ({"key": jnp.zeros((1, 3, 3, 4)), "value": jnp.zeros((1, 3, 3, 4))}, ValueError, "must be a multiple of"),
        ({"key": jnp.zeros((1, 3, 2, 4), jnp.float16)}, TypeError, "must have the same dtype"),
        ({"mask": jnp.zeros((1, 1, 3, 3))}, TypeError, "`mask` must be bool"),
        ({"mask": jnp.zeros((3, 1, 3, 3), bool)}, ValueError, "`mask` must be broadcastable"),
        ({"bias": jnp.zeros((1, 3, 3, 3))}, ValueError, "`bias` must be broadcastable"),
        ({"query_seq_lengths": 3}, ValueError, r"`query_seq_lengths` must be integers of shape \(1,\); got int32 \(\)"),
        ({"key_value_seq_lengths": jnp.zeros(1)}, ValueError, r"`key_value_seq_lengths` must be .* got float32 \(1,\)"),
        ({"local_window_size": (1, 2, 3)}, ValueError, r"`local_window_size` must be an int, a pair"),
        ({"local_window_size": (1.0, 2)}, ValueError, r"`local_window_size` must be an int, a pair"),
        ({"scale": jnp.ones(2)}, ValueError, "`scale` must be a number or a scalar array"),
    ],
)
def test_what_is_wrong_is_said(arguments, error, text):
    x = jnp.zeros((1, 3, 2, 4))
    with pytest.raises(error, match=text):
        flash_jax.dot_product_attention(**{"query": x, "key": x, "value": x} | arguments)
