"""The op under JAX's transformations: each gives what the reference gives under the same one (R16)."""

import functools

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest

import flash_jax
from tests.support.accuracy import check
from tests.support.cases import case
from tests.support.programs import Program, second_order
from tests.support.structure import named

ONE = "B2-T19-S23-H4-K2-D8-f32"
TINY = "T3-S4-H2-K1-D2-f32"
FORWARD, TANGENT, BACKWARD = (f"flash_attention_{name}" for name in ("forward", "tangent", "backward"))


def loss(attend, *inputs):
    """A scalar through which both results matter and neither outweighs the other."""
    out, lse = attend(*inputs, return_lse=True)
    return jnp.sum(out.astype(lse.dtype) ** 2) + 0.1 * jnp.sum(jnp.where(lse > -jnp.inf, lse, 0.0) ** 2)


def gradient(attend, *inputs):
    """Gradients of `loss` by all three inputs."""
    return jax.grad(functools.partial(loss, attend), argnums=(0, 1, 2))(*inputs)


# Derivatives of every order and mode.


@pytest.mark.parametrize(
    "options, dtype",
    [({"causal": True}, "f32"), ({"window": (6, 2), "kv_lengths": np.array([23, 11])}, "bf16")],
    ids=["causal-f32", "window-and-lengths-bf16"],
)
def test_derivative_of_the_gradients(attend, options, dtype):
    c = case(ONE.replace("f32", dtype))
    check(second_order(**options), attend, c.arrays(), c.cotangents(), c.tangents())


@pytest.mark.thorough
def test_gradient_of_a_function_of_the_gradient(attend):
    def twice(attend, *x):
        return jax.grad(lambda q, k, v: sum(jnp.vdot(g, g) for g in gradient(attend, q, k, v)), argnums=(0, 1, 2))(*x)

    check(Program(twice, {"causal": True}, derivative=True), attend, *case(ONE).arrays())


def test_gradient_of_a_tangent(attend):
    c = case(ONE)

    def reverse_over_forward(attend, inputs, directions):
        along = lambda *x: jax.jvp(functools.partial(loss, attend), x, directions)[1]  # noqa: E731
        return jax.grad(along, argnums=(0, 1, 2))(*inputs)

    check(Program(reverse_over_forward, {"causal": True}, derivative=True), attend, c.arrays(), c.tangents())


@pytest.mark.thorough
def test_tangent_of_a_tangent(attend):
    c = case(ONE)

    def forward_over_forward(attend, inputs, first, second):
        along = lambda *x: jax.jvp(lambda *y: attend(*y, return_lse=True), x, first)[1]  # noqa: E731
        return jax.jvp(along, inputs, second)[1]

    program = Program(forward_over_forward, {"causal": True}, derivative=True)
    check(program, attend, c.arrays(), c.tangents(), c.tangents(seed=5))


@pytest.mark.thorough
def test_second_derivative_by_the_scale(attend):
    def by_scale(attend, q, k, v, scale):
        return jax.grad(jax.grad(lambda s: loss(functools.partial(attend, scale=s), q, k, v)))(scale)

    check(Program(by_scale, {"causal": True}, derivative=True), attend, *case(ONE).arrays(), np.float32(0.4))


@pytest.mark.thorough
@pytest.mark.parametrize("jacobian", [jax.jacfwd, jax.jacrev, jax.hessian])
def test_jacobians(attend, jacobian):
    """Case H13."""

    def of_query(attend, q, k, v):
        function = loss if jacobian is jax.hessian else lambda attend, *x: attend(*x, return_lse=True)
        return jacobian(lambda q: function(attend, q, k, v))(q)

    check(Program(of_query, {"causal": True}, derivative=True), attend, *case(TINY).arrays())


@pytest.mark.thorough
def test_linearize_and_its_transpose(attend):
    c = case(ONE)

    def linear(attend, inputs, directions, cotangents):
        values, line = jax.linearize(lambda *x: attend(*x, return_lse=True), *inputs)
        return values, (line(*directions), jax.linear_transpose(line, *inputs)(cotangents))

    program = Program(linear, {"causal": True}, derivative=(False, True))
    check(program, attend, c.arrays(), c.tangents(), c.cotangents())


def test_linear_function_applied_twice_costs_one_forward_pass():
    """The residuals of `linearize` are (out, lse): applying it runs the tangent pass, never the forward again."""
    inputs, directions = case(ONE).arrays(), case(ONE).tangents()
    _, line = jax.linearize(functools.partial(flash_jax.flash_attention, causal=True), *inputs)
    assert not named(FORWARD, line, *directions) and len(named(TANGENT, line, *directions)) == 1


# vmap.


