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
from flash_jax.triton import tiling
from tests.support import gpu_compile

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
