"""A sequence that devices share (`context_axis`): every strategy and option gives what one device gives (R24).

Eight virtual devices, as 2 x 4: batch over two, sequences over four. Results are held to the rule against the
reference on whole arrays.
"""

import functools
import re

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import flash_jax
from flash_jax import context_parallel
from tests.support.accuracy import assert_accurate, assert_same_in_float64, judges
from tests.support.cases import case
from tests.support.programs import second_order, tangents, values_and_gradients

pytestmark = pytest.mark.multi_device

RNG = np.random.default_rng(0)
IDS, PLACES = RNG.integers(-1, 3, (2, 40)), RNG.permutation(80).reshape(2, 40)
SIZES = "B2-T24-S40-H8-K4-D16"
COLLECTIVES = ("all-gather", "all-reduce", "all-to-all", "collective-permute", "reduce-scatter")
ROWS, KEYS, STATS = P("data", "seq"), P("data", "seq"), P("data", None, "seq")
OF_ROWS = {"q_positions": P("data", "seq"), "q_segment_ids": P("data", "seq")}
OF_KEYS = {"kv_positions": P("data", "seq"), "kv_segment_ids": P("data", "seq")}
LENGTHS = {"kv_lengths": P("data"), "q_lengths": P("data"), "q_offset": P("data"), "prefix_lengths": P("data")}
DENSE = {"bias": P("data", None, "seq"), "mask": P("data", None, "seq")}
PARTS = OF_ROWS | OF_KEYS | LENGTHS | DENSE


def score_mod(score, b, h, i, j, *tables):
    by_distance, by_row, by_column, dense = tables
    return score + by_distance[h, i - j + 39] * by_row[b, i] + by_column[j, h] + dense[h, i, j]


def mask_mod(b, h, i, j, *_):
    return (i + j + b + h) % 5 != 0


# Options, and shapes of operands that are differentiated. Numbers of an example differ between examples.
CASES = {
    "plain": ({}, {}),
    "causal": ({"causal": True}, {}),
    "window": ({"window": (9, 4), "q_offset": 7}, {}),
    "lengths": ({"causal": True, "kv_lengths": np.array([13, 40]), "q_lengths": np.array([24, 9])}, {}),
    "segments": ({"q_segment_ids": np.sort(IDS[:, :24], -1), "kv_segment_ids": IDS}, {}),
    "positions": ({"causal": True, "q_positions": PLACES[:, :24], "kv_positions": PLACES[::-1]}, {}),
    "query-positions": ({"window": (20, 8), "q_positions": PLACES[:, 16:]}, {}),
    "prefix": ({"causal": True, "prefix_lengths": np.array([3, 30]), "q_offset": np.array([0, 5])}, {}),
    "chunk": ({"causal": True, "chunk_size": 7}, {}),
    "bias": ({"softcap": 3.0}, {"bias": (2, 8, 24, 40)}),
    "bias-by-key": ({}, {"bias": (2, 1, 1, 40)}),
    "bias-by-query": ({}, {"bias": (2, 8, 24, 1), "sinks": (8,)}),
    "mask": ({"mask": RNG.random((2, 1, 24, 40)) < 0.6}, {}),
    "shared": ({"causal": True}, {"scale": (), "alibi_slopes": (8,), "sinks": (8,)}),
    "dropout": ({"dropout_rate": 0.3, "dropout_key": jax.random.key(3)}, {}),
    "mods": (
        {"score_mod": score_mod, "mask_mod": mask_mod}, {"mod_operands": ((8, 80), (2, 24), (40, 8), (8, 24, 40))},
    ),
}  # fmt: skip


def mesh_of(kind, data=2):
    return jax.make_mesh((data, 4), ("data", "seq"), axis_types=(kind, kind), devices=jax.devices()[: 4 * data])


def shared(attend, strategy, mesh, query, key, value, **options):
    """`attend` inside a shard_map over a mesh, with out and lse as the whole arrays that the parts make."""
    arrays = {name: x for name, x in options.items() if hasattr(x, "shape") or name == "mod_operands"}
    fixed = {name: x for name, x in options.items() if name not in arrays and name != "return_lse"}

    def partition(name, x):
        if name not in PARTS:
            return jax.tree.map(lambda _: P(), x)
        return P(*(axis if n > 1 else None for axis, n in zip(PARTS[name], x.shape, strict=False)))

    def one(query, key, value, arrays):
        found = attend(
            query, key, value, **fixed, **arrays, context_axis="seq", context_strategy=strategy, return_lse=True
        )
        return found

    specs = (ROWS, KEYS, KEYS, {name: partition(name, x) for name, x in arrays.items()})
    # JAX's interpreter of kernels does not say how its values vary over a mesh.
    checked = attend.keywords["implementation"] != "triton"
    mapped = jax.shard_map(one, mesh=mesh, in_specs=specs, out_specs=(ROWS, STATS), check_vma=checked)
    return mapped(query, key, value, arrays)


