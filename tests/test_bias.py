"""`bias`: added to the scores after the scale, broadcast over any dims, differentiated in its own shape and dtype."""

import functools
import unittest.mock

import jax
import numpy as np
import pytest

import flash_jax
from flash_jax.triton import stored, tiling
from tests.support import gpu_compile
from tests.support.accuracy import assert_agrees, check
from tests.support.cases import FEWER_QUERIES, MORE_QUERIES, case, poisoned
from tests.support.programs import Program, everything, second_order, values_and_gradients
from tests.support.structure import lowered_sizes, named

pytestmark = pytest.mark.thorough

SLOPES = np.linspace(0.1, 0.5, 24, dtype=np.float32)


@pytest.mark.parametrize(
    "name, shape, options",
    [
        (FEWER_QUERIES, (2, 4, 19, 35), {"causal": True}),
        (FEWER_QUERIES, (2, 1, 19, 35), {"kv_lengths": np.array([35, 17])}),
        (MORE_QUERIES, (2, 4, 1, 19), {"causal": True}),
    ],
    ids=["B-H-T-S", "B-1-T-S", "B-H-1-S"],
)
def test_values_gradients_and_tangents(attend, name, shape, options):
    """Case D01, together with the file's next test."""
    c = case(name)
    program = everything(**options)
    _, (*_, operands), _ = check(program, attend, c.inputs(bias=shape), c.cotangents(), c.inputs(1, bias=shape))
    assert operands["bias"].shape == shape


def of_bias(attend, inputs, cotangents, bias):
    """The gradient of the bias alone: all that a learned relative position needs."""
    return {"bias": jax.vjp(lambda b: attend(*inputs, b, return_lse=True), bias)[1](cotangents)[0]}


@pytest.mark.parametrize("shape", [(1, 4, 19, 35), (1, 1, 19, 35), (1, 4, 19, 1), (4, 1, 1)], ids=str)
def test_gradient_has_the_shape_of_the_bias(attend, shape):
    c = case(FEWER_QUERIES)
    program = Program(of_bias, {"causal": True}, derivative=True)
    found = check(program, attend, c.arrays(), c.cotangents(), c.normal(shape, 0, "bias"))
    assert found["bias"].shape == shape


@pytest.mark.parametrize("dtype, dtype_of_bias", [("bf16", "f32"), ("f32", "bf16")])
def test_gradient_has_the_dtype_of_the_bias(attend, dtype, dtype_of_bias):
    """Case A04 is the first: a float32 bias beside bfloat16 inputs."""
    c = case(FEWER_QUERIES.replace("f32", dtype))
    bias = case(f"T1-{dtype_of_bias}").normal((4, 19, 35), 0, "bias")
    found = check(Program(of_bias, {"causal": True}, derivative=True), attend, c.arrays(), c.cotangents(), bias)
    assert found["bias"].dtype == bias.dtype


@pytest.mark.parametrize(
    "name, shape, options",
    [
        ("B1-T40-S50-H2-D8-f32", (1, 2, 40, 50), {"window": (5, 3)}),
        ("B2-T40-S50-H4-K2-D8-bf16", (2, 4, 40, 50), {"causal": True, "kv_lengths": np.array([50, 0])}),
        ("B2-T19-S35-H4-K2-D8-bf16", (4, 19, 35), {"window": (0, 9), "q_lengths": np.array([9, 19])}),
        ("B3-T19-S35-H4-K2-D8-f32", (1, 4, 19, 35), {"causal": True, "kv_lengths": np.array([20, 35, 3])}),
        ("B2x2-T19-S35-H2-D8-bf16", (1, 1, 2, 19, 35), {"dropout_rate": 0.3, "dropout_key": jax.random.key(3)}),
        ("B3-T32-S64-H2-D8-bf16", (2, 32, 64), {"softcap": 5.0, "chunk_size": 16, "scale": 0.4}),
    ],
    ids=["window", "causal", "two examples", "three examples", "dropout", "chunk"],
)
@pytest.mark.parametrize("dtype_of_bias", ["f32", "bf16"])
def test_gradient_stored_by_the_kernel_of_dq(attend, monkeypatch, name, shape, options, dtype_of_bias):
    """Of tiles that need a mask, need none, or are skipped; summed over examples or not."""
    monkeypatch.setattr(stored, "_ENOUGH", 1)
    c = case(name)
    given = (*c.arrays(), {"bias": case(f"T1-{dtype_of_bias}").normal(shape, 0, "bias")}), c.cotangents()
    _, (*_, operands) = check(values_and_gradients(**options), attend, *given)
    assert operands["bias"].dtype == given[0][3]["bias"].dtype