@pytest.mark.parametrize("axes", [(0, None, None), (None, 0, 0), (None, None, 0), (1, 0, 2)], ids=str)
def test_vmap_over_any_subset_and_axis(attend, axes):
    q, k, v = case("B3-T9-S12-H4-K2-D8-f32").arrays()
    arrays = [x[0] if axis is None else np.moveaxis(x, 0, axis) for x, axis in zip((q, k, v), axes, strict=True)]

    def mapped(attend, *x):
        value = jax.vmap(lambda *y: attend(*y, return_lse=True), in_axes=axes)(*x)
        return value, jax.vmap(functools.partial(gradient, attend), in_axes=axes)(*x)

    check(Program(mapped, {"causal": True}, derivative=(False, True)), attend, *arrays)


def test_gradient_of_vmap_sums_over_what_is_not_mapped(attend):
    q, k, v = case("B3-T9-S12-H4-K2-D8-f32").arrays()

    def summed(attend, q, k, v):
        mapped = jax.vmap(functools.partial(loss, attend), in_axes=(0, None, 0))
        return jax.grad(lambda *x: mapped(*x).sum(), argnums=(0, 1, 2))(q, k, v)

    dq, dk, dv = check(Program(summed, {"causal": True}, derivative=True), attend, q, k[0], v)
    assert dk.shape == k[0].shape


@pytest.mark.thorough
def test_nested_vmap_with_options_that_are_mapped_too(attend):
    """Two mapped axes over different subsets; lengths go with one, the scale with the other, the offset is traced."""
    q, k, v = case("B2x3-T9-S12-H4-K2-D8-f32").arrays()
    lengths, scales = np.array([12, 5, 0]), np.array([0.3, -0.2], np.float32)

    def nested(attend, q, k, v, lengths, scales, offset):
        one = lambda q, k, v, n, s: attend(q, k, v, kv_lengths=n, scale=s, q_offset=offset, return_lse=True)  # noqa: E731
        inner = jax.vmap(one, in_axes=(0, None, 0, 0, None))
        outer = jax.vmap(inner, in_axes=(0, 0, None, None, 0))
        value = outer(q, k, v, lengths, scales)
        pulled = jax.grad(lambda *x: (outer(*x, lengths, scales)[0] ** 2).sum(), argnums=(0, 1, 2))(q, k, v)
        return value, pulled

    program = Program(nested, {"causal": True}, derivative=(False, True))
    check(program, attend, q, k[:, 0], v[0], lengths, scales, np.int32(2))


def test_vmap_inside_a_batch(attend):
    """The mapped axis joins leading dims that are there already (case C06, without a mask)."""
    q, k, v = case("B2-T9-S12-H6-K2-D8-bf16").arrays()
    many = [np.stack([x, 2 * x, -x], axis=1) for x in (q, k)]

    def mapped(attend, q, k, v):
        per_example = jax.vmap(functools.partial(gradient, attend), in_axes=(1, 1, None), out_axes=1)
        return jax.vmap(attend, in_axes=(1, 1, None))(q, k, v), per_example(q, k, v)

    check(Program(mapped, {"causal": True}, derivative=(False, True)), attend, *many, v)


@pytest.mark.parametrize("function", [lambda a, *x: a(*x), gradient], ids=["forward", "gradient"])
def test_what_is_not_mapped_is_not_copied(function):
    """Each pass gets an unmapped key and value once, with a leading dim of 1, and not once for each example."""
    q, k, v = case("B5-T9-S12-H4-K2-D8-f32").arrays()
    attend = functools.partial(flash_jax.flash_attention, causal=True)
    mapped = jax.vmap(functools.partial(function, attend), in_axes=(0, None, None))
    calls = [e for name in (FORWARD, BACKWARD) for e in named(name, mapped, q, k[0], v[0])]
    assert calls
    for equation in calls:
        assert [x.aval.shape for x in equation.invars[:3]] == [q.shape, (1, *k.shape[1:]), (1, *v.shape[1:])]


# Control flow.


def test_scan(attend):
    """Layers in a loop: values and gradients through all of them."""
    q, k, v = case("B3x2-T9-S9-H2-D8-f32").arrays()

    def layers(attend, x, ks, vs):
        def run(x, ks, vs):
            return jax.lax.scan(lambda x, kv: (x + attend(x, *kv), None), x, (ks, vs))[0]

        return run(x, ks, vs), jax.grad(lambda *y: (run(*y) ** 2).sum(), argnums=(0, 1, 2))(x, ks, vs)

    check(Program(layers, {"causal": True}, derivative=(False, True)), attend, q[0], k, v)