def check(program, attend, *arrays, name):
    found = jax.jit(functools.partial(program, attend))(*arrays)
    for n, leaves in enumerate(zip(*map(jax.tree.leaves, (found, *judges(program, *arrays))), strict=True)):
        assert_accurate(*leaves, derivative=n > 1, name=f"{name}, result {n}")


ALONE = ("dropout", "mods")  # which count examples, and so those of a device: here it has all of them


def check_options(attend, name, strategy):
    given, shapes = CASES[name]
    c = case(f"{SIZES}-{'bf16' if name in ('causal', 'shared') else 'f32'}")
    mesh = mesh_of(AxisType.Auto, 1 if name in ALONE else 2)
    on_devices = functools.partial(shared, attend, strategy, mesh)
    check(values_and_gradients(**given), on_devices, c.inputs(**shapes), c.cotangents(), name=name)


@pytest.mark.thorough
@pytest.mark.parametrize("name", CASES)
def test_options_in_a_ring(attend, name):
    check_options(attend, name, "ring")


@pytest.mark.thorough
@pytest.mark.parametrize("strategy", ["all_gather", "heads"])
@pytest.mark.parametrize("name", CASES)
def test_options_otherwise(name, strategy):
    """By xla alone: an implementation does not see how the keys came."""
    tiles = flash_jax.BlockSizes(block_q=16, block_kv=16)
    attend = functools.partial(flash_jax.flash_attention, implementation="xla", block_sizes=tiles)
    check_options(attend, name, strategy)


@pytest.mark.parametrize("strategy", ["ring", "all_gather", "heads"])
@pytest.mark.parametrize("length", [512, 96])  # parts begin at whole blocks of the map, or do not
def test_block_mask(length, strategy):
    def documents(b, h, i, j, *_):
        return i // (length // 3) == j // (length // 3)

    x, mesh = jax.random.normal(jax.random.key(0), (1, length, 4, 8)), mesh_of(AxisType.Auto, 1)
    blocks = flash_jax.block_mask(documents, (1, 4, length, length))
    attend = functools.partial(flash_jax.flash_attention, causal=True, implementation="xla")

    def loss(attend, x):
        return (attend(x, blocks) ** 2).sum()

    def part(x, blocks):
        return attend(x, x, x, block_mask=blocks, context_axis="seq", context_strategy=strategy)

    shared = jax.shard_map(part, mesh=mesh, in_specs=(P(None, "seq"), P()), out_specs=P(None, "seq"))
    found = jax.jit(jax.value_and_grad(functools.partial(loss, shared)))(x)
    expected = jax.value_and_grad(functools.partial(loss, lambda x, blocks: attend(x, x, x, block_mask=blocks)))(x)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-4), found, expected)


def test_a_long_ring_is_a_loop(attend, monkeypatch):
    monkeypatch.setattr(context_parallel, "UNROLLED", 1)
    c = case(f"{SIZES}-f32")
    on_devices = functools.partial(shared, attend, "ring", mesh_of(AxisType.Auto))
    shapes = {"sinks": (8,), "bias": (2, 1, 24, 40)}
    check(values_and_gradients(causal=True), on_devices, c.inputs(**shapes), c.cotangents(), name="loop")


@pytest.mark.parametrize("strategy", ["ring", "all_gather", "heads"])
@pytest.mark.parametrize("unrolled", [8, 1], ids=["unrolled", "loop"])
def test_float64(strategy, unrolled, monkeypatch):
    """jax_enable_x64 makes Python's numbers 64 bits wide where they meet those of a mesh."""
    monkeypatch.setattr(context_parallel, "UNROLLED", unrolled)
    program, mesh = values_and_gradients(causal=True), mesh_of(AxisType.Auto)
    with jax.enable_x64(True):
        c = case("B2-T12-S20-H8-K4-D8-f64")
        arrays = c.inputs(sinks=(8,)), c.cotangents()
        attend = functools.partial(flash_jax.flash_attention, implementation="xla")
        found = jax.jit(functools.partial(program, functools.partial(shared, attend, strategy, mesh)))(*arrays)
        expected = jax.jit(functools.partial(program, attend))(*arrays)
        for x, y in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
            assert_same_in_float64(x, y)


