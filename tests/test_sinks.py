"""`sinks`: one more term exp(sink) in each row's sum, which takes weight and gives no value; differentiable."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support.accuracy import assert_agrees, check
from tests.support.cases import FEWER_QUERIES, MORE_QUERIES, case
from tests.support.programs import Program, everything, forward, second_order, values_and_gradients

pytestmark = pytest.mark.thorough


@pytest.mark.parametrize(
    "name, shape, options",
    [
        (FEWER_QUERIES, (4,), {"q_lengths": np.array([19, 5]), "kv_lengths": np.array([35, 0])}),
        (MORE_QUERIES, (2, 4), {"causal": True}),
    ],
    ids=["H-dead-rows", "B-H-causal-bf16"],
)
def test_values_gradients_and_tangents(attend, name, shape, options):
    """Dead rows, by lengths and by causal with more queries than keys, have the sink as their log-sum-exp."""
    c = case(name)
    given = c.inputs(sinks=shape), c.cotangents(), c.inputs(1, sinks=shape)
    (out, lse), (*_, operands), _ = check(everything(**options), attend, *given)
    assert operands["sinks"].shape == shape and np.isfinite(lse).all()
    dead = np.s_[1, 5:] if "q_lengths" in options else np.s_[:, :16]
    assert not np.any(out[dead])


def test_equals_a_key_without_a_value(attend):
    """A key whose score is the sink, and whose value is 0."""
    q, k, v = case("T19-S35-H1-D8-f32").arrays()
    q[..., 0] = 1
    key = np.zeros((1, 1, 8), np.float32)
    key[..., 0] = 0.7
    one_more = np.concatenate([k, key]), np.concatenate([v, np.zeros_like(key)])
    found = attend(q, k, v, scale=1.0, sinks=np.array([0.7], np.float32), return_lse=True)
    assert_agrees(found, forward(scale=1.0), q, *one_more)


@pytest.mark.parametrize("sink", [-np.inf, 1e30])
def test_extreme_sinks(attend, sink):
    """One that takes nothing is no sink; one that takes all leaves zeros, and no gradient to query, key and value."""
    c = case("B2-T19-S35-H2-D8-f32")
    q, k, v = c.arrays()
    program = jax.jit(functools.partial(values_and_gradients(sinks=np.full(2, sink, np.float32)), attend))
    (out, lse), found = program((q, k, v), c.cotangents())
    if sink < 0:
        assert_agrees(((out, lse), found), values_and_gradients(), (q, k, v), c.cotangents())
    else:
        assert not np.any(out) and (np.asarray(lse) == sink).all() and not any(np.any(g) for g in found)


@pytest.mark.parametrize("name", ["B2-T5-S0-H2-f32", "B2-T0-S5-H2-f32"])
def test_no_keys_or_no_queries(attend, name):
    c = case(name)
    given = c.inputs(sinks=(2,)), c.cotangents(), c.inputs(1, sinks=(2,))
    check(everything(), attend, *given)


def test_gradient_of_vmap_sums_over_the_examples(attend):
    c = case("B3-T9-S19-H4-K2-D8-f32")

    def summed(attend, q, k, v, sinks):
        one = jax.vmap(lambda q, s: attend(q, k, v, sinks=s), in_axes=(0, None))
        return {"sinks": jax.grad(lambda s: (one(q, s) ** 2).sum())(sinks)}

    (q, k, v), sinks = c.arrays(), c.normal((4,), 0, "sinks")
    check(Program(summed, derivative=True), attend, q, k[0], v[0], sinks)


def test_derivative_of_the_gradients(attend):
    c = case("B2-T9-S19-H4-K2-D8-f32")
    given = c.inputs(sinks=(2, 4)), c.cotangents(), c.inputs(1, sinks=(2, 4))
    check(second_order(q_lengths=np.array([9, 4])), attend, *given)


def test_sinks_keep_their_dtype(attend):
    c = case("B2-T9-S19-H4-K2-D8-bf16")
    sinks = c.normal((4,), 0, "sinks")
    gradient = jax.grad(lambda s: attend(*c.arrays(), sinks=s).astype(jnp.float32).sum())(sinks)
    assert gradient.dtype == sinks.dtype and np.any(gradient)
