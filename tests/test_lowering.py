"""Programs lowered for GPUs that are not there: what is refused, how wide offsets are, export."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import flash_jax
from flash_jax import compat
from flash_jax.spec import AttentionSpec, Operands
from flash_jax.triton import launch, order, tiling
from flash_jax.tuning.candidates import name_of
from tests.support import gpu_compile
from tests.support.cases import case
from tests.support.mods import READS, documents, same_document_nearby

KERNELS = {f"flash_attention_{name}_kernel" for name in ("forward", "dq", "dkv")}


def struct(*shape, dtype="bfloat16"):
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))


X = struct(1, 256, 2, 64)


def gradient(**options):
    def loss(q, k, v):
        return flash_jax.flash_attention(q, k, v, **options).sum(dtype=jnp.float32)

    return jax.value_and_grad(loss, (0, 1, 2))


# Which GPU.


@pytest.mark.parametrize(
    "gpu, capability",
    [
        ("NVIDIA A100-SXM4-80GB", "8.0"),
        ("NVIDIA A100", "8.0"),
        ("NVIDIA A30", "8.0"),
        ("NVIDIA A10G", "8.6"),
        ("NVIDIA A40", "8.6"),
        ("NVIDIA L4", "8.9"),
        ("NVIDIA L40S", "8.9"),
        ("NVIDIA GeForce RTX 3090", "8.6"),
        ("NVIDIA GeForce RTX 4090", "8.9"),
        ("NVIDIA H100 80GB HBM3", "9.0"),
        ("NVIDIA H200", "9.0"),
        ("NVIDIA GH200 480GB", "9.0"),
        ("NVIDIA B200", "10.0"),
        ("NVIDIA GB200", "10.0"),
        ("Tesla T4", "7.5"),
        ("Tesla V100-SXM2-16GB", "7.0"),
        ("Tesla P100-PCIE-16GB", "6.0"),
        ("a GPU of tomorrow", None),
    ],
)
def test_the_compute_capability_of_a_described_gpu(gpu, capability):
    with gpu_compile.lowering_for(gpu):
        assert compat.gpu_description() == (gpu, capability)


@pytest.mark.parametrize("gpu", ["NVIDIA A100", "NVIDIA H200", "NVIDIA B200"])
@pytest.mark.parametrize("implementation", [None, "triton"])
def test_triton_serves_gpus_from_capability_8(gpu, implementation):
    lowered = gpu_compile.lower(gradient(implementation=implementation), X, X, X, gpu=gpu)
    assert set(gpu_compile.triton_ir(lowered)) == KERNELS


@pytest.mark.parametrize("gpu, capability", [("Tesla T4", "7.5"), ("Tesla V100-SXM2-16GB", "7.0")])
def test_older_gpus_are_named_in_the_refusal(gpu, capability):
    with pytest.raises(NotImplementedError) as error:
        gpu_compile.lower(gradient(implementation="triton"), X, X, X, gpu=gpu)
    assert f"needs compute capability 8.0 or newer, and {gpu} has {capability}." in str(error.value)
    assert "Use implementation='xla' or None." in str(error.value)


def test_older_gpus_run_xla_by_default():
    assert gpu_compile.triton_ir(gpu_compile.lower(gradient(), X, X, X, gpu="Tesla T4")) == {}


# Mods.

DIAGONALS, DENSE = "flash_attention_diagonals_kernel", "flash_attention_dbias_kernel"
MORE_KERNELS = {
    "difference": {DIAGONALS}, "clipped-difference": {DIAGONALS}, "several": {DIAGONALS}, "entry": {DENSE},
    "turned-entry": {DENSE},
}  # fmt: skip


def lowered_with_mods(mod, c, dtype, **options):
    """The kernels, lowered for the H200, of all gradients of a call with this mod, those of its tables too."""
    x = struct(*c.batch, c.T, c.H, c.D, dtype=dtype)
    kv = struct(*c.batch, c.S, c.K, c.D, dtype=dtype)
    tables = tuple(struct(*shape, dtype="float32") for shape in mod.tables(c))

    def loss(q, k, v, tables):
        out = flash_jax.flash_attention(
            q, k, v, score_mod=mod.function, mod_operands=tables, implementation="triton", **options
        )
        return out.sum(dtype=jnp.float32)

    return gpu_compile.triton_ir(gpu_compile.lower(jax.grad(loss, (0, 1, 2, 3)), x, kv, kv, tables))


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("kind", READS)
def test_every_kind_of_read_lowers(kind, dtype):
    """At ragged lengths and a head dim between powers of two; and no kernel more than it needs."""
    c = case("B2-T190-S210-H4-K2-D40-bf16")
    kernels = lowered_with_mods(READS[kind], c, dtype, causal=True)
    sums = {"flash_attention_row_sums_kernel"} if dtype == "float32" else set()
    assert set(kernels) == KERNELS | sums | MORE_KERNELS.get(kind, set())


@pytest.mark.parametrize("mapped", [False, True], ids=["no-map", "map"])
def test_a_mask_mod_lowers(mapped):
    c = case("B2-T190-S210-H4-K2-D40-bf16")
    ids = documents(c)
    options = {"mask_mod": same_document_nearby, "mod_operands": (ids,)}
    if mapped:
        options["block_mask"] = flash_jax.block_mask(same_document_nearby, (2, 4, 190, 210), (ids,))
    q, kv = struct(2, 190, 4, 40), struct(2, 210, 2, 40)
    lowered = gpu_compile.lower(gradient(implementation="triton", **options), q, kv, kv)
    assert set(gpu_compile.triton_ir(lowered)) == KERNELS


def round_trip(s):
    return jax.lax.bitcast_convert_type(jax.lax.bitcast_convert_type(s, jnp.int32) ^ 1, jnp.float32)


FUNCTIONS = {
    "abs": jnp.abs, "arctan2": lambda s: jnp.arctan2(s, s + 1), "asinh": jnp.arcsinh, "atan": jnp.arctan,
    "bits": round_trip, "cbrt": jnp.cbrt, "ceil": jnp.ceil, "clip": lambda s: jnp.clip(s, -1, 1), "cos": jnp.cos,
    "cosh": jnp.cosh, "exp": jnp.exp, "exp2": jnp.exp2, "expm1": jnp.expm1, "floor": jnp.floor,
    "gelu": jax.nn.gelu, "isfinite": lambda s: jnp.where(jnp.isfinite(s), s, 0), "log": lambda s: jnp.log(s * s + 1),
    "log2": lambda s: jnp.log2(s * s + 1),
    "log1p": lambda s: jnp.log1p(s * s), "logaddexp": lambda s: jnp.logaddexp(s, 0), "power": lambda s: s**3,
    "power of a float": lambda s: jnp.power(s * s + 1, 0.7), "relu": jax.nn.relu, "remainder": lambda s: s % 0.7,
    "rsqrt": lambda s: jax.lax.rsqrt(s * s + 1), "sigmoid": jax.nn.sigmoid, "sign": jnp.sign, "silu": jax.nn.silu,
    "sin": jnp.sin, "sinh": jnp.sinh, "softplus": jax.nn.softplus, "sqrt": lambda s: jnp.sqrt(s * s + 1),
    "stop_gradient": lambda s: s * jax.lax.stop_gradient(s), "tan": jnp.tan, "tanh": jnp.tanh,
    "16 bits": lambda s: s.astype(jnp.bfloat16).astype(jnp.float32),
}  # fmt: skip
OF_INTS = {
    "and": lambda i: i & 3, "or": lambda i: i | 1, "xor": lambda i: i ^ 5, "not": lambda i: ~i, "mod": lambda i: i % 3,
    "floor division": lambda i: i // 3, "left": lambda i: i << 2, "right": lambda i: i >> 1, "power": lambda i: i**2,
    "population": jax.lax.population_count, "unsigned": lambda i: i.astype(jnp.uint32), "sign": jnp.sign,
    "bools": lambda i: (i > 3) & ~(i == 5) | (i != 7),
}  # fmt: skip


@pytest.mark.thorough
@pytest.mark.parametrize("name", [*FUNCTIONS, *(f"{name} of ints" for name in OF_INTS)])
def test_functions_that_a_mod_may_use_lower(name):
    """And their derivatives."""
    of_ints = OF_INTS.get(name.removesuffix(" of ints")) if name.endswith("of ints") else None

    def mod(s, b, h, i, j):
        return FUNCTIONS[name](s) if of_ints is None else s + of_ints(i).astype(s.dtype)

    x = struct(1, 64, 2, 32)
    lowered = gpu_compile.lower(gradient(implementation="triton", score_mod=mod), x, x, x)
    assert set(gpu_compile.triton_ir(lowered)) == KERNELS


# Block sizes.

TABLE = flash_jax.BlockSizes()  # for a pass that keeps the table's


@pytest.mark.parametrize(
    "make, name",
    [
        (lambda sizes: dataclasses.replace(sizes, dq=TABLE, dkv=TABLE), "forward"),
        (lambda sizes: flash_jax.BlockSizes(dq=sizes), "dq"),
        (lambda sizes: flash_jax.BlockSizes(dkv=sizes), "dkv"),
    ],
    ids=["forward", "dq", "dkv"],
)
def test_block_sizes_that_do_not_fit_the_gpu(make, name):
    x = struct(1, 1024, 2, 128)

    def lower(sizes):
        gpu_compile.lower(gradient(implementation="triton", block_sizes=make(sizes)), x, x, x)

    with pytest.raises(ValueError, match=rf"`block_sizes` for the {name} pass .*and NVIDIA H200 has 227 KiB") as error:
        lower(flash_jax.BlockSizes(block_q=256, block_kv=256, num_stages=4))
    # What the message proposes is taken.
    proposal = dict(re.findall(r"(block_q|block_kv|num_stages)=(\d+)", str(error.value)))
    lower(flash_jax.BlockSizes(**{field: int(n) for field, n in proposal.items()}))


def test_block_sizes_fit_one_gpu_and_not_another():
    sizes = flash_jax.BlockSizes(block_q=128, block_kv=128, num_warps=8, num_stages=3)
    x = struct(1, 1024, 2, 128)

    def run(q, k, v):
        return flash_jax.flash_attention(q, k, v, implementation="triton", block_sizes=sizes)

    gpu_compile.lower(run, x, x, x, gpu="NVIDIA H200")
    with pytest.raises(ValueError, match=r"needs about 224 KiB .* NVIDIA A100 has 163 KiB"):
        gpu_compile.lower(run, x, x, x, gpu="NVIDIA A100")


@pytest.mark.parametrize(
    "gpu, limit", [("NVIDIA A100", 163), ("NVIDIA A10G", 99), ("NVIDIA L4", 99), ("NVIDIA B200", 227)]
)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("head_dim", [8, 64, 96, 128, 256])
def test_the_table_fits_every_gpu(head_dim, dtype, gpu, limit):
    x, widths = struct(1, 512, 1, head_dim, dtype=dtype), (tiling.padded(head_dim),) * 2
    with gpu_compile.lowering_for(gpu):
        tiles = {name: tiling.tile_for(name, AttentionSpec(), x, x, x, Operands()) for name in tiling.PASSES}
    for name, tile in tiles.items():
        assert tiling.shared_bytes(name, tile, widths, x.dtype.itemsize) <= limit * 1024
        assert min(tile.block_q, tile.block_kv) >= 16


def tile_of(name, q, k, operands=None, gpu="NVIDIA H200", **options):
    """The tile of a pass, written 128x64w8s2."""
    with gpu_compile.lowering_for(gpu):
        return name_of(tiling.tile_for(name, AttentionSpec(**options), q, k, k, operands or Operands()))


@pytest.mark.parametrize("gpu", ["NVIDIA A100", "NVIDIA H200"])
@pytest.mark.parametrize("masked", [False, True], ids=["", "mask"])
def test_sizes_that_fit_are_taken(masked, gpu):
    """Where heads share keys and have a tile and a half each: the compiler asks for 105 and 76 KiB on the A100."""
    sizes = flash_jax.BlockSizes(dkv=flash_jax.BlockSizes(block_q=64, block_kv=64, num_warps=8, num_stages=2))
    operands = Operands(mask=struct(1, 1, 100, 100, dtype="bool") if masked else None)
    got = tile_of("dkv", struct(1, 100, 6, 128), struct(1, 100, 2, 128), operands, gpu, block_sizes=sizes)
    assert got == "64x64w8s2"


@pytest.mark.parametrize(
    ("name", "head_dim", "lengths", "gpu", "options", "expected"),
    [
        ("dq", 256, (1024, 1024), "NVIDIA H200", {}, "128x64w8s1"),
        ("dq", 256, (1000, 1000), "NVIDIA H200", {}, "128x32w8s2"),  # for which a last tile leaves no room
        ("dq", 256, (1024, 1024), "NVIDIA H200", {"softcap": 30.0}, "128x32w8s2"),
        ("dq", 256, (16, 1024), "NVIDIA H200", {}, "16x32w8s2"),
        ("dkv", 128, (2**14, 2**14), "NVIDIA H200", {"causal": True}, "64x128w8s3"),
        ("dkv", 128, (16, 2**14), "NVIDIA H200", {}, "16x64w4s2"),  # queries stream past
        ("dkv", 128, (4096, 512), "NVIDIA H200", {}, "64x128w8s3"),
        ("dkv", 128, (4096, 512), "NVIDIA H200", {"causal": True}, "64x64w4s2"),
        ("dkv", 128, (2**14, 512), "NVIDIA H200", {}, "32x64w4s3"),
        ("dkv", 128, (2**14 + 16, 512), "NVIDIA H200", {}, "64x64w4s2"),
        ("dq", 128, (512, 2**14), "NVIDIA H200", {"causal": True}, "128x32w8s3"),
        ("dq", 128, (512, 2**14), "NVIDIA H200", {"causal": True, "window": (9, 0)}, "64x64w4s2"),
        ("dkv", 128, (2**14, 2**14), "NVIDIA L4", {}, "64x64w8s2"),
        ("forward", 64, (512, 2048), "NVIDIA H200", {}, "64x128w4s3"),
        ("forward", 64, (512, 2000), "NVIDIA H200", {}, "128x64w4s3"),
        ("forward", 64, (512, 1024), "NVIDIA H200", {}, "128x64w4s3"),
        ("forward", 64, (512, 512), "NVIDIA H200", {}, "64x64w4s3"),
        ("forward", 64, (512, 512), "NVIDIA A100", {"causal": True}, "128x64w4s3"),
        ("dkv", 64, (512, 512), "NVIDIA H200", {"causal": True}, "32x64w4s3"),
        ("dkv", 64, (500, 512), "NVIDIA H200", {}, "64x64w4s3"),
        ("forward", 64, (512, 1024), "NVIDIA H200", {"chunk_size": 64}, "128x64w4s3"),
        ("forward", 128, (512, 1024), "NVIDIA H200", {"window": (255, 0)}, "64x64w4s3"),
        ("forward", 128, (512, 1024), "NVIDIA H200", {"window": (1023, 0)}, "128x64w4s2"),
        ("forward", 128, (512, 1024), "NVIDIA H200", {"window": (255, None)}, "128x64w4s2"),
        ("forward", 128, (512, 1024), "NVIDIA H200", {"causal": True, "chunk_size": 2048}, "64x64w4s3"),
        ("forward", 128, (512, 2**14), "NVIDIA H200", {}, "128x128w8s3"),
        ("forward", 128, (512, 2**14 + 16), "NVIDIA H200", {}, "128x64w4s2"),
        ("forward", 128, (2**14, 2**14), "NVIDIA H200", {"causal": True}, "128x64w4s2"),
        ("forward", 128, (2**14, 2**14), "NVIDIA RTX PRO 6000", {}, "128x64w4s2"),
    ],
)
def test_rows_for_plain_scores(name, head_dim, lengths, gpu, options, expected):
    """They are taken where they were measured to be faster and fit, and nowhere else."""
    q, k = (struct(1, n, 2, head_dim) for n in lengths)
    assert tile_of(name, q, k, gpu=gpu, **options) == expected


# Offsets.


def offset_types(*shape, dtype="bfloat16"):
    """{kernel: the integer types of its offsets into arrays of that dtype}."""
    x = struct(*shape, dtype=dtype)
    pointer = {"bfloat16": "bf16", "float32": "f32"}[dtype]
    kernels = gpu_compile.triton_ir(gpu_compile.lower(gradient(causal=True), x, x, x))
    pattern = rf"tt\.addptr .*: tensor<\d+x\d+x!tt\.ptr<{pointer}>>, tensor<\d+x\d+x(i\d+)>"
    return {name: set(re.findall(pattern, ir)) for name, ir in kernels.items()}


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_offsets_of_large_arrays_have_64_bits(dtype):
    """More than 2**31 elements: case G05, 16385 sequences."""
    kernels = KERNELS if dtype == "bfloat16" else {*KERNELS, "flash_attention_row_sums_kernel"}
    assert offset_types(16385, 128, 16, 64, dtype=dtype) == dict.fromkeys(kernels, {"i64"})


def test_offsets_of_small_arrays_have_32_bits():
    """So that the test above can fail."""
    assert offset_types(2, 128, 16, 64) == dict.fromkeys(KERNELS, {"i32"})


# Export.


@pytest.fixture(scope="module")
def exported():
    checks = [jax.export.DisabledSafetyCheck.custom_call("__gpu$xla.gpu.triton")]
    export = jax.export.export(jax.jit(gradient(causal=True)), platforms=["cuda", "cpu"], disabled_checks=checks)
    return export(X, X, X)


def test_export_for_cuda_from_a_machine_without_it(exported):
    again = jax.export.deserialize(exported.serialize())
    assert again.platforms == ("cuda", "cpu")
    assert [x.shape for x in again.out_avals] == [(), *[X.shape] * 3]
    for name in KERNELS:
        assert name in again.mlir_module()


def test_an_exported_program_runs(exported):
    """On the CPU, its other platform, as the function itself does."""
    arrays = [jnp.asarray(np.random.default_rng(i).normal(size=X.shape), X.dtype) for i in range(3)]
    got = jax.export.deserialize(exported.serialize()).call(*arrays)
    expected = jax.jit(gradient(causal=True))(*arrays)
    jax.tree.map(np.testing.assert_array_equal, jax.tree.leaves(got), jax.tree.leaves(expected))


@pytest.mark.parametrize(
    ("options", "uneven"),
    [({}, False), ({"causal": True}, True), ({"window": (99, 0)}, False), ({"causal": True, "chunk_size": 64}, False)],
    ids=["full", "causal", "window", "chunk"],
)
@pytest.mark.parametrize(("cached", "together"), [(0, 1), (2**19, 2), (2**30, 6)])
def test_causal_tiles_of_several_heads_go_together(options, uneven, cached, together, monkeypatch):
    """Each pass has as many heads in the first dim of its grid as the cache has room for: 2^18 bytes each here."""
    grids, call = set(), launch.pl.pallas_call

    def recorded(kernel, **given):
        grids.add(given["grid"])
        return call(kernel, **given)

    monkeypatch.setattr(launch.pl, "pallas_call", recorded)
    monkeypatch.setattr(order, "_CACHED", cached)
    examples = 3 + together  # another shape each time: what is traced once is not traced again
    x = struct(examples, 1024, 6, 64)
    sizes = flash_jax.BlockSizes(block_q=64, block_kv=64)
    gpu_compile.lower(gradient(block_sizes=sizes, **options), x, x, x)
    together = together if uneven else 1
    assert grids == {(16 * together, 6 // together, examples)}


@pytest.mark.parametrize(
    ("head_dims", "dtype", "apart"),
    [
        ((128, 128), "bfloat16", False),
        ((192, 128), "float16", True),
        ((64, 256), "bfloat16", True),
        ((256, 256), "float32", False),
    ],
)
def test_dk_and_dv_have_a_kernel_each_at_wide_head_dims(head_dims, dtype, apart):
    q, v = (struct(1, 128, 2, n, dtype=dtype) for n in head_dims)
    kernels = set(gpu_compile.triton_ir(gpu_compile.lower(gradient(), q, q, v)))
    ours = {name.split("_")[2] for name in kernels if name.startswith("flash_attention_d")}
    assert ours == ({"dq", "dk", "dv"} if apart else {"dq", "dkv"})


@pytest.mark.parametrize(
    ("argument", "expected"),
    [(0, {"dq"}), (1, {"dk"}), (2, {"dv"}), (3, {"dk"})],
    ids=["query", "key", "value", "bias"],
)
def test_what_nobody_wants_costs_no_kernel(argument, expected):
    """At a wide head dim; a bias that is the same for all queries gets its gradient from the kernel of dk."""

    def loss(q, k, v, bias):
        return flash_jax.flash_attention(q, k, v, bias, implementation="triton").astype(jnp.float32).sum()

    x, bias = struct(1, 128, 2, 256), struct(1, 1, 1, 128, dtype="float32")
    kernels = gpu_compile.triton_ir(gpu_compile.lower(jax.grad(loss, argument), x, x, x, bias))
    assert {name.split("_")[2] for name in kernels} - {"forward"} == expected


@pytest.mark.parametrize(
    ("options", "operand", "shape", "together"),
    [
        ({}, "bias", (2, 3, 4, 32, 48), (1, 1)),
        ({}, "bias", (2, 1, 4, 32, 48), (1, 3)),
        ({}, "bias", (1, 3, 4, 32, 48), (1, 1)),  # the examples that share it do not follow each other
        ({}, "bias", (1, 1, 4, 32, 48), (1, 6)),
        ({}, "bias", (1, 1, 4, 1, 48), (1, 1)),
        ({}, "mask", (1, 1, 1, 32, 48), (4, 1)),
        ({"causal": True}, "mask", (2, 3, 4, 32, 48), (4, 1)),
        ({"causal": True}, "mask", (2, 1, 4, 32, 48), (1, 3)),
        ({"causal": True, "window": (9, 0)}, "mask", (2, 3, 4, 32, 48), (1, 1)),
    ],
)
def test_what_shares_a_bias_or_mask_goes_together(options, operand, shape, together):
    x = struct(2, 3, 32, 4, 64)
    operands = Operands(**{operand: struct(*shape, dtype="bool" if operand == "mask" else "bfloat16")})
    grid = order.Grid.of(5, 4, 1000, launch.Shape.of(x, x, x, (2, 3)), operands, AttentionSpec(**options))
    assert grid == (5, 4, 6, *together)


def test_examples_go_together_where_there_is_one_head_of_keys():
    q, k = struct(8, 32, 4, 64), struct(8, 32, 1, 64)
    shape, operands = launch.Shape.of(q, k, k, (8,)), Operands(bias=struct(1, 1, 32, 48))
    assert order.Grid.of(5, 1, 1000, shape, operands, AttentionSpec()) == (5, 1, 8, 1, 8)


@pytest.mark.parametrize(("streamed", "together"), [(1, 6), (3 * 2**20, 3), (16 * 2**20, 1), (2**30, 1)])
def test_heads_that_go_together_divide_all_and_have_room(streamed, together):
    x = struct(1, 32, 6, 64)
    shape, causal = launch.Shape.of(x, x, x, (1,)), AttentionSpec(causal=True)
    assert order.Grid.of(5, 6, streamed, shape, Operands(), causal).heads_together == together
    ids = Operands(q_segment_ids=struct(1, 32, dtype="int32"), kv_segment_ids=struct(1, 32, dtype="int32"))
    assert order.Grid.of(5, 6, 16 * streamed, shape, ids, causal).heads_together == together  # a document at a time


@pytest.mark.parametrize("together", [(1, 1), (3, 1), (1, 2), (3, 2), (6, 4)])
def test_each_tile_of_each_head_has_one_program(together):
    grid = order.Grid(5, 6, 4, *together)
    places = {tuple(map(int, grid.place(*map(jnp.int32, program)))) for program in np.ndindex(grid.dims)}
    assert len(places) == np.prod(grid.dims) == 5 * 6 * 4
    assert tuple(map(max, zip(*places, strict=True))) == (4, 5, 3)


def test_programs_that_go_together_are_next_to_each_other():
    """First tile 0 of each head and example of the group, then tile 1: they read one bias, and the last are light."""
    grid = order.Grid(5, 6, 4, 3, 2)
    first = [tuple(map(int, grid.place(jnp.int32(n), 1, 0))) for n in range(7)]
    assert first == [(0, 3, 0), (0, 4, 0), (0, 5, 0), (0, 3, 1), (0, 4, 1), (0, 5, 1), (1, 3, 0)]
