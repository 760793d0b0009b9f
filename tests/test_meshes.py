"""Inputs sharded over a mesh, under plain jit: batch and heads stay where they are, the others are gathered (R16).

Eight virtual devices, as 2 x 4. Results are held to the rule against the reference on whole arrays, and collectives
are counted in the compiled program: none but the sums that gradients of shared inputs need.
"""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import flash_jax
from tests.support.accuracy import assert_accurate, judges
from tests.support.cases import case
from tests.support.programs import values_and_gradients
from tests.support.tiers import every

pytestmark = pytest.mark.multi_device

RNG = np.random.default_rng(0)
BATCH, BOTH, HEADS = P("data"), P("data", None, "model"), P(None, None, "model")
COLLECTIVES = ("all-gather", "all-reduce", "all-to-all", "collective-permute", "reduce-scatter")


def options(**given):
    return given, {}


# name -> (case, partition of query, of key and value, (options, shapes of differentiated operands), sums over devices:
# 0 or more; XLA may join several into one).
CASES = {
    "batch": ("B4-T33-S40-H4-K4-D16-f32", BATCH, BATCH, options(causal=True), 0),
    "heads": ("B2-T33-S40-H8-K4-D16-f32", HEADS, HEADS, options(causal=True), 0),
    "batch-and-heads": ("B4-T33-S40-H8-K4-D16-f32", BOTH, BOTH, options(window=(9, 4)), 0),
    "batch-over-both": ("B8-T20-S24-H2-K1-D16-f32", P(("data", "model")), P(("data", "model")), options(), 0),
    "two-batch-dims": ("B2x4-T20-S24-H2-K1-D16-f32", P("data", "model"), P("data", "model"), options(), 0),
    "half-the-kv-heads": ("B2-T33-S40-H8-K2-D16-f32", BOTH, BATCH, options(causal=True), 1),
    "one-kv-head": ("B2-T33-S40-H8-K1-D16-bf16", BOTH, BATCH, options(causal=True), 1),
    "shared-bias": ("B4-T20-S24-H4-K2-D16-f32", BATCH, BATCH, ({}, {"bias": (1, 4, 20, 24)}), 1),
    "every-shared-operand": (
        "B4-T20-S24-H8-K4-D16-f32", BOTH, BOTH,
        ({"causal": True}, {"bias": (8, 20, 24), "sinks": (8,), "alibi_slopes": (8,)}), 1,
    ),
    "dropout": (
        "B4-T33-S40-H8-K4-D16-f32", BOTH, BOTH, options(dropout_rate=0.3, dropout_key=jax.random.key(3)), 0,
    ),
    "mask-and-lengths": (
        "B4-T33-S40-H4-K4-D16-f32", BATCH, BATCH,
        options(mask=RNG.random((4, 1, 33, 40)) < 0.7, kv_lengths=np.array([3, 20, 40, 11])), 0,
    ),
    "segments": (
        "B4-T40-S40-H8-K4-D16-f32", BOTH, BOTH,
        options(segment_ids=np.sort(RNG.integers(0, 3, (4, 40)), -1).astype(np.int32), causal=True), 0,
    ),
}  # fmt: skip


def mesh_of(kind):
    return jax.make_mesh((2, 4), ("data", "model"), axis_types=(kind, kind))


def place(mesh, arrays, specs, kind):
    """The arrays on the mesh; what has no spec is whole on every device."""
    return jax.tree.map(lambda x, s: jax.device_put(x, NamedSharding(mesh, s)), arrays, specs)


