"""Every error that a mod, its operands or its gradients can cause: class and text, when it is only traced (R18)."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import flash_jax
from tests.support.accuracy import check
from tests.support.cases import case
from tests.support.programs import Program, gradients

Q, K = (2, 5, 4, 16), (2, 7, 2, 16)
TABLE = np.ones((4, 9), np.float32)
IDS = np.ones((2, 7), np.int32)


def raised(kind, **options):
    """The text of the error of class `kind` that a call with these options raises when it is only traced."""
    arrays = [jax.ShapeDtypeStruct(x, jnp.float32) for x in (Q, K, K)]
    with pytest.raises(kind) as error:
        jax.eval_shape(functools.partial(flash_jax.flash_attention, **options), *arrays)
    return str(error.value)


def of_score_mod(kind, function, *operands):
    """The text of the error that this score_mod raises."""
    return raised(kind, score_mod=function, mod_operands=operands)


# What is closed over.


@pytest.mark.parametrize("use", [lambda x: x[0, 0], jnp.sum], ids=["entry", "sum"])
def test_closing_over_an_array(use):
    table = jnp.asarray(TABLE)
    assert of_score_mod(TypeError, lambda s, b, h, i, j: s + use(table)) == (
        "`score_mod` closes over an array of shape (4, 9); pass it in `mod_operands` and index it inside, as in "
        "`operand[h, i - j]`."
    )


def test_closing_over_an_array_that_is_indexed_by_position():
    table = jnp.asarray(TABLE)
    assert "closes over an array of shape (4, 9)" in of_score_mod(TypeError, lambda s, b, h, i, j: s + table[h, j])


def test_closing_over_an_array_in_a_mask_mod():
    ids = jnp.asarray(IDS)
    text = raised(TypeError, mask_mod=lambda b, h, i, j: ids[b, i] == ids[b, j])
    assert "`mask_mod` closes over an array of shape (2, 7)" in text


@pytest.mark.parametrize("transform", [jax.jit, jax.grad, jax.vmap], ids=["jit", "grad", "vmap"])
def test_closing_over_a_tracer(transform):
    """An array of an outer function, whatever the transformation, without a leak."""
    q, k, v = case("B2-T5-S7-f32").arrays()

    def outer(x):
        return flash_jax.flash_attention(q, k, v, score_mod=lambda s, b, h, i, j: s * x).sum()

    with jax.checking_leaks(), pytest.raises(TypeError, match="`score_mod` closes over an array of shape"):
        transform(outer)(np.ones(3, np.float32) if transform is jax.vmap else np.float32(2))


def test_numbers_may_be_closed_over():
    slope, count = 0.5, np.float32(3)
    q, k, v = case("B2-T5-S7-f32").arrays()
    out = flash_jax.flash_attention(q, k, v, score_mod=lambda s, b, h, i, j: s * slope * count)
    np.testing.assert_allclose(out, flash_jax.flash_attention(q, k, v, scale=1.5 / 4), rtol=1e-5, atol=1e-6)


# How operands are read.


@pytest.mark.parametrize(
    "index", [lambda h, j: h, lambda h, j: (h, j, j), lambda h, j: (), lambda h, j: ...], ids=["1", "3", "0", "..."]
)
def test_another_number_of_indices(index):
    text = of_score_mod(TypeError, lambda s, b, h, i, j, t: s + t[index(h, j)], TABLE)
    assert text.startswith("`mod_operands[0]` has 2 dims and is read entry by entry, by as many integers; got ")


@pytest.mark.parametrize(
    "index, got",
    [
        (slice(None), "slice(None, None, None)"),
        (None, "None"),
        (1.0, "1.0"),
        (True, "True"),
        (np.arange(2), "array([0, 1])"),
        ("h", "'h'"),
    ],
    ids=str,
)
def test_what_is_no_integer(index, got):
    text = of_score_mod(TypeError, lambda s, b, h, i, j, t: s + t[h, index], TABLE)
    assert text == f"`mod_operands[0]` is indexed by scalar integers; got {got}."


def test_a_float_index():
    text = of_score_mod(TypeError, lambda s, b, h, i, j, t: s + t[h, j.astype(jnp.float32)], TABLE)
    assert text == "`mod_operands[0]` is indexed by scalar integers; got float32[]."


def test_an_index_that_is_an_array():
    text = of_score_mod(TypeError, lambda s, b, h, i, j, t: (s + t[h, j + jnp.arange(3)]).sum(), TABLE)
    assert text == "`mod_operands[0]` is indexed by scalar integers; got int32[3]."


@pytest.mark.parametrize("index", [9, -10, np.int64(4000)])
def test_a_number_outside(index):
    text = of_score_mod(IndexError, lambda s, b, h, i, j, t: s + t[h, index], TABLE)
    assert text == f"`mod_operands[0]`: index {index} is out of bounds for a dim of size 9."


def test_an_index_that_depends_on_the_score():
    text = of_score_mod(NotImplementedError, lambda s, b, h, i, j, t: s + t[h, s.astype(jnp.int32)], TABLE)
    assert text == "An index into `mod_operands` may not depend on the score."


@pytest.mark.parametrize(
    "use",
    [
        lambda t: sum(t),
        lambda t: next(iter(t)),
        lambda t: jnp.asarray(t),
        lambda t: np.asarray(t),
        lambda t: jnp.float32(1) * t,
        lambda t: jnp.where(True, t, t),
        lambda t: 1.0 if t else 0.0,
        lambda t: 1.0 if t == 0 else 0.0,
        lambda t: 1.0 if t != 0 else 0.0,
    ],
    ids=["sum", "iter", "asarray", "np.asarray", "times", "where", "if", "equal", "unequal"],
)
def test_an_operand_is_no_array(use):
    text = of_score_mod(TypeError, lambda s, b, h, i, j, t: s + use(t), TABLE)
    assert text == "`mod_operands[0]` is no array inside a mod: index it, as in `operand[h, i - j]`."


@pytest.mark.parametrize("use", [lambda s, t: t + 1, lambda s, t: s * t, lambda s, t: s + jnp.sum(t)], ids="+*s")
def test_operators_of_operands(use):
    """The words are Python's, JAX's or ours; a TypeError in any case."""
    text = of_score_mod(TypeError, lambda s, b, h, i, j, t: use(s, t), TABLE)
    assert "Operand" in text or "`mod_operands[0]` is no array" in text


# What it returns, and does.


@pytest.mark.parametrize(
    "result, got",
    [
        (lambda s: None, "NoneType"),
        (lambda s: (s, s), "tuple"),
        (lambda s: s[None], "shape (1,)"),
        (lambda s: s + jnp.zeros(3), "shape (3,)"),
        (lambda s: "s", "str"),
    ],
    ids=["None", "pair", "dim", "array", "text"],
)
def test_what_is_no_number(result, got):
    text = of_score_mod(TypeError, lambda s, b, h, i, j: result(s))
    assert text == f"`score_mod` must return one number for the entry it is given; got {got}."


def test_a_score_mod_that_gives_a_bool():
    text = of_score_mod(TypeError, lambda s, b, h, i, j: i >= j)
    assert text == "`score_mod` must return a score, a floating-point number; got bool."


@pytest.mark.parametrize(
    "result, got",
    [
        (lambda i: i.astype(jnp.float32), "float32"),
        (lambda i: i, "int32"),
        (lambda i: i.astype(jnp.complex64), "complex64"),
    ],
    ids=["float", "int", "complex"],
)
def test_a_mask_mod_that_gives_no_bool(result, got):
    text = raised(TypeError, mask_mod=lambda b, h, i, j: result(i))
    assert text == f"`mask_mod` must return a bool, True where attention is allowed; got {got}."


def test_a_score_mod_that_gives_a_complex_number():
    text = of_score_mod(TypeError, lambda s, b, h, i, j: s.astype(jnp.complex64))
    assert text == "`score_mod` must return a score, a floating-point number; got complex64."


@pytest.mark.parametrize(
    "use, name",
    [
        (lambda s: jnp.sum(s[None]), "broadcast_in_dim"),
        (lambda s: jnp.dot(jnp.broadcast_to(s, (3,)), jnp.broadcast_to(s, (3,))), "broadcast_in_dim"),
        (lambda s: jax.lax.cond(s > 0, lambda x: x, lambda x: -x, s), "cond"),
        (lambda s: jax.lax.while_loop(lambda x: x > 1, lambda x: x / 2, s), "while"),
        (lambda s: jnp.arange(3.0)[1] + s, "iota"),
        (lambda s: s + jax.random.normal(jax.random.key(0)), None),
    ],
    ids=["sum", "dot", "cond", "while", "iota", "random"],
)
def test_operations_that_are_not_elementwise(use, name):
    text = of_score_mod(NotImplementedError, lambda s, b, h, i, j: use(s))
    assert text.startswith(f"`score_mod` uses `{name}`" if name else "`score_mod` uses `")
    assert text.endswith(
        ", which cannot run inside a tile: it must be made of elementwise operations on the scalars it is given "
        "(`jnp.where` for a choice), and arrays must come through `mod_operands`."
    )


@pytest.mark.parametrize("name", ["score_mod", "mask_mod"])
def test_what_is_no_function(name):
    assert raised(TypeError, **{name: 3}) == f"`{name}` must be a function; got int."


def test_an_error_of_the_users_own_is_theirs():
    def wrong(s, b, h, i, j):
        raise KeyError("mine")

    assert of_score_mod(KeyError, wrong) == "'mine'"


# Operands.


def plain(s, b, h, i, j, *_):
    return s


def test_operands_without_a_mod():
    text = raised(ValueError, mod_operands=(TABLE,))
    assert text == "`mod_operands` are read by `score_mod` and `mask_mod`; neither is given."


@pytest.mark.parametrize("operands, got", [(TABLE, "ndarray"), ({"t": TABLE}, "dict"), (None, "NoneType")], ids=type)
def test_operands_that_are_no_tuple(operands, got):
    text = raised(TypeError, score_mod=plain, mod_operands=operands)
    assert text == f"`mod_operands` must be a tuple of arrays; got {got}."


@pytest.mark.parametrize(
    "operand, got",
    [
        (np.ones(3, np.complex64), "complex64"),
        (2.0, "float"),
        ([1.0, 2.0], "list"),
        (None, "NoneType"),
    ],
    ids=["complex", "float", "list", "None"],
)
def test_operands_that_are_no_arrays_of_numbers(operand, got):
    text = raised(TypeError, score_mod=plain, mod_operands=(TABLE, operand))
    assert text == f"`mod_operands[1]` must be an array of real numbers or bools; got {got}."


def test_an_operand_of_float64():
    with jax.enable_x64(True):
        text = raised(TypeError, score_mod=plain, mod_operands=(np.ones(3),))
    assert text == "`mod_operands[0]` may be float64 only where `query` is; cast it."


@pytest.mark.parametrize("shape", [(0,), (4, 0)], ids=str)
def test_an_operand_with_nothing_to_read(shape):
    text = raised(ValueError, score_mod=plain, mod_operands=(np.ones(shape, np.float32),))
    assert text == f"`mod_operands[0]` has nothing to read: its shape is {shape}."


# Gradients of reads at places of no known form.


def looked_up(s, b, h, i, j, t, buckets):
    return s + t[h, buckets[jnp.clip(j - i + 7, 0, 13)]]


BUCKETS = np.minimum(np.abs(np.arange(14) - 7), 4).astype(np.int32)
ELSEWHERE = {
    "half": lambda s, b, h, i, j, t, _: s + t[h, i // 2],
    "double": lambda s, b, h, i, j, t, _: s + t[h, i * 2],
    "sum": lambda s, b, h, i, j, t, _: s + t[h, i + j],
    "other-scale": lambda s, b, h, i, j, t, _: s + t[h, i - 2 * j],
    "twice-the-row": lambda s, b, h, i, j, t, _: s + t[i, i],
    "row-and-difference": lambda s, b, h, i, j, t, _: s + t[i, i - j],
    "remainder": lambda s, b, h, i, j, t, _: s + t[h % 2, j],
    "choice": lambda s, b, h, i, j, t, _: s + t[h, jnp.where(i > j, 0, 1)],
    "looked-up": looked_up,
}


@pytest.mark.parametrize("kind", ELSEWHERE)
def test_gradient_of_a_read_at_another_place(kind):
    """Raised when traced under grad, where the operand's gradient is wanted; and only there."""
    c = case("B2-T5-S7-H4-K2-f32")
    call = functools.partial(flash_jax.flash_attention, *c.arrays(), score_mod=ELSEWHERE[kind])
    with pytest.raises(NotImplementedError) as error:
        jax.eval_shape(jax.grad(lambda t: call(mod_operands=(t, BUCKETS)).sum()), TABLE)
    assert str(error.value) == (
        "The gradient of `mod_operands[0]` needs each index to be batch, head, q index or k index, or the difference "
        "of the last two, plus or minus a constant (each used once), and this `score_mod` reads it otherwise. Use "
        "implementation='reference', or `jax.lax.stop_gradient` on the operand."
    )
    jax.eval_shape(jax.grad(lambda t: call(mod_operands=(jax.lax.stop_gradient(t), BUCKETS)).sum()), TABLE)


