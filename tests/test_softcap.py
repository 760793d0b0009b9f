"""`softcap`: the scaled score s becomes softcap * tanh(s / softcap), in the values and in every derivative."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flash_jax.tiles import tanh
from flash_jax.triton.instructions import _bent_assembly
from tests.support.accuracy import check
from tests.support.cases import case
from tests.support.programs import Program, everything, forward, second_order, values_and_gradients

pytestmark = pytest.mark.thorough

NAME = "B2-T19-S35-H4-K2-D8-f32"


@pytest.mark.parametrize(
    "dtype, options",
    [
        ("f32", {"softcap": 1.5, "causal": True}),
        ("bf16", {"softcap": 0.7, "kv_lengths": np.array([35, 0])}),
        ("bf16", {"softcap": 30.0, "q_lengths": np.array([7, 19])}),
        ("bf16", {"softcap": 1e3, "causal": True}),
        ("bf16", {"softcap": 1e-9}),
    ],
    ids=str,
)
def test_values_gradients_and_tangents(attend, dtype, options):
    c = case(NAME.replace("f32", dtype))
    check(everything(**options), attend, c.arrays(), c.cotangents(), c.tangents())


@pytest.mark.parametrize(
    "dtype, options",
    [
        ("bf16", {"softcap": 30.0, "scale": 3.0}),
        ("bf16", {"softcap": 50.0, "scale": -20.0, "window": (3, 2)}),
        ("bf16", {"softcap": 55.0, "scale": 2.0, "dropout_rate": 0.3, "dropout_key": jax.random.key(3)}),
        ("f16", {"softcap": 30.0, "scale": 3.0}),
    ],
    ids=lambda x: x if isinstance(x, str) else "-".join(x),
)
def test_large_scores(attend, dtype, options):
    """Of which a row's largest decides, so that the errors of plain attention's tangents are no yardstick."""
    c = case(NAME.replace("f32", dtype))
    check(values_and_gradients(**options), attend, c.arrays(), c.cotangents())


def test_sinks_beside_scores_without_a_maximum(attend):
    """Of low and high sinks, and of a row with nothing but them."""
    c = case(NAME.replace("f32", "bf16"))
    inputs, directions = c.inputs(sinks=(4,)), c.inputs(1, sinks=(4,))
    inputs[3]["sinks"] = np.array([-40, 0, 3, 60], np.float32)
    check(everything(softcap=50.0, kv_lengths=np.array([35, 0])), attend, inputs, c.cotangents(), directions)


def test_bias_and_traced_scale(attend):
    """The cap bends the scaled score and not the bias; eight scales by their gradient, of which each has an example."""
    c = case("B8-T9-S19-H2-D8-f32")
    scales = np.linspace(-1, 3, 8, dtype=np.float32)

    def mapped(attend, inputs, cotangents, directions, scales):
        def one(x, ct, d, scale):
            add = lambda x: (*x[:3], x[3] | {"scale": scale})  # noqa: E731
            return everything()(attend, add(x), ct, add(d))

        return jax.vmap(one)(inputs, cotangents, directions, scales)

    shape = (8, 2, 9, 19)
    given = c.inputs(bias=shape), c.cotangents(), c.inputs(1, bias=shape), scales
    check(Program(mapped, {"softcap": 2.0}, derivative=(False, True, True)), attend, *given)


@pytest.mark.parametrize("softcap, size", [(30.0, 1e20), (50.0, 1e15), (55.0, 1e-2)], ids=str)
def test_all_scores_at_the_cap(attend, softcap, size):
    """The exponentials of all scores of a row are as large, or as small, as they get; and so are the values."""
    c = case("B1-T2-S35-H1-D8-bf16")
    q, k, v = c.arrays()
    q, k = np.stack([np.ones_like(q[:, 0]), -np.ones_like(q[:, 0])], 1), np.full_like(k, 1000)
    check(forward(softcap=softcap), attend, q, k, (np.sign(v) * size).astype(v.dtype))


@pytest.mark.parametrize("inner, outer, offset", [(1.0, 1.0, 0.0), (0.003, 43.0, -14.0), (900.0, 0.2, 0.0)], ids=str)
def test_quick_tanh(inner, outer, offset):
    """From tiny to huge arguments, either formula; 0, infinities and NaN; by JAX and by the assembly of the kernels."""
    x = np.concatenate([np.linspace(-9, 9, 2000), np.geomspace(1e-30, 1e30, 200), [0.0, -0.0, np.inf, -np.inf, np.nan]])
    x = (x / inner).astype(np.float32)
    bend = tanh.Bend(inner, outer, offset)
    expected = outer * np.tanh(x.astype(np.float64) * inner) + offset
    for found in (np.asarray(tanh.bent(jnp.asarray(x), bend)), assembled(x, bend)):
        error = np.abs(found - expected) / np.maximum(np.abs(expected - offset) + abs(offset), 1e-30)
        assert np.nanmax(error) < 4e-7
        assert np.array_equal(np.isnan(found), np.isnan(x))


def assembled(x, bend):
    """What the kernels' instructions give for x, three numbers at a time."""
    parts = np.pad(x, (0, -len(x) % 3)).reshape(-1, 3)
    return np.concatenate([run(_bent_assembly(bend, 3), part) for part in parts])[: len(x)]