def counted(compiled):
    text = compiled.as_text()
    return {name: len(re.findall(rf"= [^\n]* {name}(?:-start)?\(", text)) for name in COLLECTIVES}


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
@pytest.mark.parametrize("name", every(5, CASES))
def test_batch_and_heads_stay_sharded(attend, name, kind):
    text, of_query, of_key, (given, shapes), sums = CASES[name]
    c, mesh = case(text), mesh_of(kind)
    program, inputs, cotangents = values_and_gradients(**given), c.inputs(**shapes), c.cotangents()
    with jax.set_mesh(mesh):
        of_lse = P(*of_query[: len(c.batch)], *(of_query[-1:] if len(of_query) > len(c.batch) + 1 else ()))
        specs = (of_query, of_key, of_key, dict.fromkeys(shapes, P()))
        placed = place(mesh, (inputs, cotangents), (specs, (of_query, of_lse)), kind)
        compiled = jax.jit(functools.partial(program, attend)).lower(*placed).compile()
        found = compiled(*placed)
    out = jax.tree.leaves(found)[0]
    assert out.sharding.is_equivalent_to(NamedSharding(mesh, of_query), out.ndim)
    for actual, oracle, plain, derivative in zip(
        *(jax.tree.leaves(x) for x in (found, *judges(program, inputs, cotangents))),
        [n > 1 for n in range(len(jax.tree.leaves(found)))],
        strict=True,
    ):
        assert_accurate(actual, oracle, plain, derivative=derivative, name=name)
    collectives = counted(compiled)
    reduces = collectives.pop("all-reduce")
    # (A gradient of something whole on explicit axes is added up over all of them, also where one has it.)
    assert (reduces > 0) == (sums > 0) or kind == AxisType.Explicit and reduces <= 5
    if kind == AxisType.Auto or not shapes:  # an explicit gradient of a whole operand is gathered to be whole again
        assert sum(collectives.values()) == 0, collectives


def test_cotangents_that_arrive_with_another_sharding(attend):
    c, mesh = case("B4-T33-S40-H8-K4-D16-f32"), mesh_of(AxisType.Auto)
    program, inputs, (dout, dlse) = values_and_gradients(causal=True), c.inputs(), c.cotangents()
    with jax.set_mesh(mesh):
        placed = [jax.device_put(x, NamedSharding(mesh, BOTH)) for x in inputs[:3]]
        elsewhere = jax.device_put(dout, NamedSharding(mesh, P("model", None, "data")))
        found = jax.jit(functools.partial(program, attend))((*placed, {}), (elsewhere, dlse))
    oracle, plain = judges(program, inputs, (dout, dlse))
    for n, leaves in enumerate(zip(*map(jax.tree.leaves, (found, oracle, plain)), strict=True)):
        assert_accurate(*leaves, derivative=n > 1)


def test_dropout_keeps_the_same_as_on_one_device(implementation):
    c, mesh = case("B4-T20-S24-H8-K8-D16-f32"), mesh_of(AxisType.Auto)
    q, k, v = c.arrays()
    drop = {"dropout_rate": 0.5, "dropout_key": jax.random.key(1), "implementation": implementation}
    attend = jax.jit(functools.partial(flash_jax.flash_attention, **drop))
    placed = [jax.device_put(x, NamedSharding(mesh, BOTH)) for x in (q, k, v)]
    # XLA sums in another order on a part of the array; another kept set would differ by more than anything here allows.
    np.testing.assert_allclose(attend(*placed), attend(q, k, v), rtol=1e-5, atol=1e-5)


def test_vmap_over_a_dim_that_an_explicit_axis_cuts(attend):
    """While another axis cuts the heads."""
    c, mesh = case("B4-T9-S12-H8-K4-D8-f32"), mesh_of(AxisType.Explicit)

    def passes(q, k, v):
        f = functools.partial(attend, causal=True)
        gradients = jax.vmap(jax.grad(lambda *x: (f(*x) ** 2).sum(), (0, 1, 2)))(q, k, v)
        return jax.vmap(f)(q, k, v), gradients, jax.jvp(jax.vmap(f), (q, k, v), (q, k, v))

    with jax.set_mesh(mesh):
        placed = [jax.device_put(x, NamedSharding(mesh, BOTH)) for x in c.arrays()]
        found = jax.jit(passes)(*placed)
        assert found[0].sharding.spec == P("data", None, "model", None)
    for x, y in zip(*map(jax.tree.leaves, (found, jax.jit(passes)(*c.arrays()))), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-4)