@pytest.mark.parametrize("kind", ["half", "row-and-difference", "looked-up"])
def test_other_derivatives_of_such_a_read(attend, kind):
    """Values, tangents and the gradients of query, key and value are there, whatever the place."""
    c = case("B2-T17-S7-H2-K1-f32")
    (*inputs, riding), directions = (c.inputs(seed, mod_operands=((17, 19),)) for seed in (0, 1))

    def two(attend, inputs, riding, cotangents, directions):
        values, moved = jax.jvp(functools.partial(call, attend), (*inputs, riding), directions)
        frozen = lambda *x: call(attend, *x, riding)  # noqa: E731
        return values, (moved, jax.vjp(frozen, *inputs)[1](cotangents))

    def call(attend, q, k, v, riding):
        return attend(q, k, v, mod_operands=(*riding["mod_operands"], BUCKETS), return_lse=True)

    program = Program(two, {"score_mod": ELSEWHERE[kind]}, derivative=(False, True))
    check(program, attend, tuple(inputs), riding, c.cotangents(), directions)


@pytest.mark.parametrize("kind", ["half", "looked-up"])
def test_the_reference_has_their_gradient(kind):
    c = case("B2-T17-S7-H2-K1-f32")
    by_reference = functools.partial(flash_jax.flash_attention, implementation="reference")
    program = gradients(score_mod=ELSEWHERE[kind], mod_operands=(BUCKETS,))
    *_, found = check(program, by_reference, c.inputs(mod_operands=((17, 19),)), c.cotangents())
    assert np.any(found["mod_operands"][0])
