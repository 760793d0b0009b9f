"""`score_mod`: the user's function of each score, with gradients of what it reads (R23)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support.accuracy import check
from tests.support.cases import case, poisoned
from tests.support.mods import READS, by_difference, by_row, several
from tests.support.programs import Program, everything, gradients, tangents, values_and_gradients

pytestmark = pytest.mark.thorough

ODD = "B2-T17-S18-H2-D8-f32"
NAMES = ["B2-T18-S33-H4-K2-D8-f32", "B2-T33-S18-H4-K1-D8-bf16"]
# The default run takes each kind of read with one of them, in turn.
KINDS = [
    pytest.param(kind, name, marks=() if n % 2 == m else pytest.mark.slow)
    for n, kind in enumerate(READS)
    for m, name in enumerate(NAMES)
]


def inputs_and_directions(c, *tables):
    """What `everything` takes: inputs, cotangents and tangents, with tables of these shapes."""
    return c.inputs(mod_operands=tables), c.cotangents(), c.inputs(1, mod_operands=tables)


@pytest.mark.parametrize("kind, name", KINDS)
def test_values_and_gradients(attend, kind, name):
    c, mod = case(name), READS[kind]
    inputs = c.inputs(mod_operands=mod.tables(c))
    _, (*_, operands) = check(values_and_gradients(score_mod=mod.function), attend, inputs, c.cotangents())
    for found, table in zip(operands["mod_operands"], inputs[3]["mod_operands"], strict=True):
        assert found.shape == table.shape and found.dtype == table.dtype and np.any(found)


@pytest.mark.parametrize("kind", [k if k == "several" else pytest.param(k, marks=pytest.mark.slow) for k in READS])
def test_tangents(attend, kind):
    """Of which those of tables need no sums of their own: each read takes its entries of the table's tangent."""
    c, mod = case(NAMES[0]), READS[kind]
    inputs, directions = (c.inputs(seed, mod_operands=mod.tables(c)) for seed in (0, 1))
    check(tangents(score_mod=mod.function), attend, inputs, directions)


def test_an_operand_without_dims(attend):
    """Its gradient is one number, which could be right by luck, and the yardstick with it: so along many cotangents."""
    c = case(ODD)

    def scaled(s, b, h, i, j, t):
        return s * t[...] + t[()] ** 2

    def many(attend, q, k, v, table, cotangents):
        _, pull = jax.vjp(lambda t: attend(q, k, v, mod_operands=(t,), return_lse=True), table)
        return {"mod_operands": jax.vmap(pull)(cotangents)[0]}

    cotangents = jax.tree.map(lambda *x: np.stack(x), *(c.cotangents(n) for n in range(16)))
    program = Program(many, {"score_mod": scaled}, derivative=True)
    found = check(program, attend, *c.arrays(), np.float32(0.7), cotangents)
    assert found["mod_operands"].shape == (16,) and np.all(np.asarray(found["mod_operands"]) != 0)


# Functions of the score.


def softened(s, b, h, i, j):
    return jax.nn.softplus(s) - 0.05 * (i - j).astype(s.dtype) * (h + b).astype(s.dtype)


def bent(s, b, h, i, j, t):
    """Steeper on one side; a choice by the score, and a function of it times what is read."""
    return jnp.where(s > 0, s * t[h], jnp.tanh(s) * t[0] ** 2) + jnp.exp(-jnp.square(s)) * 0.5


def with_local_functions(s, b, h, i, j, t):
    """A function that is jitted inside, and a loop over Python numbers."""
    power = jax.jit(lambda x: x + 0.1 * x**3)
    return sum((power(s * t[n]) for n in range(3)), s)


@pytest.mark.parametrize(
    "function",
    [softened, bent, pytest.param(with_local_functions, marks=pytest.mark.slow)],
    ids=["softened", "bent", "with-local-functions"],
)
def test_functions_that_are_not_linear_in_the_score(attend, function):
    c = case(ODD)
    given = (c.arrays(), c.cotangents(), c.tangents()) if function is softened else inputs_and_directions(c, (3,))
    check(everything(score_mod=function, causal=True), attend, *given)


# -inf.


def thinned(s, b, h, i, j):
    return jnp.where((i - j) % 3 == 0, -jnp.inf, s * s * 0.1)


def without_rows(s, b, h, i, j, t):
    return jnp.where(i % 4 == b, -jnp.inf, s + t[h, i - j + 9])


def test_minus_infinity_on_some_keys(attend):
    c = case(ODD)
    check(values_and_gradients(score_mod=thinned), attend, c.arrays(), c.cotangents())


def test_minus_infinity_on_whole_rows(attend):
    """They are dead: output 0, lse -inf and no gradient (R1)."""
    c = case(ODD)
    given = inputs_and_directions(c, (2, 19))
    (out, lse), (dq, *_), _ = check(everything(score_mod=without_rows), attend, *given)
    for b in range(2):
        assert not np.any(out[b, b::4]) and not np.any(dq[b, b::4])
        assert (np.asarray(lse)[b, :, b::4] == -np.inf).all() and np.any(out[b, 3])