def test_no_tracer_is_kept(attend):
    x = jnp.ones((1, 8, 2, 4))
    with jax.checking_leaks():
        jax.jit(attend)(x, x, x)


def test_a_table_that_is_sharded_by_heads_is_refused_by_its_name():
    mesh = mesh_of(AxisType.Explicit)
    with jax.set_mesh(mesh):
        x, table = jnp.ones((2, 8, 4, 4)), jax.device_put(jnp.ones((2, 4)), NamedSharding(mesh, P(None, "model")))
        with pytest.raises(NotImplementedError, match=r"Dim -1 of `mod_operands\[0\]` is sharded"):
            jax.jit(lambda x, t: flash_jax.flash_attention(x, x, x, score_mod=by_head, mod_operands=(t,)))(x, table)


def by_head(score, b, h, i, j, table):
    return score + table[b, h]


def test_gradient_of_scale(attend):
    """One number, to which all devices add: as on one device, but for the order of the sum."""
    c, mesh = case("B4-T33-S40-H8-K4-D16-f32"), mesh_of(AxisType.Auto)
    inputs, dout = c.arrays(), c.cotangents()[0]
    f = jax.jit(jax.grad(lambda scale, *qkv: (attend(*qkv, scale=scale) * dout).sum()))
    placed = [jax.device_put(x, NamedSharding(mesh, BOTH)) for x in inputs]
    np.testing.assert_allclose(f(jnp.float32(0.3), *placed), f(jnp.float32(0.3), *inputs), rtol=1e-5)


@pytest.mark.thorough
@pytest.mark.parametrize("heads", [(8, 4), (8, 2)], ids=["kv-heads-cut", "kv-heads-whole"])
def test_mods_count_batch_and_heads_over_all_devices(attend, heads):
    """And the gradients of what they read are those of one device."""
    (H, K), mesh = heads, mesh_of(AxisType.Auto)
    c = case(f"B4-T20-S24-H{H}-K{K}-D16-f32")
    q, k, v = c.arrays()
    normal = lambda *shape: jnp.asarray(RNG.normal(size=shape), jnp.float32)  # noqa: E731
    operands = normal(H, 41), normal(4, 20), normal(24, H), normal(4, H, 20, 24)

    def score_mod(score, b, h, i, j, *tables):
        by_distance, by_row, by_column, dense = tables
        return score + by_distance[h, i - j + 20] * by_row[b, i] + by_column[j, h] + dense[b, h, i, j]

    def mask_mod(b, h, i, j, *_):
        return (i + j + b + h) % 5 != 0

    def loss(q, k, v, operands):
        out = attend(q, k, v, score_mod=score_mod, mask_mod=mask_mod, mod_operands=operands)
        return (out * c.cotangents()[0]).sum(), out

    f = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2, 3), has_aux=True))
    expected = f(q, k, v, operands)
    of_key = BOTH if K % 4 == 0 else BATCH
    placed = [jax.device_put(x, NamedSharding(mesh, s)) for x, s in ((q, BOTH), (k, of_key), (v, of_key))]
    found = f(*placed, operands)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5 * float(np.abs(b).max()))  # sums in another order


def score_mod(score, b, h, i, j, by_distance, by_row):
    return score + by_distance[h, i - j + 39] * by_row[b, i]


# Under automatic axes: options, and shapes of what is differentiated besides.
OF_ROWS = {
    "causal": ({"causal": True}, {}),
    "window-and-lengths": ({"window": (9, 4), "q_lengths": np.array([32, 13]), "kv_lengths": 33}, {}),
    "bias-and-sinks": ({"chunk_size": 7}, {"bias": (1, 2, 32, 40), "sinks": (2,), "alibi_slopes": (2,)}),
    "dropout": ({"dropout_rate": 0.3, "dropout_key": jax.random.key(3)}, {}),
    "mods": ({"score_mod": score_mod}, {"mod_operands": ((2, 72), (2, 32))}),
    "positions": ({"causal": True, "q_positions": RNG.permutation(64).reshape(2, 32)}, {}),
}