@pytest.mark.parametrize("strategy", ["ring", "all_gather", "heads"])
def test_tangents(attend, strategy):
    c, shapes = case(f"{SIZES}-f32"), {"bias": (2, 1, 24, 40), "sinks": (8,)}
    on_devices = functools.partial(shared, attend, strategy, mesh_of(AxisType.Auto))
    check(tangents(causal=True), on_devices, c.inputs(**shapes), c.inputs(1, **shapes), name="tangents")


@pytest.mark.parametrize("strategy", ["ring", "all_gather", "heads"])
def test_second_order(strategy):
    attend = functools.partial(flash_jax.flash_attention, implementation="xla")
    c = case("B2-T8-S12-H4-K4-D8-f32")
    on_devices = functools.partial(shared, attend, strategy, mesh_of(AxisType.Auto))
    arrays = c.inputs(sinks=(4,)), c.cotangents(), c.inputs(1, sinks=(4,))
    check(second_order(causal=True), on_devices, *arrays, name="second order")


@pytest.mark.thorough
@pytest.mark.parametrize("strategy", [None, "ring", "all_gather"])
@pytest.mark.parametrize("heads", ["H8-K4", "H4-K2"])
def test_explicit_axes(attend, strategy, heads):
    """There arguments are whole arrays, and no shard_map is written."""
    c, mesh = case(f"B2-T24-S40-{heads}-D16-f32"), mesh_of(AxisType.Explicit)
    shapes = {"bias": (2, 1, 24, 40), "sinks": (c.H,)}
    program = values_and_gradients(causal=True, q_segment_ids=IDS[:, :24], kv_segment_ids=IDS)
    inputs, cotangents = c.inputs(**shapes), c.cotangents()
    on_devices = functools.partial(attend, context_axis="seq", context_strategy=strategy)
    with jax.set_mesh(mesh):
        q, k, v = (jax.device_put(x, NamedSharding(mesh, ROWS)) for x in inputs[:3])
        dout, dlse = (jax.device_put(x, NamedSharding(mesh, s)) for x, s in zip(cotangents, (ROWS, STATS), strict=True))
        found = jax.jit(functools.partial(program, on_devices))((q, k, v, inputs[3]), (dout, dlse))
    assert jax.tree.leaves(found)[0].sharding.spec == P("data", "seq", None, None)
    for n, leaves in enumerate(zip(*map(jax.tree.leaves, (found, *judges(program, inputs, cotangents))), strict=True)):
        assert_accurate(*leaves, derivative=n > 1, name=f"result {n}")


def test_batch_heads_and_sequence_at_once():
    """Three axes, of which the one of the heads has more devices than there are key/value heads."""
    mesh = jax.make_mesh((2, 2, 2), ("data", "model", "seq"), axis_types=(AxisType.Explicit,) * 3)
    c = case("B2-T24-S40-H4-K1-D16-f32")
    program, inputs, cotangents = values_and_gradients(causal=True), c.inputs(), c.cotangents()
    on_devices = functools.partial(flash_jax.flash_attention, implementation="xla", context_axis="seq")
    with jax.set_mesh(mesh):
        q = jax.device_put(inputs[0], NamedSharding(mesh, P("data", "seq", "model")))
        k, v = (jax.device_put(x, NamedSharding(mesh, KEYS)) for x in inputs[1:3])
        dout = jax.device_put(cotangents[0], NamedSharding(mesh, P("data", "seq", "model")))
        dlse = jax.device_put(cotangents[1], NamedSharding(mesh, P("data", "model", "seq")))
        found = jax.jit(functools.partial(program, on_devices))((q, k, v, {}), (dout, dlse))
    for n, leaves in enumerate(zip(*map(jax.tree.leaves, (found, *judges(program, inputs, cotangents))), strict=True)):
        assert_accurate(*leaves, derivative=n > 1, name=f"result {n}")