def test_rows_that_it_makes_dead_may_be_nan(attend):
    """In query, cotangents and tangents (R1)."""
    c, rows, of_lse = case(ODD), (np.s_[0, ::4], np.s_[1, 1::4]), (np.s_[0, :, ::4], np.s_[1, :, 1::4])
    inputs, (dout, dlse), directions = inputs_and_directions(c, (2, 19))
    bad = dout, dlse, inputs[0], directions[0]
    for n in range(2):
        bad = tuple(poisoned(x, of_lse[n] if x.shape == dlse.shape else rows[n]) for x in bad)
    given = (bad[2], *inputs[1:]), bad[:2], (bad[3], *directions[1:])
    check(everything(score_mod=without_rows), attend, inputs, (dout, dlse), directions, given=given)


def test_minus_infinity_that_is_read(attend):
    """As in a bias: entries of -inf hide, have the gradient 0, and make a row dead."""
    c = case(ODD)
    q, k, v, riding = c.inputs(mod_operands=((2, 19), (2, 18)))
    columns, rows = (np.where(x > 0.8, np.float32(-np.inf), x) for x in riding["mod_operands"])
    rows[1, 5] = -np.inf

    def hidden(s, b, h, i, j, t, r):
        return s + t[h, j] + r[b, i]

    given = (q, k, v, {"mod_operands": (columns, rows)}), c.cotangents(), c.inputs(1, mod_operands=((2, 19), (2, 18)))
    (out, _), (*_, found), _ = check(everything(score_mod=hidden), attend, *given)
    assert not np.any(out[1, 5])
    for x, table in zip(found["mod_operands"], (columns, rows), strict=True):
        assert not np.any(np.asarray(x)[table == -np.inf]) and np.any(x)


def test_minus_infinity_everywhere(attend):
    c = case("B2-T5-S19-H2-f32")

    def nothing(s, b, h, i, j, t):
        return jnp.where(j >= 0, -jnp.inf, s * t[h])

    program = values_and_gradients(score_mod=nothing)
    (out, lse), found = jax.jit(lambda *x: program(attend, *x))(c.inputs(mod_operands=((2,),)), c.cotangents())
    assert not np.any(out) and (np.asarray(lse) == -np.inf).all()
    assert not any(np.any(g) for g in jax.tree.leaves(found))


# What is read, and where.