EXACT = {
    "fma": lambda a, b, c: a * b + c,
    "mul": lambda a, b: a * b,
    "add": lambda a, b: a + b,
    "rcp": lambda a: 1 / a,
    "ex2": np.exp2,
}


def run(code, x):
    """What these PTX instructions make of the numbers x; each result is rounded once, to float32."""
    known = {f"${len(x) + n}": value for n, value in enumerate(x)}

    def value(name):
        if name.startswith("0f"):
            return np.frombuffer(bytes.fromhex(name[2:]), ">f4")[0]
        return known[name] if name in known else int(name, 0)

    for line in (line.strip("; ") for line in code.splitlines() if line.endswith(";") and not line.startswith(".reg")):
        words = line.replace(",", "").split()
        guard = words.pop(0) if words[0].startswith("@") else None
        operation, result, *names = words
        if guard and known["far"] == (guard == "@!far"):
            continue
        if operation == "bra":
            break
        kind, operands = operation.split(".")[0], [value(name) for name in names]
        if kind in EXACT:
            with np.errstate(all="ignore"):
                known[result] = np.float32(EXACT[kind](*map(np.float64, operands)))
        elif kind == "mov":
            known[result] = int(operands[0].view(np.int32)) if isinstance(operands[0], np.floating) else operands[0]
        elif kind == "lop3":
            known[result] = operands[0] & operands[1] & operands[2]
        else:
            assert operation == "setp.ge.s32"
            known[result] = operands[0] >= operands[1]
    return np.array([known[f"${n}"] for n in range(len(x))])


def test_derivative_of_the_gradients(attend):
    c = case("B2-T9-S19-H4-K2-D8-f32")
    check(second_order(softcap=1.5, causal=True), attend, c.arrays(), c.cotangents(), c.tangents())


def test_scores_far_beyond_the_cap(attend):
    """Scores of 1e10 are the cap: neither infinity nor NaN, and a gradient of 0."""
    c = case("B2-T19-S35-H2-D8-f32")
    q, k, v = c.arrays()
    q, k = (
        np.sign(x) * np.float32(2**17) for x in (q, k)
    )  # powers of 2: a sum of products is 0 exactly, or far from it
    out, pull = jax.vjp(jax.jit(functools.partial(attend, softcap=5.0)), q, k, v)
    dq, dk, dv = pull(np.ones_like(out))
    assert np.isfinite(out).all() and np.isfinite(dv).all() and np.any(dv)
    signs = np.sign(np.einsum("bthd,bshd->bhts", q, k))
    weights = np.exp(5 * signs)
    expected = np.einsum("bhts,bshd->bthd", weights / weights.sum(-1, keepdims=True), v)
    np.testing.assert_allclose(out, expected, rtol=1e-4, atol=1e-5)
    settled = np.all(signs != 0, axis=-1).transpose(0, 2, 1)
    assert not np.any(np.asarray(dq)[settled]) and np.isfinite(dk).all()