def test_while_loop_and_cond(attend):
    q, k, v = case("B2-T9-S9-H2-D8-f32").arrays()

    def loops(attend, q, k, v, count):
        step = lambda s: (s[0] + 1, attend(s[1], k, v))  # noqa: E731
        turned = jax.lax.while_loop(lambda s: s[0] < count, step, (jnp.int32(0), q))[1]
        branch = jax.lax.cond(count > 2, lambda x: attend(x, k, v), lambda x: attend(x, v, k), turned)
        return turned, branch

    for count in (2, 3):
        check(Program(loops, {"causal": True}), attend, q, k, v, np.int32(count))


@pytest.mark.thorough
def test_gradient_through_cond(attend):
    def branches(attend, q, k, v, which):
        run = lambda *x: jax.lax.switch(which, [attend, lambda q, k, v: attend(q, v, k), lambda q, k, v: q], *x)  # noqa: E731
        return jax.grad(lambda *x: (run(*x) ** 2).sum(), argnums=(0, 1, 2))(q, k, v)

    arrays = case("B2-T9-S9-H2-D8-f32").arrays()
    for which in (0, 2):
        check(Program(branches, {"causal": True}, derivative=True), attend, *arrays, np.int32(which))


# Rematerialisation: case H01.


def test_checkpoint(attend):
    """The shapes of the case, with a key length in the place of its mask; alone and in a scan."""
    c = case("B3-T16-S17-H5-D19-f32")

    def alone(attend, *inputs):
        return jax.grad(jax.checkpoint(functools.partial(loss, attend)), argnums=(0, 1, 2))(*inputs)

    def in_scan(attend, q, k, v):
        body = jax.checkpoint(lambda x, _: (x + attend(x, k, v), None))
        return jax.grad(lambda q: (jax.lax.scan(body, q, length=2)[0] ** 2).sum())(q)

    options = {"kv_lengths": np.array([17, 4, 0])}
    for function in (alone, in_scan):
        check(Program(function, options, derivative=True), attend, *c.arrays())


def launches(policy):
    """How often each pass runs in the gradient of a checkpointed function under `policy`."""
    attend = functools.partial(flash_jax.flash_attention, causal=True)
    function = jax.grad(jax.checkpoint(functools.partial(loss, attend), policy=policy), argnums=(0, 1, 2))
    arrays = case(ONE).arrays()
    return {name: len(named(name, function, *arrays)) for name in (FORWARD, TANGENT, BACKWARD)}


def test_forward_runs_once_where_its_results_are_saved_by_name():
    names = jax.checkpoint_policies.save_only_these_names("flash_attention_out", "flash_attention_lse")
    assert launches(names) == {FORWARD: 1, TANGENT: 0, BACKWARD: 1}


def test_forward_runs_twice_where_nothing_is_saved():
    assert launches(jax.checkpoint_policies.nothing_saveable) == {FORWARD: 2, TANGENT: 0, BACKWARD: 1}


def test_gradient_runs_one_forward_and_one_backward_pass():
    arrays = case(ONE).arrays()
    function = functools.partial(gradient, flash_jax.flash_attention)
    assert [len(named(name, function, *arrays)) for name in (FORWARD, TANGENT, BACKWARD)] == [1, 0, 1]


def test_tangent_runs_one_forward_and_one_tangent_pass():
    c = case(ONE)
    function = functools.partial(jax.jvp, flash_jax.flash_attention)
    assert [len(named(name, function, c.arrays(), c.tangents())) for name in (FORWARD, TANGENT, BACKWARD)] == [1, 1, 0]


def test_a_frozen_input_costs_no_gradient():
    """`backward` is asked for the gradients that are wanted, and for no other."""
    q, k, v = case(ONE).arrays()
    (equation,) = named(BACKWARD, jax.grad(lambda v: flash_jax.flash_attention(q, k, v).sum()), v)
    assert [x.aval.shape for x in equation.outvars] == [v.shape]


# Export.


def test_export_and_back():
    c = case(ONE)
    program = jax.jit(functools.partial(gradient, functools.partial(flash_jax.flash_attention, causal=True)))
    exported = jax.export.deserialize(jax.export.export(program)(*c.arrays()).serialize())
    for found, expected in zip(exported.call(*c.arrays()), program(*c.arrays()), strict=True):
        np.testing.assert_array_equal(found, expected)


@pytest.mark.thorough
@pytest.mark.parametrize("D", [16, 64, 80])
def test_gradient_of_what_vmap_shares(attend, D):
    """Summed over the examples: in float32, whose tiles are cut otherwise than those of 16 bits."""
    c = case(f"B3-T20-S24-H2-K1-D{D}-bf16")
    q, k, v = c.arrays()

    def shared(attend, q, k, v, dout):
        def mapped(k, v):
            return jax.vmap(lambda q: attend(q, k, v, causal=True))(q)

        return jax.vjp(mapped, k, v)[1](dout)

    check(Program(shared, derivative=True), attend, q, k[0], v[0], c.cotangents()[0])
