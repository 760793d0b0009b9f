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


@pytest.mark.parametrize("name", ["q_offset", "q_lengths", "kv_lengths", "prefix_lengths"])
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


@pytest.mark.parametrize(
    "bias, got",
    [
        (np.ones((5, 7), np.int32), "int32."),
        (np.ones((5, 7), bool), "bool. Pass a mask of True and False as `mask`."),
        (np.ones((5, 7), np.complex64), "complex64."),
        ([[0.0]], "list."),
        (0.5, "float."),
    ],
    ids=["int32", "bool", "complex64", "list", "float"],
)
def test_bias_kinds(bias, got):
    expected = f"`bias` must be a bfloat16, float16 or float32 array, added to the scores; got {got}"
    assert raised(TypeError, bias=bias) == expected


def test_bias_of_64_bits():
    """Where 64 bits are enabled: otherwise NumPy's float64 is float32 to JAX, as everywhere."""
    expected = "`bias` may be float64 only where `query` is; got bias float64 and query float32."
    with jax.enable_x64(True):
        assert raised(TypeError, bias=np.ones((5, 7))) == expected


@pytest.mark.parametrize("shape", [(5, 6), (2, 5, 7), (2, 2, 5, 7), (1, 2, 4, 5, 7), (7, 5), (4, 1, 5)], ids=str)
@pytest.mark.parametrize("name, dtype", [("bias", np.float32), ("mask", bool)])
def test_bias_and_mask_shapes(name, dtype, shape):
    assert raised(ValueError, **{name: np.ones(shape, dtype)}) == (
        f"`{name}` must be broadcastable to [..., H, T, S], here (2, 4, 5, 7): each dim of that size, 1, or absent on "
        f"the left; got shape {shape}."
    )


@pytest.mark.parametrize(
    "mask, got",
    [
        (np.ones((5, 7), np.int32), "int32"),
        (np.ones((5, 7), np.float32), "float32"),
        (np.ones((5, 7), np.uint8), "uint8"),
        ([[True]], "list"),
        (True, "bool"),
    ],
    ids=["int32", "float32", "uint8", "list", "True"],
)
def test_mask_kinds(mask, got):
    """Case D12: never converted."""
    assert raised(TypeError, mask=mask) == (
        f"`mask` must be bool (True = attend); got {got}. Pass additive scores as `bias`."
    )


@pytest.mark.parametrize("name, length", [("q_positions", 5), ("kv_positions", 7), ("q_segment_ids", 5)])
def test_numbers_by_slot(name, length):
    both = {"kv_segment_ids": np.zeros(7, np.int32)} if name == "q_segment_ids" else {}
    for value, got in (
        (np.ones(length, np.float32), "float32"),
        (np.ones(length, bool), "bool"),
        ([1] * length, "list"),
    ):
        expected = f"`{name}` must be an integer array; got {got}."
        assert raised(TypeError, **{name: value}, **both) == expected
    for shape in ((length + 1,), (1,), (), (3, length), (1, 1, length)):
        assert raised(ValueError, **{name: np.zeros(shape, np.int32)}, **both) == (
            f"`{name}` must have shape (2, {length}), batch dims may be 1 or absent; got {shape}."
        )


def test_ids_that_32_bits_do_not_hold():
    ids = {"q_segment_ids": np.arange(5) + 2**31, "kv_segment_ids": np.zeros(7, np.int32)}
    assert raised(ValueError, **ids) == f"`q_segment_ids` must fit int32; got values from {2**31} to {2**31 + 4}."


def test_positions_and_an_offset():
    text = raised(ValueError, q_positions=np.zeros(5, np.int32), q_offset=0)
    assert text == "`q_positions` takes the place of `q_offset`; give one of the two."


def test_prefix_without_causal():
    expected = "`prefix_lengths` lets queries attend a prefix in spite of `causal`; it needs causal=True."
    assert raised(ValueError, prefix_lengths=3) == expected
    assert raised(ValueError, prefix_lengths=np.array([3, 0])) == expected


def test_segment_ids_that_do_not_go_together():
    """Case D07: one array of ids cannot serve two lengths."""
    q_ids, kv_ids = np.zeros(5, np.int32), np.zeros(7, np.int32)
    assert raised(ValueError, segment_ids=q_ids) == (
        "`segment_ids` serves queries and keys alike, so their lengths must be equal; got T = 5 and S = 7. Give "
        "`q_segment_ids` and `kv_segment_ids`."
    )
    expected = "`q_segment_ids` and `kv_segment_ids` must come together; got no `{}`."
    assert raised(ValueError, q_segment_ids=q_ids) == expected.format("kv_segment_ids")
    assert raised(ValueError, kv_segment_ids=kv_ids) == expected.format("q_segment_ids")
    for more in ({"q_segment_ids": q_ids}, {"q_segment_ids": q_ids, "kv_segment_ids": q_ids}):
        text = raised(ValueError, key=(2, 5, 2, 16), segment_ids=q_ids, **more)
        assert text == "Give either `segment_ids` or the pair `q_segment_ids` and `kv_segment_ids`, not both."


