"""Mods under JAX's transformations, how often the user's function is traced, and memory (R15, R16)."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import flash_jax
from tests.support.accuracy import check
from tests.support.cases import case
from tests.support.mods import REACH, by_difference, by_entry, several
from tests.support.programs import Program, second_order, values_and_gradients
from tests.support.structure import lowered_sizes, named

pytestmark = pytest.mark.thorough

MAPPED = "B3x2-T9-S18-H2-K1-D8-f32"


def by_example(s, b, h, i, j, t):
    return s * t[b, i] + t[b, 0]


# vmap.


@pytest.mark.parametrize("axes", [(0, None), (None, 1), (0, 0)], ids=["query", "table", "both"])
def test_vmap_of_values_and_gradients(attend, axes):
    """The batch index counts the call's own dims; gradients are each example's, of a table that is not mapped too."""
    c = case(MAPPED)
    q, k, v = c.arrays()
    table = c.normal((3, 2, 9), 0, "table")
    q = q if axes[0] == 0 else q[0]
    table = table[0] if axes[1] is None else np.moveaxis(table, 0, axes[1])

    def mapped(attend, q, k, v, table, cotangents):
        def one(q, table, cotangents):
            inputs = q, k[0], v[0], {"mod_operands": (table,)}
            return values_and_gradients()(attend, inputs, cotangents)

        return jax.vmap(one, in_axes=(*axes, 0))(q, table, cotangents)

    program = Program(mapped, {"score_mod": by_example}, derivative=(False, True))
    _, (*_, found) = check(program, attend, q, k, v, table, c.cotangents())
    assert found["mod_operands"][0].shape == (3, 2, 9)


def test_gradient_of_vmap_sums_over_the_examples(attend):
    c = case("B3-T9-S18-H2-K1-D8-f32")

    def summed(attend, q, k, v, table):
        call = lambda t: jax.vmap(lambda q: attend(q, k[0], v[0], mod_operands=(t,)))(q)  # noqa: E731
        return {"mod_operands": jax.grad(lambda t: (call(t) ** 2).sum())(table)}

    table = c.normal((2, 2 * REACH + 1), 0, "table")
    found = check(Program(summed, {"score_mod": by_difference}, derivative=True), attend, *c.arrays(), table)
    assert found["mod_operands"].shape == table.shape


def test_vmap_of_a_mask_mod(attend):
    """Each mapped example sees what it would see alone, in its own ids."""
    c = case("B3-T17-S18-H2-K1-D8-f32")
    ids = np.sort(np.random.default_rng(0).integers(0, 3, (3, 18))).astype(np.int32)

    def same(b, h, i, j, ids):
        return (ids[i] == ids[j]) & (b == 0)

    def mapped(attend, inputs, cotangents, ids):
        one = lambda x, ct, ids: values_and_gradients(mod_operands=(ids,))(attend, x, ct)  # noqa: E731
        return jax.vmap(one)(inputs, cotangents, ids)

    check(Program(mapped, {"mask_mod": same}, derivative=(False, True)), attend, c.arrays(), c.cotangents(), ids)


@pytest.mark.parametrize("pass_", ["forward", "backward"])
def test_a_table_that_is_not_mapped_is_not_copied(pass_):
    q, k, v = case("B5-T9-S18-H2-K1-D8-f32").arrays()
    table = np.ones((2, 2 * REACH + 1), np.float32)

    def call(q, k, v, table):
        return flash_jax.flash_attention(q, k, v, score_mod=by_difference, mod_operands=(table,)).sum()

    function = call if pass_ == "forward" else jax.grad(call, argnums=3)
    mapped = jax.vmap(function, in_axes=(0, 0, 0, None))
    (equation,) = named(f"flash_attention_{pass_}", mapped, q, k, v, table)
    assert [x.aval.shape for x in equation.invars if x.aval.shape[-2:] == table.shape] == [(1, *table.shape)]


# Higher derivatives and control flow.


def curved(s, b, h, i, j, t, u):
    return jnp.sin(s * t[h, i - j + REACH]) + t[h, 0] * u[j] ** 2


def test_derivative_of_the_gradients(attend):
    """A Hessian-vector product, in which the second derivatives of the mod to score and tables take part."""
    c = case("B2-T9-S18-H2-K1-D8-f32")
    inputs, directions = (c.inputs(seed, mod_operands=((2, 2 * REACH + 1), (18,))) for seed in (0, 1))
    check(second_order(score_mod=curved, causal=True), attend, inputs, c.cotangents(), directions)


def test_checkpoint_in_a_scan(attend):
    c = case("B2-T9-S9-H2-D8-f32")
    tables = c.normal((2, 2, 2 * REACH + 1), 0, "tables")  # of two layers

    def layers(attend, q, k, v, tables):
        body = jax.checkpoint(lambda x, t: (x + attend(x, k, v, mod_operands=(t,)), None))
        loss = lambda q, tables: (jax.lax.scan(body, q, tables)[0] ** 2).sum()  # noqa: E731
        dq, d_tables = jax.grad(loss, argnums=(0, 1))(q, tables)
        return dq, {"mod_operands": d_tables}

    check(Program(layers, {"score_mod": by_difference}, derivative=True), attend, *c.arrays(), tables)


# Tracing and compiling.


class Counted:
    """A score_mod that counts how often it is traced."""

    def __init__(self):
        self.calls = 0

    def __call__(self, s, b, h, i, j, t):
        self.calls += 1
        return s + t[h, i - j]


def test_the_function_is_traced_once():
    """For the same function and shapes, with and without jit, forward and gradient."""
    q, k, v = case("B2-T5-S7-f32").arrays()
    mod, table = Counted(), np.ones((2, 4), np.float32)
    call = lambda t: flash_jax.flash_attention(q, k, v, score_mod=mod, mod_operands=(t,)).sum()  # noqa: E731
    for function in (call, jax.jit(call), jax.jit(call), jax.grad(call)):
        function(table)
    assert mod.calls == 1
    call(np.ones((2, 5), np.float32))
    assert mod.calls == 2


def test_nothing_is_compiled_twice():
    q, k, v = case("B2-T5-S7-f32").arrays()
    mod, table = Counted(), np.ones((2, 4), np.float32)
    call = lambda t: flash_jax.flash_attention(q, k, v, score_mod=mod, mod_operands=(t,))  # noqa: E731
    call(table)
    compiled = []
    listen = lambda name, *_, **__: compiled.append(name) if "backend_compile" in name else None  # noqa: E731
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        call(table + 1)
        assert not compiled
        flash_jax.flash_attention(q, k, v, score_mod=Counted(), mod_operands=(table,))
        assert compiled  # so that the line above could fail
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


def test_a_function_that_cannot_be_hashed():
    class Unhashable(Counted):
        __hash__ = None  # pyright: ignore[reportAssignmentType]

    q, k, v = case("B2-T5-S7-f32").arrays()
    table = np.ones((2, 4), np.float32)
    call = functools.partial(flash_jax.flash_attention, q, k, v, mod_operands=(table,))
    np.testing.assert_array_equal(call(score_mod=Unhashable()), call(score_mod=Counted()))


# Memory.


@pytest.mark.parametrize("second", [False, True], ids=["gradients", "second-order"])
def test_no_value_has_the_shape_of_the_scores(implementation, second):
    """Where tables are read by row, key and difference, nothing of T * S elements exists; for a dense table it does."""
    if second and implementation == "triton":
        pytest.skip("second derivatives run the code of xla")
    c = case("T300-S290-H1-K1-D4-f32")
    tiles = flash_jax.BlockSizes(block_q=16, block_kv=16)
    attend = functools.partial(flash_jax.flash_attention, implementation=implementation, block_sizes=tiles)

    def largest(mod, *tables):
        inputs = c.inputs(mod_operands=tables)
        more = (c.inputs(1, mod_operands=tables),) if second else ()
        program = (second_order if second else values_and_gradients)(score_mod=mod)
        return max(lowered_sizes(functools.partial(program, attend), inputs, c.cotangents(), *more))

    assert largest(several, (1, 41), (1, 300), (290, 1)) < 300 * 290
    if not second:
        assert largest(by_entry, (1, 300, 290)) >= 300 * 290