@pytest.mark.thorough
@pytest.mark.parametrize("name", OF_ROWS)
def test_queries_stay_sharded_and_keys_are_gathered_under_automatic_axes(attend, name):
    given, shapes = OF_ROWS[name]
    c, mesh = case("B2-T32-S40-H2-K2-D16-f32"), mesh_of(AxisType.Auto)
    program, inputs, cotangents = values_and_gradients(**given), c.inputs(**shapes), c.cotangents()
    rows = NamedSharding(mesh, P("data", "model"))
    placed = tuple(jax.device_put(x, rows) for x in inputs[:3])
    compiled = jax.jit(functools.partial(program, attend)).lower((*placed, inputs[3]), cotangents).compile()
    found = compiled((*placed, inputs[3]), cotangents)
    oracle, plain = judges(program, inputs, cotangents)
    for n, leaves in enumerate(zip(*map(jax.tree.leaves, (found, oracle, plain)), strict=True)):
        assert_accurate(*leaves, derivative=n > 1)
    out, dq = jax.tree.leaves(found)[0], jax.tree.leaves(found)[2]
    assert out.sharding.is_equivalent_to(rows, 4) and dq.sharding.is_equivalent_to(rows, 4)
    assert counted(compiled)["all-gather"] == 2  # of key and value


def test_a_sharded_sequence_on_explicit_axes_is_refused(attend):
    mesh = mesh_of(AxisType.Explicit)
    with jax.set_mesh(mesh):
        x = jax.device_put(jnp.ones((2, 32, 2, 16)), NamedSharding(mesh, P("data", "model")))
        with pytest.raises(
            NotImplementedError, match=r"Dim -3 of `query` is sharded over the explicit mesh axes \['mod"
        ):
            jax.jit(attend)(x, x, x)


def test_d15_a_mask_for_all_examples_beside_sharded_ones(attend):
    c, mesh = case("B4-T20-S24-H4-K2-D16-f32"), mesh_of(AxisType.Auto)
    program = values_and_gradients(mask=RNG.random((1, 1, 20, 24)) < 0.7)
    check_sharded(attend, program, c, mesh, (BATCH, BATCH, BATCH))


def test_h03_a_gradient_inside_shard_map_sums_nothing():
    import flash_jax

    mesh, spec = mesh_of(AxisType.Auto), P("data", None, "model")
    x = jnp.ones((2, 32, 4, 16))

    def loss(q, k, v):
        return flash_jax.flash_attention(q, k, v, causal=True, implementation="xla").sum()

    part = jax.shard_map(jax.grad(loss, (0, 1, 2)), mesh=mesh, in_specs=spec, out_specs=spec)  # check_vma on
    assert sum(counted(jax.jit(part).lower(x, x, x).compile()).values()) == 0


def test_h07_only_some_inputs_are_sharded(attend):
    c, mesh = case("B4-T20-S24-H4-K2-D16-f32"), mesh_of(AxisType.Auto)
    check_sharded(attend, values_and_gradients(causal=True), c, mesh, (BATCH, BATCH, P()))


def check_sharded(attend, program, c, mesh, specs):
    inputs, cotangents = c.inputs(), c.cotangents()
    placed = tuple(jax.device_put(x, NamedSharding(mesh, s)) for x, s in zip(inputs[:3], specs, strict=True))
    found = jax.jit(functools.partial(program, attend))((*placed, {}), cotangents)
    for n, leaves in enumerate(zip(*map(jax.tree.leaves, (found, *judges(program, inputs, cotangents))), strict=True)):
        assert_accurate(*leaves, derivative=n > 1)