def chosen(s, b, h, i, j, t, ids):
    """Ints, looked up at places of any form, one of them found in the operand itself, decide which number is read."""
    return jnp.where(ids[b, i // 2] == ids[ids[1, 3], (j * 5) % 19], s * t[h], s - t[0])


def test_integers_may_be_looked_up_anywhere(attend):
    """Integer operands have no gradient, so that any index will do; float ones beside them have theirs."""
    c = case(ODD)
    ids = np.random.default_rng(0).integers(0, 2, (2, 19)).astype(np.int32)
    program = values_and_gradients(score_mod=chosen, mod_operands=(ids,))
    check(program, attend, c.inputs(mod_operands=((2,),)), c.cotangents())


def test_a_bool_operand(attend):
    c = case(ODD)
    flags = np.arange(18) % 3 > 0

    def halved(s, b, h, i, j, flags):
        return jnp.where(flags[j], s, 0.5 * s)

    check(values_and_gradients(score_mod=halved, mod_operands=(flags,)), attend, c.arrays(), c.cotangents())


def test_indices_outside_meet_the_nearest_end(attend):
    """In every dim and on both sides, negative ones too, and the gradient goes there."""
    c = case(ODD)
    q, k, v, riding = c.inputs(mod_operands=((3, 5),))
    (table,) = riding["mod_operands"]

    def outside(s, b, h, i, j, t):
        return s + t[h + 1, j - 3]

    def inside(s, b, h, i, j, t):
        return s + t[jnp.minimum(h + 1, 2), jnp.clip(j - 3, 0, 4)]

    def found(mod):
        call = jax.jit(lambda t: attend(q, k, v, score_mod=mod, mod_operands=(t,)))
        out, pull = jax.vjp(call, table)
        return out, pull(c.cotangents()[0])[0]

    for x, y in zip(found(outside), found(inside), strict=True):
        np.testing.assert_array_equal(x, y)
        assert np.any(x)


def in_both_directions(s, b, h, i, j, t):
    return s + t[i - j + 3] - 0.5 * t[j - i + 40]


def test_differences_beyond_the_table_on_one_side_or_both(attend):
    """All of one read meets one end of a table; and two reads of it by differences of either sign."""
    c = case(ODD)
    check(gradients(score_mod=in_both_directions), attend, c.inputs(mod_operands=((7,),)), c.cotangents())


def test_operands_that_are_not_read(attend):
    """Have the gradient 0."""
    c = case(ODD)

    def first_only(s, b, h, i, j, t, u):
        return s + t[h]

    program = gradients(score_mod=first_only)
    *_, found = check(program, attend, c.inputs(mod_operands=((2,), (3, 4))), c.cotangents())
    assert not np.any(found["mod_operands"][1])


def test_numpy_and_jax_arrays_alike(attend):
    q, k, v = case(ODD).arrays()
    table = np.arange(26, dtype=np.float32).reshape(2, 13)
    call = lambda t: attend(q, k, v, score_mod=by_difference, mod_operands=[t])  # noqa: E731
    np.testing.assert_array_equal(call(table), call(jnp.asarray(table)))


# Dtypes and shapes.


@pytest.mark.parametrize("dtype, dtype_of_table", [("f32", "bf16"), pytest.param("f16", "f16", marks=pytest.mark.slow)])
def test_tables_of_16_bits(attend, dtype, dtype_of_table):
    """Read as float32; the gradient has the table's own dtype."""
    c, narrow = case(ODD.replace("f32", dtype)), case(f"T1-{dtype_of_table}").dtype
    tables = ((2, 41), (2, 17), (18, 2))
    q, k, v, riding = c.inputs(mod_operands=tables)
    riding = {"mod_operands": tuple(t.astype(narrow) for t in riding["mod_operands"])}
    *_, found = check(gradients(score_mod=several, causal=True), attend, (q, k, v, riding), c.cotangents())
    assert {x.dtype for x in found["mod_operands"]} == {narrow}


@pytest.mark.parametrize(
    "name",
    [
        "T1-S37-H4-K1-D8-f32",
        "B2x3-T5-S18-H2-K1-D40-f32",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("B3-T23-S1-H2-D8-f32", "T33-S20-H1-D128-Dv16-bf16")),
    ],
)
def test_shapes(attend, name):
    """One query, one key, any number of leading dims (which the batch index counts row by row), head dims."""
    c, mod = case(name), READS["several"]
    check(values_and_gradients(score_mod=several), attend, c.inputs(mod_operands=mod.tables(c)), c.cotangents())


@pytest.mark.parametrize("name", ["B2-T5-S0-H2-f32", "B2-T0-S5-H2-f32"])
def test_no_keys_or_no_queries(attend, name):
    """Values as without a mod; what is read has the gradient 0."""
    c = case(name)
    program = values_and_gradients(score_mod=by_difference)
    (_, lse), (*_, found) = jax.jit(lambda *x: program(attend, *x))(c.inputs(mod_operands=((2, 3),)), c.cotangents())
    assert (np.asarray(lse) == -np.inf).all() and not np.any(found["mod_operands"][0])


# Together with the other options.

TOGETHER = {
    "window-softcap-sinks": ({"window": (6, 9), "softcap": 2.0}, {"sinks": (2,)}),
    "segments-bias-alibi": (
        {"q_segment_ids": np.arange(17) // 6, "kv_segment_ids": np.arange(18) // 6},
        {"bias": (2, 17, 18), "alibi_slopes": (2,)},
    ),
    "lengths-dropout-scale": (
        {
            "q_lengths": np.array([17, 12]),
            "kv_lengths": np.array([11, 18]),
            "causal": True,
            "dropout_rate": 0.3,
            "dropout_key": jax.random.key(1),
        },
        {"scale": ()},
    ),
    "mask-positions": (
        {
            "mask": np.random.default_rng(0).random((2, 1, 17, 18)) < 0.7,
            "q_positions": np.arange(17)[::-1].copy(),
            "causal": True,
        },
        {},
    ),
}


SLOW = ("segments-bias-alibi", "mask-positions")


@pytest.mark.parametrize("options", [pytest.param(n, marks=pytest.mark.slow if n in SLOW else ()) for n in TOGETHER])
def test_together_with(attend, options):
    """The mod comes after scale and softcap, before bias and alibi."""
    c, (static, shapes) = case(ODD), TOGETHER[options]
    shapes = {**shapes, "mod_operands": ((2, 41), (2, 17), (18, 2))}
    check(values_and_gradients(score_mod=several, **static), attend, c.inputs(**shapes), c.cotangents())


def test_gradient_through_lse_alone(attend):
    c = case(ODD)
    cotangents = None, c.cotangents()[1]
    check(gradients(score_mod=several), attend, c.inputs(mod_operands=((2, 41), (2, 17), (18, 2))), cotangents)


def test_only_what_is_wanted(attend):
    """The gradient of one table alone, and of query alone."""
    c = case(ODD)
    q, k, v, riding = c.inputs(mod_operands=((2, 17),))

    def of_table(attend, q, k, v, table):
        loss = lambda t: (attend(q, k, v, mod_operands=(t,)) ** 2).sum()  # noqa: E731
        return {"mod_operands": jax.grad(loss)(table)}

    def of_query(attend, q, k, v, table):
        return jax.grad(lambda q: (attend(q, k, v, mod_operands=(table,)) ** 2).sum())(q)

    for function in (of_table, of_query):
        program = Program(function, {"score_mod": by_row}, derivative=True)
        check(program, attend, q, k, v, riding["mod_operands"][0])