@pytest.mark.parametrize(("heads", "served"), [((4, 4), True), ((4, 2), False), ((2, 2), False)])
def test_heads_that_another_explicit_axis_cuts(heads, served):
    """Devices exchange the heads that each has, so that these must be enough for them."""
    mesh = jax.make_mesh((2, 2), ("seq", "model"), axis_types=(AxisType.Explicit,) * 2, devices=jax.devices()[:4])
    H, K = heads
    c = case(f"B1-T8-S12-H{H}-K{K}-D8-f32")
    attend = functools.partial(flash_jax.flash_attention, implementation="xla", context_axis="seq")
    with jax.set_mesh(mesh):
        qkv = [jax.device_put(x, NamedSharding(mesh, P(None, "seq", "model"))) for x in c.arrays()]
        found = jax.jit(attend)(*qkv)
        if not served:
            with pytest.raises(NotImplementedError, match=f"got {H // 2} query heads and {K // 2} key/value"):
                attend(*qkv, context_strategy="heads")
    np.testing.assert_allclose(
        found, flash_jax.flash_attention(*c.arrays(), implementation="xla"), rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("strategy", ["ring", "all_gather", "heads"])
def test_vmap_over_a_dim_that_another_explicit_axis_cuts(strategy):
    c, mesh = case("B4-T8-S12-H4-K4-D8-f32"), mesh_of(AxisType.Explicit)
    attend = functools.partial(flash_jax.flash_attention, implementation="xla", causal=True)
    on_devices = functools.partial(attend, context_axis="seq", context_strategy=strategy)

    def loss(attend, *qkv):
        return (jax.vmap(attend)(*qkv) ** 2).sum()

    value_and_gradient = functools.partial(jax.value_and_grad, argnums=(0, 1, 2))
    with jax.set_mesh(mesh):
        qkv = [jax.device_put(x, NamedSharding(mesh, P("data", "seq"))) for x in c.arrays()]
        found = jax.jit(value_and_gradient(functools.partial(loss, on_devices)))(*qkv)
    expected = value_and_gradient(functools.partial(loss, attend))(*c.arrays())
    for x, y in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-4)


def compiled_step(strategy, options=None, mesh=None):
    """The compiled forward and backward pass of a part of 16 x 1024 tokens on each of four devices."""
    mesh = mesh or mesh_of(AxisType.Auto, 1)
    x = jax.ShapeDtypeStruct((1, 4096, 8, 32), jnp.float32)
    attend = functools.partial(flash_jax.flash_attention, implementation="xla", causal=True, **(options or {}))

    def loss(q, k, v):
        return attend(q, k, v, context_axis="seq", context_strategy=strategy).sum()

    part = jax.shard_map(jax.grad(loss, (0, 1, 2)), mesh=mesh, in_specs=P(None, "seq"), out_specs=P(None, "seq"))
    return jax.jit(part).lower(x, x, x).compile()


@pytest.mark.parametrize(
    ("strategy", "expected"),
    [
        ("ring", {"collective-permute"}),
        ("all_gather", {"all-gather", "reduce-scatter"}),
        ("heads", {"all-to-all"}),
    ],
)
def test_only_its_own_collectives(strategy, expected):
    text = compiled_step(strategy).as_text()
    assert {name for name in COLLECTIVES if re.search(rf"= [^\n]* {name}(?:-start)?\(", text)} == expected


def test_a_ring_never_holds_all_keys():
    whole = {
        name: "4096" in re.sub(r"metadata=\{[^}]*\}", "", compiled_step(name).as_text())
        for name in ("ring", "all_gather")
    }
    assert whole == {"ring": False, "all_gather": True}


@pytest.mark.thorough
def test_keys_that_nobody_attends_may_hold_nan(attend):
    """Also where they belong to another device."""
    c, mesh = case("B2-T24-S40-H4-K4-D16-f32"), mesh_of(AxisType.Auto)
    inputs, cotangents, lengths = c.inputs(), c.cotangents(), np.array([13, 31])
    bad = np.arange(40)[None, :, None, None] >= lengths[:, None, None, None]
    q, k, v, _ = inputs
    program = values_and_gradients(kv_lengths=lengths)
    for strategy in ("ring", "all_gather", "heads"):
        on_devices = functools.partial(shared, attend, strategy, mesh)
        poisoned = q, jnp.where(bad, jnp.nan, k), jnp.where(bad, jnp.nan, v), {}
        found = jax.jit(functools.partial(program, on_devices))(poisoned, cotangents)
        oracle = judges(program, inputs, cotangents)
        for n, leaves in enumerate(zip(*map(jax.tree.leaves, (found, *oracle)), strict=True)):
            assert_accurate(*leaves, derivative=n > 1, name=f"{strategy}, result {n}")


def test_per_example_gradients_by_vmap():
    c = case("B3-T24-S40-H8-K4-D16-f32")
    q, k, v = c.arrays()
    mesh = mesh_of(AxisType.Auto, 1)
    attend = functools.partial(flash_jax.flash_attention, implementation="xla", causal=True)

    def loss(attend, k, q, v):
        return (attend(q, k, v) ** 2).sum()

    def mapped(attend, k, q, v):
        return jax.vmap(jax.grad(functools.partial(loss, attend)), in_axes=(None, 0, 0))(k, q, v)

    for strategy in ("ring", "all_gather", "heads"):
        on_devices = functools.partial(attend, context_axis="seq", context_strategy=strategy)
        f = jax.shard_map(
            functools.partial(mapped, on_devices), mesh=mesh,
            in_specs=(P("seq"), P(None, "seq"), P(None, "seq")), out_specs=P(None, "seq"),
        )  # fmt: skip
        expected = mapped(attend, k[0], q, v)
        np.testing.assert_allclose(jax.jit(f)(k[0], q, v), expected, rtol=1e-4, atol=1e-4 * np.abs(expected).max())