def test_gradient_stored_where_the_bias_kills_rows_and_padding_is_poison(attend, monkeypatch):
    monkeypatch.setattr(stored, "_ENOUGH", 1)
    c = case("B2-T19-S35-H2-D8-bf16")
    *arrays, riding = c.inputs(bias=(1, 2, 19, 35))
    bias = riding["bias"].copy()
    bias[0, 0, 3], bias[0, :, 5, 10:] = -np.inf, -np.inf
    program = values_and_gradients(kv_lengths=np.array([20, 35]), q_lengths=np.array([19, 7]))
    q, k, v = (
        poisoned(x, where) for x, where in zip(arrays, (np.s_[1, 7:], np.s_[0, 20:], np.s_[0, 20:]), strict=True)
    )
    poison = (q, k, v, {"bias": bias}), c.cotangents()
    found = jax.jit(functools.partial(program, attend))(*poison)
    assert_agrees(found, program, (*arrays, {"bias": bias}), c.cotangents())
    dbias = np.asarray(found[1][3]["bias"])
    assert not np.any(dbias[0, 0, 3]) and not np.any(dbias[0, :, 5, 10:]) and np.any(dbias[0, :, 4, 25:])


@pytest.mark.parametrize(
    "name, options",
    [
        ("B2-T40-S50-H4-K2-D8-bf16", {"window": (5, 3)}),
        ("B2-T64-S32-H2-D16-bf16", {}),
        ("B6-T19-S35-H4-K2-D8-f16", {"causal": True, "softcap": 5.0, "alibi_slopes": SLOPES.reshape(6, 4)}),
        (
            "B2x2-T33-S20-H2-D16-Dv8-bf16",
            {"causal": True, "prefix_lengths": 7, "sinks": SLOPES[:2], "alibi_slopes": SLOPES[:4].reshape(1, 2, 2)},
        ),
        ("B2-T19-S35-H2-D8-bf16", {"dropout_rate": 0.3, "dropout_key": jax.random.key(3), "kv_lengths": 30}),
    ],
    ids=["window", "full", "alibi by example", "two batch dims", "dropout"],
)
def test_two_examples_that_share_a_bias_are_in_one_program(monkeypatch, name, options):
    """Each with its own keys and numbers, of one sum; more than two are added in turns."""
    monkeypatch.setattr(stored, "_ENOUGH", 1)
    monkeypatch.setitem(tiling._TABLE, ("paired", 64, 2), tiling.Tile(16, 16, 4, 2))
    passes = unittest.mock.Mock(side_effect=stored.query_pass)
    monkeypatch.setattr(stored, "query_pass", passes)
    c, sizes = case(name), flash_jax.BlockSizes(16, 16, dq=flash_jax.BlockSizes())
    attend = functools.partial(flash_jax.flash_attention, implementation="triton", block_sizes=sizes)
    with flash_jax.interpret_mode():
        inputs = c.inputs(bias=(c.H, c.T, c.S))
        check(values_and_gradients(**options), attend, inputs, c.cotangents())
    assert passes.call_args_list and all(
        call.args[2] == (2,) and call.kwargs["together"] for call in passes.call_args_list
    )


