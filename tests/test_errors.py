"""Every error that an argument can cause: its class, its text, and that tracing alone shows it (R18, R19)."""

import functools
import re

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest

import flash_jax

Q, K = (2, 5, 4, 16), (2, 7, 2, 16)


def raised(kind, query=Q, key=K, value=None, **options):
    """The text of the error of class `kind` that a call with these shapes raises when it is only traced."""
    array = lambda x: x if not isinstance(x, tuple) else jax.ShapeDtypeStruct(x, jnp.float32)  # noqa: E731
    arrays = [array(x) for x in (query, key, key if value is None else value)]
    with pytest.raises(kind) as error:
        jax.eval_shape(functools.partial(flash_jax.flash_attention, **options), *arrays)
    return str(error.value)


def test_symbolic_shapes_are_refused():
    (batch,) = jax.export.symbolic_shape("batch")
    assert raised(NotImplementedError, query=(batch, *Q[1:]), key=(batch, *K[1:])) == (
        "`query` has the symbolic shape (batch, 5, 4, 16); flash_attention needs sizes that are known when it is "
        "traced. Export a program for each shape that you serve."
    )


@pytest.mark.parametrize("missing", range(3), ids=["query", "key", "value"])
def test_lists_are_not_arrays(missing):
    arrays = [np.zeros(shape, np.float32) for shape in (Q, K, K)]
    arrays[missing] = arrays[missing].tolist()
    name = ("query", "key", "value")[missing]
    with pytest.raises(TypeError, match=f"`{name}` must be a JAX or NumPy array; got list"):
        flash_jax.flash_attention(*arrays)


@pytest.mark.parametrize("shape", [(5, 16), (16,), ()], ids=str)
def test_too_few_dims(shape):
    assert f"`query` must have shape [..., length, heads, head_dim]; got {shape}" in raised(ValueError, query=shape)


@pytest.mark.parametrize(
    "shapes",
    [
        {"query": (3, 5, 4, 16)},
        {"query": (2, 5, 4, 8)},
        {"value": (2, 8, 2, 16)},
        {"value": (2, 7, 4, 16)},
        {"query": (5, 4, 16)},
        {"key": (1, 7, 2, 16)},
    ],
    ids=["batch", "head dim", "key length", "kv heads", "rank", "batch of one"],
)
def test_shapes_that_do_not_fit_name_all_three(shapes):
    text = raised(ValueError, **shapes)
    query, key = shapes.get("query", Q), shapes.get("key", K)
    assert "must agree in batch dims, S, K and D" in text
    assert f"got query {query}, key {key}, value {shapes.get('value', key)}" in text
    assert "swap" not in text


@pytest.mark.parametrize("heads", [(2, 3), (8, 3), (3, 2), (2, 4)], ids=str)
def test_heads_that_are_no_multiple(heads):
    """Case C03: both counts are named."""
    text = raised(ValueError, query=(2, 5, heads[0], 16), key=(2, 7, heads[1], 16))
    assert f"The {heads[0]} heads of `query` must be a multiple of the {heads[1]} heads of `key` and `value`" in text


def test_swapped_layout_is_recognised():
    """Case I02: [batch, heads, length, dim] where it shows, as the two lengths differ or the heads do not divide."""
    text = raised(ValueError, query=(1, 24, 40, 16), key=(1, 24, 52, 16))
    assert (
        "They would agree as [..., heads, length, head_dim]: swap the two dims with `jnp.swapaxes(x, -3, -2)`" in text
    )


def test_head_dim_zero():
    assert "Each head dim must be at least 1" in raised(ValueError, query=(2, 5, 4, 0), key=(2, 7, 2, 0))


@pytest.mark.parametrize("window", [(-1, 3), (3, -1), (1,), (1, 2, 3), 5, "ab"], ids=repr)
def test_window_values(window):
    expected = f"`window` must be a pair of non-negative ints or None; got {window!r}. Use None for an unbounded side."
    assert raised(ValueError, window=window) == expected


@pytest.mark.parametrize(
    "window", [(1.5, 2), (True, 2), (np.float32(1), 0), (jnp.int32(3), 0)], ids=["1.5", "True", "f32", "array"]
)
def test_window_kinds(window):
    assert "`window` must be a pair of non-negative ints or None" in raised(TypeError, window=window)