def test_saving_what_is_named_saves_running_the_ring_again():
    mesh, x = mesh_of(AxisType.Auto, 1), jnp.ones((1, 32, 4, 8))
    attend = functools.partial(flash_jax.flash_attention, implementation="xla", context_axis="seq")
    policy = jax.checkpoint_policies.save_only_these_names("flash_attention_out", "flash_attention_lse")

    def passes(policy):
        f = jax.checkpoint(lambda q: attend(q, q, q, context_strategy="ring").sum(), policy=policy)
        part = jax.shard_map(jax.grad(f), mesh=mesh, in_specs=P(None, "seq"), out_specs=P(None, "seq"))
        return str(jax.make_jaxpr(part)(x)).count("flash_attention_forward[")

    assert (passes(policy), passes(None)) == (1, 2)


@pytest.mark.parametrize("strategy", ["ring", "all_gather", "heads"])
def test_export(strategy):
    """A program that is exported and read again gives the same bits."""
    mesh, tokens = mesh_of(AxisType.Auto, 1), P(None, "seq")
    attend = functools.partial(
        flash_jax.flash_attention, causal=True, implementation="xla", context_axis="seq", context_strategy=strategy
    )
    f = jax.jit(jax.shard_map(attend, mesh=mesh, in_specs=tokens, out_specs=tokens))
    x = jax.device_put(jax.random.normal(jax.random.key(0), (1, 32, 4, 8)), NamedSharding(mesh, tokens))
    again = jax.export.deserialize(jax.export.export(f)(x, x, x).serialize())
    np.testing.assert_array_equal(jax.jit(again.call)(x, x, x), f(x, x, x))


class TestErrors:
    def call(self, mesh=None, shape=(2, 24, 6, 8), **options):
        x = jnp.ones(shape)
        f = functools.partial(flash_jax.flash_attention, **options)
        if mesh is None:
            return f(x, x, x)
        return jax.eval_shape(jax.shard_map(f, mesh=mesh, in_specs=ROWS, out_specs=ROWS), x, x, x)

    def test_no_mesh(self):
        with pytest.raises(
            ValueError, match=r"`context_axis` must be an axis of the mesh in force.*got 'seq'.*axes \[\]"
        ):
            self.call(context_axis="seq")

    def test_automatic_axis(self):
        mesh = mesh_of(AxisType.Auto)
        with jax.set_mesh(mesh), pytest.raises(ValueError, match="leaves it to the compiler"):
            self.call(context_axis="seq")

    def test_unknown_axis(self):
        with pytest.raises(ValueError, match=r"got 'sequence', and the mesh has the axes \['data', 'seq'\]"):
            self.call(mesh_of(AxisType.Auto), context_axis="sequence")

    def test_kind(self):
        with pytest.raises(TypeError, match="`context_axis` must be the name of a mesh axis or None; got int"):
            self.call(context_axis=1)

    def test_strategy(self):
        with pytest.raises(ValueError, match="`context_strategy` must be None or one of 'ring', 'all_gather', 'heads'"):
            self.call(context_axis="seq", context_strategy="rings")

    def test_strategy_alone(self):
        with pytest.raises(ValueError, match="`context_strategy` says how to attend over `context_axis`"):
            self.call(context_strategy="ring")

    def test_heads_that_do_not_divide(self):
        with pytest.raises(NotImplementedError, match="4 devices along `context_axis` divide; got 6 query heads"):
            self.call(mesh_of(AxisType.Auto), context_axis="seq", context_strategy="heads")

    def test_reference(self):
        with pytest.raises(NotImplementedError, match="'reference' cannot serve this call.*`context_axis`"):
            self.call(mesh_of(AxisType.Auto), context_axis="seq", implementation="reference")

    def test_ragged(self):
        mesh = mesh_of(AxisType.Explicit)
        with (
            jax.set_mesh(mesh),
            pytest.raises(ValueError, match="multiples of the 4 devices along `context_axis`"),
        ):
            self.call(shape=(2, 26, 8, 8), context_axis="seq")
