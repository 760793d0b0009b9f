"""Without a GPU: every entry of the tile table goes through the GPU's own compiler, for the A100 and the H200."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import flash_jax
from flash_jax import compat, triton
from flash_jax.spec import AttentionSpec, Operands
from flash_jax.triton import stored, tiling
from tests.support import gpu_compile
from tests.support.cases import case
from tests.support.mods import READS, same_document_nearby

pytestmark = pytest.mark.compile

T = 1024
HEADS = 2
PASSES = {
    "forward": "flash_attention_forward_kernel",
    "dq": "flash_attention_dq_kernel",
    "dkv": "flash_attention_dkv_kernel",
}
# In the place of the last where dk and dv have a kernel each (see tests/test_lowering.py).
APART = {"dk": "flash_attention_dk_kernel", "dv": "flash_attention_dv_kernel"}
TANGENT = "flash_attention_tangent_kernel"
DTYPES = ("bfloat16", "float16", "float32")
HEAD_DIMS = (32, 64, 128, 256, 40, 80, 192)
# A kernel that spills waits for memory in its innermost loop. The table's entries stay below these bytes a thread; a
# change of a kernel (or of the compiler) that needs more is worth another look.
MAX_SPILLED = {"bfloat16": 512, "float16": 512, "float32": 2048}
# The tangent kernel holds next to nothing in memory but at a head dim of 256 in float32, where the smallest tile does.
MAX_SPILLED_BY_TANGENTS = {"bfloat16": 64, "float16": 64, "float32": 1024}
MAX_SPILLED_BY_WIDE_TANGENTS = 8192
SERIALISED = {"C7512", "C7515"}  # ptxas's notes of products that wait for each other
# With mods, for which the table has no entries of their own; "entry" has a sine, whose range reduction needs memory.
MAX_SPILLED_BY_MODS = {"entry": 10240}

a_target = pytest.mark.parametrize("target", gpu_compile.TARGETS, ids=lambda target: target.name.split()[-1])


def struct(*shape, dtype="bfloat16"):
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))


def gradients(**options):
    """The function (query, key, value) -> all three gradients of an output and its log-sum-exp."""

    def loss(q, k, v):
        out, lse = flash_jax.flash_attention(q, k, v, return_lse=True, implementation="triton", **options)
        return out.astype(jnp.float32).sum() + lse.sum()

    return jax.grad(loss, (0, 1, 2))


def check_and_record(compiled, label, limit, record_property):
    """The kernels of all passes were compiled, none spills beyond the limit; the terminal summary shows them."""
    kernels = {kernel.name: kernel for kernel in compiled.kernels}
    passes = PASSES
    if set(APART.values()) & set(kernels):
        passes = {name: kernel for name, kernel in PASSES.items() if name != "dkv"} | APART
    assert set(passes.values()) <= set(kernels)
    for name, kernel_name in passes.items():
        kernel = kernels[kernel_name]
        row = (label.format(name), str(kernel.registers), str(kernel.spills), " ".join(kernel.notes))
        record_property("kernel", (*row, f"{compiled.seconds:.1f} for all"))
    assert {name: kernels[kernel].spills for name, kernel in passes.items() if kernels[kernel].spills > limit} == {}


@a_target
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_causal(head_dim, dtype, target, record_property):
    x = struct(1, T, HEADS, head_dim, dtype=dtype)
    compiled = gpu_compile.compile_for(target, gradients(causal=True), x, x, x)
    label = f"{target.name} D{head_dim} {dtype} causal {{}}"
    check_and_record(compiled, label, MAX_SPILLED[dtype], record_property)


@a_target
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_full(head_dim, dtype, target, record_property):
    x = struct(1, T, HEADS, head_dim, dtype=dtype)
    compiled = gpu_compile.compile_for(target, gradients(), x, x, x)
    check_and_record(compiled, f"{target.name} D{head_dim} {dtype} full {{}}", MAX_SPILLED[dtype], record_property)


def check_tangents(target, label, limit, record_property, options, inputs):
    """The tangent kernel of all `inputs`, (query, key, value, {name: operand}), spills no more than that."""

    def run(inputs, directions):
        attend = functools.partial(flash_jax.flash_attention, implementation="triton", return_lse=True, **options)
        return jax.jvp(lambda q, k, v, riding: attend(q, k, v, **riding), inputs, directions)[1]

    compiled = gpu_compile.compile_for(target, run, inputs, inputs)
    (kernel,) = (kernel for kernel in compiled.kernels if kernel.name == TANGENT)
    row = (f"{target.name} {label} tangent", str(kernel.registers), str(kernel.spills), " ".join(kernel.notes))
    record_property("kernel", (*row, f"{compiled.seconds:.1f} with forward"))
    assert kernel.spills <= limit and not SERIALISED & set(kernel.notes)


@a_target
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_tangents(head_dim, dtype, target, record_property):
    x = struct(1, T, HEADS, head_dim, dtype=dtype)
    for causal in (True, False):
        label = f"D{head_dim} {dtype} {'causal' if causal else 'full'}"
        wide = (dtype, head_dim) == ("float32", 256)
        limit = MAX_SPILLED_BY_WIDE_TANGENTS if wide else MAX_SPILLED_BY_TANGENTS[dtype]
        check_tangents(target, label, limit, record_property, {"causal": causal}, (x, x, x, {}))


TANGENTS = {
    "softcap": ({"softcap": 30.0}, lambda c: {"scale": ()}),
    "bias": ({}, lambda c: {"bias": (1, c.H, c.T, c.S), "sinks": (c.H,)}),
    "alibi": ({"causal": True}, lambda c: {"alibi_slopes": (c.H,)}),
    "segments": ({"causal": True, "segment_ids": np.zeros((2, T), np.int32)}, lambda c: {}),
    "mask": ({"mask": np.ones((1, 1, T, T), bool)}, lambda c: {}),
    "score_mod": ({"score_mod": READS["several"].function}, lambda c: {"mod_operands": READS["several"].tables(c)}),
}


@a_target
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("option", TANGENTS)
def test_tangents_of_options(option, head_dim, target, record_property):
    c = case(f"B2-T{T}-H4-D{head_dim}")
    options, shapes = TANGENTS[option]
    x = struct(2, T, 4, head_dim)
    riding = jax.tree.map(lambda s: struct(*s, dtype="float32"), shapes(c), is_leaf=_is_shape)
    check_tangents(target, f"D{head_dim} bfloat16 {option}", 256, record_property, options, (x, x, x, riding))


def _is_shape(x):
    return isinstance(x, tuple) and all(isinstance(n, int) for n in x)


@a_target
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_softcap(head_dim, causal, target, record_property):
    x = struct(1, T, HEADS, head_dim)
    compiled = gpu_compile.compile_for(target, gradients(softcap=50.0, causal=causal), x, x, x)
    label = f"{target.name} D{head_dim} bfloat16 softcap {'causal' if causal else 'full'} {{}}"
    check_and_record(compiled, label, 640, record_property)
    assert not any("C7515" in kernel.notes for kernel in compiled.kernels)


@a_target
@pytest.mark.parametrize("precision", ["highest", "tensorfloat32"])
def test_float32_at_other_precisions(precision, target, record_property):
    x = struct(1, T, HEADS, 64, dtype="float32")
    compiled = gpu_compile.compile_for(target, gradients(causal=True, precision=precision), x, x, x)
    label = f"{target.name} D64 float32 {precision} causal {{}}"
    check_and_record(compiled, label, MAX_SPILLED["float32"], record_property)


@a_target
def test_everything_at_once(target, record_property):
    """Ragged lengths, a window, grouped heads, Dv != D and arrays of lengths: three loops, every mask."""

    def run(q, k, v, lengths):
        return gradients(causal=True, window=(300, 0), q_lengths=lengths, kv_lengths=lengths)(q, k, v)

    q, k, v = struct(2, 1000, 8, 80), struct(2, 900, 2, 80), struct(2, 900, 2, 128)
    compiled = gpu_compile.compile_for(target, run, q, k, v, struct(2, dtype="int32"))
    check_and_record(compiled, f"{target.name} D80 bfloat16 all options {{}}", 1024, record_property)


@a_target
@pytest.mark.parametrize("sizes", [None, flash_jax.BlockSizes(16, 128, 4, 2), flash_jax.BlockSizes(64, 32, 8, 2)])
@pytest.mark.parametrize(("length", "head_dim"), [(1, 64), (7, 32), (70, 8), (300, 48)])
def test_few_numbers_a_thread(length, head_dim, sizes, target):
    """Fewer than some instructions take at once."""
    x = struct(1, length, 2, head_dim)
    compiled = gpu_compile.compile_for(target, gradients(causal=True, block_sizes=sizes), x, x, x)
    assert {kernel.name for kernel in compiled.kernels} >= set(PASSES.values())


@a_target
@pytest.mark.parametrize("kind", ["row", "column", "difference", "entry", "several"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_score_mod(kind, dtype, target, record_property):
    """With gradients of all that it reads, at ragged lengths."""
    c, mod = case("B2-T1000-S900-H4-K2-D64"), READS[kind]
    q, kv = struct(2, c.T, c.H, c.D, dtype=dtype), struct(2, c.S, c.K, c.D, dtype=dtype)
    tables = tuple(struct(*shape, dtype="float32") for shape in mod.tables(c))

    def run(q, k, v, tables):
        def loss(q, k, v, tables):
            call = functools.partial(flash_jax.flash_attention, implementation="triton", causal=True)
            return call(q, k, v, score_mod=mod.function, mod_operands=tables).astype(jnp.float32).sum()

        return jax.grad(loss, (0, 1, 2, 3))(q, k, v, tables)

    compiled = gpu_compile.compile_for(target, run, q, kv, kv, tables)
    limit = MAX_SPILLED_BY_MODS.get(kind, 2048)
    check_and_record(compiled, f"{target.name} D64 {dtype} score_mod {kind} {{}}", limit, record_property)


@a_target
@pytest.mark.parametrize("mapped", [False, True], ids=["no-map", "map"])
def test_mask_mod(mapped, target, record_property):
    def run(q, k, v, ids, states):
        options = {"mask_mod": same_document_nearby, "mod_operands": (ids,)}
        if mapped:
            options["block_mask"] = flash_jax.BlockMask(states, same_document_nearby, (2, 4, 1000, 900))
        return gradients(**options)(q, k, v)

    arrays = struct(2, 1000, 4, 64), struct(2, 900, 2, 64), struct(2, 900, 2, 64)
    more = struct(2, 1000, dtype="int32"), struct(2, 4, 8, 8, dtype="int8")
    compiled = gpu_compile.compile_for(target, run, *arrays, *more)
    label = f"{target.name} D64 bfloat16 mask_mod{' mapped' if mapped else ''} {{}}"
    check_and_record(compiled, label, 1024, record_property)


# Shared memory: what the table's check counts with, against what the compiler asks for.


def shared_bytes(name, call, target):
    """What the compiler asks for in one pass of a call, which is a pair of a spec and an array like the query."""
    spec, x = call
    *_, length, heads, _ = x.shape
    stats = struct(1, heads, length, dtype="float32")
    if name == "forward":
        with compat.quiet_triton_lowering():
            return gpu_compile.shared_bytes(target, lambda q, k, v: triton.forward(q, k, v, Operands(), spec), x, x, x)
    if name == "tangent":
        dots = dict.fromkeys(("query", "key", "value"), x)
        with compat.quiet_triton_lowering():
            tangent = lambda q, k, v, out, lse, dots: triton.tangent((q, k, v, Operands()), out, lse, dots, spec)  # noqa: E731
            return gpu_compile.shared_bytes(target, tangent, x, x, x, x, stats, dots)
    leads = {"query": (1,)} if name == "dq" else {"key": (1,), "value": (1,)}

    def run(q, k, v, out, lse, out_ct):
        return triton.backward((q, k, v, Operands()), out, lse, out_ct, None, leads, spec)

    with compat.quiet_triton_lowering():
        return gpu_compile.shared_bytes(target, run, x, x, x, x, stats, x)


def a_call(head_dim, dtype, sizes=None, length=T, causal=True):
    """A call that names the kernels, all of its sizes static."""
    spec = AttentionSpec(
        scale=0.1, causal=causal, q_length=length, kv_length=length, implementation="triton", block_sizes=sizes
    )
    return spec, struct(1, length, HEADS, head_dim, dtype=dtype)


def estimate(name, call, gpu):
    """What `tiling` counts for the tile that it gives to that call on a GPU of this name."""
    spec, x = call
    with gpu_compile.lowering_for(gpu):
        tile = tiling.tile_for(name, spec, x, x, x, Operands())
        return tiling.sizer(name, spec, x, x, x, Operands())(tile)


@a_target
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("name", tiling.PASSES)
def test_shared_memory_is_no_more_than_counted(name, head_dim, dtype, target):
    call = a_call(head_dim, dtype)
    assert 0 < shared_bytes(name, call, target) <= estimate(name, call, target.name) <= target.shared_memory


@a_target
@pytest.mark.parametrize("head_dim", [128, 192, 256])
@pytest.mark.parametrize("name", tiling.PASSES)
def test_a_tail_of_one_tile_is_counted_too(name, head_dim, target):
    """Without a causal mask a last, partial tile is a step of its own, whose loads stay beside the loop's."""
    call = a_call(head_dim, "bfloat16", length=333, causal=False)
    assert 0 < shared_bytes(name, call, target) <= estimate(name, call, target.name) <= target.shared_memory


