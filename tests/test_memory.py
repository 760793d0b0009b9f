"""Memory grows with T + S, never with T * S: read from the compiled programs' own analysis (R15).

The reference, which is quadratic, shows that the same measure finds a quadratic program.
"""

import functools

import jax
import jax.numpy as jnp
import pytest

import flash_jax
from tests.support import programs
from tests.support.cases import case
from tests.support.oracle import reference_attention
from tests.support.structure import lowered_sizes, temporary_bytes

SHORT, LONG = 2048, 8192


def call(kind, length):
    """The program called `kind`, and the abstract arrays of one causal call of this length."""
    c = case(f"B1-T{length}-H2-K1-D32-f32")
    array = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
    inputs = array((1, length, 2, 32)), array((1, length, 1, 32)), array((1, length, 1, 32))
    cotangents = array((1, length, 2, 32)), array((1, 2, length))
    assert inputs[0].shape == (*c.batch, c.T, c.H, c.D)
    arguments = {
        "forward": inputs,
        "gradients": (inputs, cotangents),
        "tangents": (inputs, inputs),
        "second_order": (inputs, cotangents, inputs),
    }
    return getattr(programs, kind)(causal=True), arguments[kind]


KINDS = ["forward", "gradients", "tangents", "second_order"]


@pytest.mark.parametrize("kind, implementation", [*((kind, "xla") for kind in KINDS), ("gradients", None)], ids=str)
def test_temporary_memory_is_linear(kind, implementation):
    attend = functools.partial(flash_jax.flash_attention, implementation=implementation)
    short, long = (
        temporary_bytes(functools.partial(program, attend), *arguments)
        for program, arguments in (call(kind, SHORT), call(kind, LONG))
    )
    one_matrix_of_scores = 2 * LONG * LONG * 4
    assert long < one_matrix_of_scores / 4, f"{long} bytes at length {LONG}"
    assert long <= (LONG // SHORT) * short, f"{short} bytes at length {SHORT}, {long} at {LONG}"


def test_the_reference_is_found_quadratic():
    program, arguments = call("forward", LONG)
    assert temporary_bytes(functools.partial(program, reference_attention), *arguments) >= 2 * LONG * LONG * 4


@pytest.mark.parametrize("kind", KINDS)
def test_no_value_has_the_shape_of_the_scores(attend, kind):
    """In the lowered program: nothing of T * S elements or more, of any shape, in interpret mode too."""
    c = case("T300-S290-H1-K1-D4-f32")
    arguments = {
        "forward": c.arrays(),
        "gradients": (c.arrays(), c.cotangents()),
        "tangents": (c.arrays(), c.tangents()),
        "second_order": (c.arrays(), c.cotangents(), c.tangents()),
    }[kind]
    program = getattr(programs, kind)(causal=True)
    assert max(lowered_sizes(functools.partial(program, attend), *arguments)) < 300 * 290
    assert max(lowered_sizes(functools.partial(program, reference_attention), *arguments)) >= 300 * 290