@pytest.mark.parametrize("flag", ["causal", "return_lse"])
@pytest.mark.parametrize("value", [1, "yes", None, np.zeros(2)], ids=["1", "yes", "None", "array"])
def test_flags(flag, value):
    assert raised(TypeError, **{flag: value}) == f"`{flag}` must be True or False; got {type(value).__name__}."


@pytest.mark.parametrize("name", ["q_offset", "q_lengths", "kv_lengths"])
def test_numbers_by_example(name):
    assert f"`{name}` must be an int or an integer array; got float" in raised(TypeError, **{name: 1.5})
    assert f"`{name}` must be an int or an integer array; got float32" in raised(
        TypeError, **{name: np.ones(2, np.float32)}
    )
    assert f"`{name}` must be an int or an integer array; got bool" in raised(TypeError, **{name: True})
    assert f"`{name}` must be an int or an integer array; got list" in raised(TypeError, **{name: [1, 2]})
    for shape in ((3,), (2, 1), (2, 2)):
        text = raised(ValueError, **{name: np.zeros(shape, np.int32)})
        assert f"`{name}` must be broadcastable to the batch shape (2,); got shape {shape}" in text


@pytest.mark.parametrize(
    "scale, kind, text",
    [
        ("1", TypeError, "`scale` must be a real number or a floating-point scalar; got str."),
        (True, TypeError, "`scale` must be a real number or a floating-point scalar; got bool."),
        (1j, TypeError, "`scale` must be a real number or a floating-point scalar; got complex."),
        (float("nan"), ValueError, "`scale` must be finite; got nan."),
        (np.ones(2, np.float32), ValueError, "`scale` must be a number or a scalar array; got shape (2,)."),
        (jnp.ones((2,)), ValueError, "`scale` must be a number or a scalar array; got shape (2,)."),
        (jnp.int32(2), TypeError, "`scale` must be a real number or a floating-point scalar; got dtype int32."),
    ],
    ids=["str", "bool", "complex", "nan", "numpy [2]", "jax [2]", "jax int"],
)
def test_scale(scale, kind, text):
    assert raised(kind, scale=scale) == text


def test_block_sizes_of_another_kind():
    assert raised(TypeError, block_sizes=(16, 16)) == "`block_sizes` must be a flash_jax.BlockSizes or None; got tuple."


def test_unknown_keyword_is_pythons_own_error():
    """What a later version will take is refused by name, never ignored."""
    for name in ("mask", "bias", "segment_ids", "dropout_rate", "sm_scale"):
        assert f"unexpected keyword argument '{name}'" in raised(TypeError, **{name: None})


def test_everything_after_value_is_keyword_only():
    """Case H18: an old positional call fails at once, wherever its arguments would have landed."""
    arrays = [np.zeros(shape, np.float32) for shape in (Q, K, K)]
    with pytest.raises(TypeError, match="positional argument"):
        flash_jax.flash_attention(*arrays, None)
    with pytest.raises(TypeError, match="positional argument"):
        flash_jax.flash_attention(*arrays, 1.0, True, 64, 64)


@pytest.mark.parametrize("options", [{"window": (-1, 0)}, {"q_offset": 1.5}, {"implementation": "fast"}], ids=str)
def test_raised_alike_under_every_transformation(options):
    arrays = [np.zeros(shape, np.float32) for shape in (Q, K, K)]
    call = functools.partial(flash_jax.flash_attention, **options)
    summed = lambda *x: call(*x).sum()  # noqa: E731
    texts = set()
    for function in (call, jax.jit(call), jax.grad(summed), jax.vmap(call), lambda *x: jax.jvp(call, x, x)):
        with pytest.raises((TypeError, ValueError)) as error:
            function(*arrays)
        texts.add(re.sub(r"\(5, 4, 16\)", "(2, 5, 4, 16)", str(error.value)))
    assert len(texts) == 1


def test_no_error_speaks_of_the_inside():
    """Texts name the user's arguments, not ours."""
    for options in ({"window": 3}, {"q_lengths": 0.5}, {"scale": "x"}, {"implementation": "x"}, {"precision": "x"}):
        text = raised((TypeError, ValueError), **options)
        assert f"`{next(iter(options))}`" in text and "spec" not in text and "operand" not in text