@a_target
@pytest.mark.parametrize("length", [33, 63, 100, 130])
@pytest.mark.parametrize("head_dim", [64, 128, 192, 256])
def test_a_loop_over_heads_is_counted_too(head_dim, length, target):
    """Heads that share a key: where each has a tile and the rest of one, both are loaded ahead for the next head."""
    spec, k = a_call(head_dim, "bfloat16", length=length, causal=False)
    q, stats = struct(1, length, 3 * HEADS, head_dim), struct(1, 3 * HEADS, length, dtype="float32")
    with gpu_compile.lowering_for(target.name):
        tile = tiling.tile_for("dkv", spec, q, k, k, Operands())
        counted = tiling.sizer("dkv", spec, q, k, k, Operands())(tile)
    assert counted <= target.shared_memory
    for name in ("key", "value"):  # one at a time, as each may have a kernel of its own

        def run(q, k, v, out, lse, out_ct, name=name):
            return triton.backward((q, k, v, Operands()), out, lse, out_ct, None, {name: (1,)}, spec)[name]

        with compat.quiet_triton_lowering():
            assert 0 < gpu_compile.shared_bytes(target, run, q, k, k, q, stats, q) <= counted


@pytest.mark.parametrize(
    ("head_dim", "length", "causal", "dtype_of_bias"),
    [
        (64, T, False, "bfloat16"), (64, T, True, "float32"), (64, 1000, False, "float32"), (80, T, True, "bfloat16"),
        (128, T, False, "bfloat16"), (128, T, True, "float32"), (128, 1000, False, "bfloat16"),
    ],
)  # fmt: skip
def test_two_examples_in_a_program_of_dq(head_dim, length, causal, dtype_of_bias, monkeypatch, record_property):
    """Which share a bias: the program has room, as counted, and holds the sums of both in registers, but for little."""
    monkeypatch.setattr(stored, "_ENOUGH", 1)
    target, (spec, x) = gpu_compile.H200, a_call(head_dim, "bfloat16", length=length, causal=causal)
    x, stats = struct(2, *x.shape[1:]), struct(2, HEADS, length, dtype="float32")
    operands = Operands(bias=struct(1, HEADS, length, length, dtype=dtype_of_bias))

    def run(q, k, v, operands, out, lse, out_ct):
        wanted = {"query": (2,), "bias": (1,)}
        return triton.backward((q, k, v, operands), out, lse, out_ct, None, wanted, spec)

    with gpu_compile.lowering_for(target.name):
        assert tiling.pairs_fit(spec, x, x, x, operands)
        counted = tiling.sizer("paired", spec, x, x, x, operands)(tiling.tile_for("paired", spec, x, x, x, operands))
    given = x, x, x, operands, x, stats, x
    with compat.quiet_triton_lowering():
        assert 0 < gpu_compile.shared_bytes(target, run, *given) <= counted <= target.shared_memory
        compiled = gpu_compile.compile_for(target, run, *given)
    (kernel,) = (x for x in compiled.kernels if x.name.startswith("flash_attention"))
    label = f"dq of two examples, {head_dim}, {dtype_of_bias} bias, {'causal' if causal else 'full'}, T {length}"
    row = (label, str(kernel.registers), str(kernel.spills), " ".join(kernel.notes), f"{compiled.seconds:.1f}")
    record_property("kernel", row)
    assert kernel.name == PASSES["dq"] and kernel.spills <= MAX_SPILLED["bfloat16"]
    assert not SERIALISED & set(kernel.notes)