@pytest.mark.parametrize(
    ("options", "trained", "launches"),
    [
        ({"kv_lengths": 30, "q_lengths": np.array([17])}, {}, 1),
        ({"kv_lengths": np.array([20, 35])}, {}, 2),
        ({}, {"alibi_slopes": (4,)}, 2),
    ],
    ids=["the same lengths", "other tiles", "sums over rows"],
)
def test_examples_that_cannot_share_programs_have_their_own(monkeypatch, options, trained, launches):
    monkeypatch.setattr(stored, "_ENOUGH", 1)
    x, bias = (jax.ShapeDtypeStruct(shape, "bfloat16") for shape in ((2, 64, 4, 64), (4, 64, 64)))
    trained = {name: jax.ShapeDtypeStruct(shape, "float32") for name, shape in trained.items()}

    def loss(x, bias, trained):
        out = flash_jax.flash_attention(x, x, x, bias, **options, **trained, implementation="triton")
        return out.astype(np.float32).sum()

    text = gpu_compile.lower(jax.grad(loss, (0, 1, 2)), x, bias, trained).as_text()
    assert text.count('name = "flash_attention_dq_kernel"') == launches


def test_a_shared_gradient_of_a_bias_that_examples_do_not_share(monkeypatch):
    """A tangent that vmap does not map, of a bias that it maps: the transposed program adds up over other biases."""
    monkeypatch.setattr(stored, "_ENOUGH", 1)
    c = case("B2-T32-S32-H2-D16-bf16")
    q, k, v = c.arrays()
    bias, moved, dout = c.normal((2, 2, 32, 32), 0, "bias"), c.normal((2, 32, 32), 1, "moved"), c.cotangents()[0]

    def gradients(implementation):
        attend = functools.partial(flash_jax.flash_attention, implementation=implementation)

        def tangent(dq, db):
            def one(q, k, v, b, dq):
                return jax.jvp(lambda q, b: attend(q, k, v, b), (q, b), (dq, db))[1]

            return jax.vmap(one)(q, k, v, bias, dq)

        return jax.linear_transpose(tangent, q, moved)(dout)

    with flash_jax.interpret_mode():
        for x, expected in zip(gradients("triton"), gradients("xla"), strict=True):
            x, expected = (np.asarray(y, np.float32) for y in (x, expected))  # noqa: PLW2901
            assert np.abs(x - expected).max() <= 0.02 * np.abs(expected).max()


def test_with_64_bit_types(attend, monkeypatch):
    monkeypatch.setattr(stored, "_ENOUGH", 1)
    c = case("B3-T19-S35-H2-D8-bf16")
    with jax.enable_x64(True):
        check(values_and_gradients(causal=True), attend, c.inputs(bias=(1, 2, 19, 35)), c.cotangents())


def test_gradient_shared_by_examples_is_written_by_the_kernel_of_dq_if_there_are_enough_programs():
    """Two launches for four examples, without and with an earlier sum, and one for two; of few programs there is one
    launch of each kernel."""
    kernels = {}
    for B, T in ((2, 128), (2, 4096), (4, 4096)):
        x, bias = (jax.ShapeDtypeStruct(shape, "bfloat16") for shape in ((B, T, 4, 64), (4, T, T)))

        def loss(x, bias):
            return flash_jax.flash_attention(x, x, x, bias, implementation="triton").astype(np.float32).sum()

        lowered = gpu_compile.lower(jax.grad(loss, (0, 1)), x, bias)
        kernels[B, T] = (
            lowered.as_text().count("flash_attention_dq_kernel"),
            "dbias_kernel" in str(gpu_compile.triton_ir(lowered).keys()),
        )
    few, two, four = kernels.values()
    assert few[1] and not two[1] and not four[1] and four[0] > two[0] == few[0]


def test_minus_infinity_hides(attend):
    """Not attended, as with a mask: rows that are -inf throughout are dead, and -inf has no gradient."""
    c = case(FEWER_QUERIES)
    *inputs, riding = c.inputs(bias=(2, 1, 19, 35))
    hidden = c.normal((2, 1, 19, 35), 1, "hidden").astype(np.float32) > 0.5
    hidden[0, 0, 3] = hidden[1, 0, 17] = hidden[1, 0, :, :20] = True
    bias = np.where(hidden, np.array(-np.inf, c.dtype), riding["bias"])
    given = (*inputs, {"bias": bias}), c.cotangents(), c.inputs(2, bias=bias.shape)
    (out, lse), (dq, _, _, operands), _ = check(everything(), attend, *given)
    for x in (out, dq):
        assert not np.any(x[0, 3]) and not np.any(x[1, 17]) and np.any(x[0, 4])
    assert (np.asarray(lse)[0, :, 3] == -np.inf).all()
    assert not np.any(np.asarray(operands["bias"])[hidden])