@pytest.mark.parametrize("name", ["alibi_slopes", "sinks"])
def test_numbers_by_head(name):
    for value, got in ((np.ones(4, np.int32), "int32"), ([0.5] * 4, "list"), (0.5, "float")):
        assert raised(TypeError, **{name: value}) == f"`{name}` must be a floating-point array; got {got}."
    for shape in ((2,), (1,), (), (3, 4), (1, 1, 4), (2, 1)):
        assert raised(ValueError, **{name: np.ones(shape, np.float32)}) == (
            f"`{name}` must have one number for each of the 4 heads of `query`; got shape {shape}."
        )


@pytest.mark.parametrize("value", [0, -1.5, float("inf"), float("nan")])
def test_softcap_values(value):
    expected = f"`softcap` must lie between 1e-30 and 1e30; got {value}. Use None for no cap."
    assert raised(ValueError, softcap=value) == expected


@pytest.mark.parametrize(
    "value", ["30", True, np.ones(1, np.float32), jnp.float32(30)], ids=["str", "True", "[1]", "jax"]
)
def test_softcap_kinds(value):
    expected = f"`softcap` must be a positive Python number or None; got {type(value).__name__}."
    assert raised(TypeError, softcap=value) == expected


@pytest.mark.parametrize("value", [0, -4])
def test_chunk_size_values(value):
    assert raised(ValueError, chunk_size=value) == f"`chunk_size` must be a positive int or None; got {value}."


@pytest.mark.parametrize("value", [2.0, True, "8", jnp.int32(8)], ids=["2.0", "True", "str", "jax"])
def test_chunk_size_kinds(value):
    expected = f"`chunk_size` must be a positive int or None; got {type(value).__name__}."
    assert raised(TypeError, chunk_size=value) == expected


def test_dropout_rate():
    for value in (-0.1, 1, 1.0, 7, float("nan")):
        expected = f"`dropout_rate` must be at least 0 and less than 1; got {value}."
        assert raised(ValueError, dropout_rate=value, dropout_key=jax.random.key(0)) == expected
    for value in ("0.1", True, jnp.float32(0.1), None):
        expected = f"`dropout_rate` must be a Python number; got {type(value).__name__}."
        assert raised(TypeError, dropout_rate=value) == expected


def test_dropout_without_a_key():
    assert raised(ValueError, dropout_rate=0.1) == (
        "`dropout_rate` 0.1 needs a `dropout_key`, such as `jax.random.key(0)`."
    )


@pytest.mark.parametrize("rate", [0.0, 0.5])
def test_dropout_keys_that_are_none(rate):
    """A key of the wrong kind is told from the start, also where the rate is 0."""
    wrong = {
        "int": 3,
        "float32 (2,)": np.ones(2, np.float32),
        "key<fry> (2,)": jax.random.split(jax.random.key(0)),
        "uint32 (2, 2)": np.zeros((2, 2), np.uint32),
    }
    for got, key in wrong.items():
        expected = f"`dropout_key` must be one JAX key, such as `jax.random.key(0)`; got {got}."
        assert raised(TypeError, dropout_rate=rate, dropout_key=key) == expected


def test_unknown_keyword_is_pythons_own_error():
    """What another library takes is refused by name, never ignored."""
    for name in ("sm_scale", "dropout", "q_start"):
        assert f"unexpected keyword argument '{name}'" in raised(TypeError, **{name: None})


def test_everything_after_mask_is_keyword_only():
    """Case H18: an old positional call fails at once, wherever its arguments would have landed."""
    arrays = [np.zeros(shape, np.float32) for shape in (Q, K, K)]
    with pytest.raises(TypeError, match="positional argument"):
        flash_jax.flash_attention(*arrays, None, None, None)
    with pytest.raises(TypeError, match="positional argument"):
        flash_jax.flash_attention(*arrays, np.ones((5, 7), bool), 1.0, True, 64, 64)
    with pytest.raises(TypeError, match="`bias` must be a bfloat16, float16 or float32 array"):
        flash_jax.flash_attention(*arrays, 1.0)


@pytest.mark.parametrize(
    "options",
    [{"window": (-1, 0)}, {"q_offset": 1.5}, {"implementation": "fast"}, {"dropout_rate": 0.1}, {"softcap": -1}],
    ids=str,
)
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
    wrong = ("implementation", "precision", "bias", "mask", "sinks", "kv_positions", "softcap", "dropout_key")
    for options in ({"window": 3}, {"q_lengths": 0.5}, {"scale": "x"}, *({name: "x"} for name in wrong)):
        text = raised((TypeError, ValueError), **options)
        assert f"`{next(iter(options))}`" in text and "spec" not in text and "operand" not in text