def test_where_two_examples_find_no_room_each_has_programs_of_its_own():
    (spec, x), bias = a_call(128, "bfloat16"), struct(1, HEADS, T, T)
    for gpu, sizes, fit in (
        ("NVIDIA H200", None, True),
        ("NVIDIA H200", flash_jax.BlockSizes(block_q=32), False),
        ("NVIDIA A100", None, False),
        ("NVIDIA L4", None, False),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", None, False),
    ):
        with gpu_compile.lowering_for(gpu):
            given = dataclasses.replace(spec, block_sizes=sizes)
            assert tiling.pairs_fit(given, x, x, x, Operands(bias=bias)) == fit
    with gpu_compile.lowering_for("NVIDIA H200"):
        for x in (struct(2, T, HEADS, 256), struct(2, T, HEADS, 64, dtype="float32")):  # noqa: PLW2901
            assert not tiling.pairs_fit(spec, x, x, x, Operands(bias=bias))


@pytest.mark.parametrize("name", PASSES)
def test_what_the_check_refuses_would_not_fit(name, monkeypatch):
    target, sizes = gpu_compile.H200, flash_jax.BlockSizes(block_q=128, block_kv=128, num_warps=8, num_stages=4)
    call = a_call(128, "bfloat16", sizes)
    with pytest.raises(ValueError, match="227 KiB"):
        shared_bytes(name, call, target)
    monkeypatch.setitem(tiling._SHARED_KIB, "9.0", 1000)
    counted = estimate(name, call, target.name)
    assert target.shared_memory < shared_bytes(name, call, target) <= counted