def test_minus_infinity_everywhere(attend):
    c = case("B2-T5-S19-H2-f32")
    given = (*c.arrays(), {"bias": np.full((1, 1), -np.inf, np.float32)}), c.cotangents()
    (out, lse), gradients = jax.jit(functools.partial(values_and_gradients(), attend))(*given)
    assert not np.any(out) and (np.asarray(lse) == -np.inf).all()
    assert not any(np.any(g) for g in jax.tree.leaves(gradients))


def test_is_the_fourth_argument_by_position(attend):
    q, k, v = case("B2-T5-S7-f32").arrays()
    bias = np.arange(7, dtype=np.float32)
    np.testing.assert_array_equal(attend(q, k, v, bias), attend(q, k, v, bias=bias))


@pytest.mark.parametrize("axis", [0, None], ids=["mapped", "not-mapped"])
def test_vmap(attend, axis):
    """Inside a batch; the gradient of a bias that is not mapped is each example's own."""
    c = case("B3x2-T9-S19-H4-K2-D8-f32")
    bias = c.normal((3, 2, 4, 9, 1) if axis == 0 else (2, 4, 9, 1), 0, "bias")

    def mapped(attend, inputs, cotangents, bias):
        one = lambda x, ct, b: values_and_gradients()(attend, (*x, {"bias": b}), ct)  # noqa: E731
        return jax.vmap(one, in_axes=(0, 0, axis))(inputs, cotangents, bias)

    program = Program(mapped, {"causal": True}, derivative=(False, True))
    _, (*_, operands) = check(program, attend, c.arrays(), c.cotangents(), bias)
    assert operands["bias"].shape == (3, 2, 4, 9, 1)


def test_gradient_of_vmap_sums_over_the_examples(attend):
    c = case("B3-T9-S19-H4-K2-D8-f32")

    def summed(attend, q, k, v, bias):
        one = jax.vmap(attend, in_axes=(0, 0, None, None))
        return {"bias": jax.grad(lambda b: (one(q, k, v, b) ** 2).sum())(bias)}

    q, k, v = c.arrays()
    check(Program(summed, derivative=True), attend, q, k, v[0], c.normal((4, 1, 19), 0, "bias"))


def test_derivative_of_the_gradients(attend):
    c = case("B2-T9-S19-H4-K2-D8-f32")
    shape = (2, 1, 9, 19)
    check(second_order(causal=True), attend, c.inputs(bias=shape), c.cotangents(), c.inputs(1, bias=shape))


def test_a_frozen_bias_costs_no_gradient():
    """`backward` is not asked for the gradient of a bias that is not differentiated."""
    c = case("B2-T9-S19-H4-K2-D8-f32")
    q, k, v, riding = c.inputs(bias=(4, 9, 19))
    loss = lambda q, b: flash_jax.flash_attention(q, k, v, b).sum()  # noqa: E731
    for argnums, wanted in ((0, ["query"]), (1, ["bias"]), ((0, 1), ["query", "bias"])):
        (equation,) = named("flash_attention_backward", jax.grad(loss, argnums), q, riding["bias"])
        assert [name for name, _ in equation.params["wanted"]] == wanted


def test_a_bias_that_is_broadcast_stays_so(attend):
    """Nothing of T * S elements, forward and backward, where the bias is a row of keys for each head."""
    c = case("T300-S290-H1-K1-D4-f32")
    program = functools.partial(values_and_gradients(causal=True), attend)
    assert max(lowered_sizes(program, c.inputs(bias=(1, 1, 290)), c.cotangents())) < 300 * 290


@pytest.mark.parametrize("name, shape", [("B2-T5-S0-H2-f32", (2, 5, 1)), ("B2-T0-S5-H2-f32", (2, 1, 5))])
def test_no_keys_or_no_queries(attend, name, shape):
    c = case(name)
    _, (*_, operands) = check(values_and_gradients(), attend, c.inputs(bias=shape), c.cotangents())
    assert operands["bias"].shape == shape and not np.any(operands["bias"])
