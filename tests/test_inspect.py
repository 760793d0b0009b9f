"""`explain` and `visualize_mask`: what would run and why not the others, and which tiles are visited (R17)."""

import inspect
import re
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl

import flash_jax
from flash_jax import BlockMask, BlockSizes, arguments, block_mask, explain, reference, visualize_mask
from flash_jax.spec import leads
from flash_jax.tiles.block_map import TileList
from flash_jax.triton.launch import Shape
from flash_jax.triton.operands import Reader, flattened, inputs, specs
from flash_jax.triton.tiling import Tile
from tests.support import gpu_compile
from tests.support.cases import case

NO_GPU = "it needs an NVIDIA GPU, and this program is lowered for another platform"
NO_MOSAIC = "the Mosaic GPU kernels are not part of this version"
TILES, TILES_16 = BlockSizes(block_q=4, block_kv=2), BlockSizes(block_q=16, block_kv=16)


def struct(*shape, dtype="bfloat16"):
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))


X = struct(2, 4096, 8, 64)


# Which tiles are visited.

DRAWN = np.random.default_rng(0)
PACKED = np.repeat([0, 1, 2, 5, -1], [9, 4, 12, 12, 3])
BATCHES = {
    "plain": {},
    "causal": {"causal": True},
    "causal-window": {"causal": True, "window": (9, None)},
    "window": {"window": (3, 11)},
    "offsets": {"causal": True, "q_offset": np.array([-5, 7])},
    "prefix": {"causal": True, "prefix_lengths": np.array([3, 21])},
    "chunk": {"causal": True, "chunk_size": 10},
    "lengths": {"causal": True, "q_lengths": np.array([17, 40]), "kv_lengths": np.array([40, 11])},
    "static-lengths": {"q_lengths": 30, "kv_lengths": 21, "window": (None, 6)},
    "segments-sorted": {"causal": True, "segment_ids": np.stack([PACKED, np.sort(PACKED)])},
    "segments-unsorted": {"segment_ids": DRAWN.integers(-1, 2, (2, 40))},
    "positions": {"causal": True, "q_positions": np.arange(40)[::-1], "kv_positions": DRAWN.permutation(40)},
    "positions-window": {"window": (12, 3), "q_positions": np.sort(DRAWN.integers(0, 90, (2, 40)))},
    "mask": {"causal": True, "mask": DRAWN.random((2, 2, 40, 40)) < 0.5},
    "bias": {"bias": np.where(DRAWN.random((40, 40)) < 0.5, -np.inf, 0).astype(np.float32)},
    "mask-mod": {"causal": True, "mask_mod": lambda b, h, i, j: (i + j + b) % 3 > h},
    "mask-mod-operands": {"mask_mod": lambda b, h, i, j, x, ids: ids[b, i] == ids[b, j], "window": (9, 9)},
}
BATCHES["mask-mod-operands"]["mod_operands"] = (np.ones(3), DRAWN.integers(0, 3, (2, 40)).astype(np.int32))


def by_definition(options):
    """bool [B, H, T, S]: what the reference allows."""
    q, k, _, operands, spec = arguments.normalise(*case("B2-T40-H2-D8-f32").arrays(), **options)
    allowed = reference._allowed(q.shape[-3], k.shape[-3], operands, spec)
    if spec.mask_mod is not None:
        allowed &= reference._modified(spec.mask_mod, [], operands, (2, 40, 40))
    return np.broadcast_to(allowed, (2, 2, 40, 40))


@pytest.mark.parametrize("name", BATCHES)
def test_tiles_against_brute_force(name):
    """No tile is skipped in which something is allowed, and in a full one everything is, in rows before the length."""
    options = BATCHES[name]
    arrays = case("B2-T40-H2-D8-f32").arrays()
    lengths = np.broadcast_to(options.get("q_lengths", 40), (2,))
    allowed, tiled = by_definition(options), by_definition({n: x for n, x in options.items() if n != "bias"})
    for example in range(2):
        found = visualize_mask(*arrays, **options, example=example, head=1, block_sizes=TILES)
        np.testing.assert_array_equal(found.allowed, allowed[example, 1])
        past = np.arange(40)[:, None] >= lengths[example]
        some = tiled[example, 1].reshape(10, 4, 20, 2).any((1, 3))  # [query tiles, key tiles]
        every = (tiled[example, 1] | past).reshape(10, 4, 20, 2).all((1, 3))
        assert not some[found.tiles == 0].any() and every[found.tiles == 2].all()
        assert found.pairs == tuple((found.tiles == state).sum() for state in (2, 1, 0))
        assert found.pairs.full > 0 or name in ("segments-unsorted", "positions", "mask") or "mask_mod" in options
        assert found.pairs.skipped > 0 or name in ("plain", "segments-unsorted", "positions", "bias")


@pytest.mark.parametrize("name", ["causal", "lengths", "segments-sorted", "mask", "mask-mod"])
def test_the_counts_of_a_call_are_those_of_its_examples(name):
    arrays, options = case("B2-T40-H2-D8-f32").arrays(), {**BATCHES[name], "block_sizes": TILES_16}
    one, other = (np.array(visualize_mask(*arrays, **options, example=n).pairs) for n in range(2))
    assert explain(*arrays, **options).pairs == tuple(one + other)


@pytest.mark.parametrize(
    "name", ["causal-window", "lengths", "prefix", "segments-sorted", "positions", "mask", "mask-mod"]
)
def test_tiles_are_those_of_the_kernels(name):
    """Each program of a Pallas kernel writes the range that it would run over."""
    tile = Tile(16, 16, 4, 1)
    q, k, v, operands, spec = arguments.normalise(*case("B2-T40-H2-D8-f32").arrays(), **BATCHES[name])
    shape = Shape.of(q, k, v, np.broadcast_shapes(q.shape[:-3], *leads(operands, 1)))
    extra = inputs(operands, tile, shape, spec)

    def kernel(extra, out_ref):
        seen = Reader.of(extra, spec, shape, tile, (pl.program_id(2), pl.program_id(1))).kv_range(pl.program_id(0))
        out_ref[...] = jnp.stack([jnp.asarray(x, jnp.int32) for x in seen])

    visited = pl.pallas_call(
        kernel,
        grid=(3, 2, 2),
        in_specs=(specs(extra, shape, None),),
        out_specs=pl.BlockSpec((None, None, None, 4), lambda i, h, b: (b, h, i, 0)),
        out_shape=jax.ShapeDtypeStruct((2, 2, 3, 4), jnp.int32),
        interpret=True,
    )(flattened(extra, shape))
    for example in range(2):
        found = visualize_mask(q, k, v, **BATCHES[name], example=example, block_sizes=TILES_16).survey
        ours = np.stack(found[:4], axis=-1)
        for head in range(2):
            np.testing.assert_array_equal(ours, visited[example, head])


# With a map of the mask_mod's blocks.


def banded(b, h, i, j):
    return (i - j <= 200 * (b + 1)) & (i - j >= -130 * h)


MAPPED = {
    "alone": {},
    "causal-window": {"causal": True, "window": (300, None)},
    "lengths": {"causal": True, "q_lengths": np.array([500, 333]), "kv_lengths": np.array([130, 500])},
    "segments": {"segment_ids": np.repeat([0, 1, 4, -1], [128, 200, 130, 42])},
    "positions": {"causal": True, "kv_positions": np.arange(500)[::-1].copy()},
    "mask": {"mask": np.ones((500, 500), bool)},
}
SIZES = {"smaller": (32, 64), "tall": (256, 16), "wide": (16, 256)}
LONG = struct(2, 500, 2, 16)


@pytest.fixture(scope="module")
def of_banded():
    return block_mask(banded, (2, 2, 500, 500))


@pytest.mark.thorough
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("name", MAPPED)
def test_tiles_of_a_map_against_brute_force(name, sizes, of_banded):
    """No tile is skipped in which something is allowed, and in a full one everything is, in rows before the length."""
    block_q, block_kv = SIZES[sizes]
    options = {**MAPPED[name], "block_mask": of_banded}
    q, k, v, operands, spec = arguments.normalise(*case("B2-T500-H2-D8-f32").arrays(), **options)
    allowed = reference._allowed(500, 500, operands, spec)
    allowed &= reference._modified(spec.mask_mod, [], operands, (2, 500, 500))
    lengths, counts = np.broadcast_to(options.get("q_lengths", 500), (2,)), np.zeros(3, int)
    tile, blocks = (-(-500 // block_q), block_q, -(-500 // block_kv), block_kv), BlockSizes(block_q, block_kv)
    padding = [(0, n * m - 500) for n, m in (tile[:2], tile[2:])]
    for example in range(2):
        for head in range(2):
            found = visualize_mask(q, k, v, **options, example=example, head=head, block_sizes=blocks)
            one = np.asarray(allowed)[example, head]
            past = np.arange(500)[:, None] >= lengths[example]
            some = np.asarray(np.pad(one, padding).reshape(tile).any((1, 3)))
            every = np.asarray(np.pad(one | past, padding, constant_values=True).reshape(tile).all((1, 3)))
            assert not some[found.tiles == 0].any() and every[found.tiles == 2].all()
            assert found.pairs == tuple((found.tiles == state).sum() for state in (2, 1, 0))
            counts += found.pairs
    assert counts[2] > 0 and (counts[0] > 0 or name == "mask" or sizes != "smaller")
    assert counts[0] == 0 or name != "mask"
    assert explain(LONG, LONG, LONG, **options, block_sizes=blocks).pairs == tuple(counts)


@pytest.mark.thorough
@pytest.mark.parametrize("name", MAPPED)
def test_tiles_of_a_map_are_those_of_the_kernels(name, of_banded):
    """Each program of a Pallas kernel writes the list that it would run over."""
    options, tile = {**MAPPED[name], "block_mask": of_banded}, Tile(64, 32, 4, 1)
    q, k, v, operands, spec = arguments.normalise(*case("B2-T500-H2-D8-f32").arrays(), **options)
    shape = Shape.of(q, k, v, (2,))
    extra = inputs(operands, tile, shape, spec)

    def kernel(extra, out_ref):
        seen = Reader.of(extra, spec, shape, tile, (pl.program_id(2), pl.program_id(1))).kv_range(pl.program_id(0))
        assert isinstance(seen, TileList)
        numbers = jnp.arange(16, dtype=jnp.int32)
        state = (numbers < seen.stop).astype(jnp.int32) + (numbers < seen.full).astype(jnp.int32)
        order = jnp.stack([jnp.asarray(seen.tile(n), jnp.int32) for n in range(16)])
        out_ref[...] = jnp.where(order[None, :] == numbers[:, None], state[None, :], 0).sum(1)

    visited = pl.pallas_call(
        kernel,
        grid=(8, 2, 2),
        in_specs=(specs(extra, shape, None),),
        out_specs=pl.BlockSpec((None, None, None, 16), lambda i, h, b: (b, h, i, 0)),
        out_shape=jax.ShapeDtypeStruct((2, 2, 8, 16), jnp.int32),
        interpret=True,
    )(flattened(extra, shape))
    sizes = BlockSizes(block_q=64, block_kv=32)
    for example in range(2):
        for head in range(2):
            found = visualize_mask(q, k, v, **options, example=example, head=head, block_sizes=sizes)
            np.testing.assert_array_equal(found.tiles, visited[example, head])


def test_picture_of_a_map():
    dilated = block_mask(lambda b, h, i, j: (i // 128 - j // 128) % (h + 2) == 0, (2, 640, 640))
    x, sizes = struct(640, 2, 64), BlockSizes(block_q=128, block_kv=128)
    drawn = str(visualize_mask(x, x, x, block_mask=dilated, causal=True, head=1, block_sizes=sizes)).splitlines()
    assert drawn[1:] == ["# 2 full, / 5 partial, . 18 skipped", "/....", "./...", "../..", "#../.", ".#../"]
    found = explain(x, x, x, block_mask=dilated, causal=True)
    assert found.heads == 2 and "; of all 2 heads, all examples" in str(found)
    assert explain(x, x, x, mask_mod=dilated.mask_mod, causal=True).pairs.full == 0
    assert explain(x, x, x, score_mod=lambda s, b, h, i, j: s, causal=True).pairs == explain(x, x, x, causal=True).pairs


def test_entries_of_a_mask_mod_and_not_of_a_score_mod():
    """A table is read at indices moved to its ends; each head has its own entries."""
    x, table = struct(3, 6, 2, 16), DRAWN.random((2, 4)) < 0.5
    options = {"mask_mod": lambda b, h, i, j, t: t[h, i - j] | (b == 1), "mod_operands": (table,)}
    options["score_mod"] = lambda s, b, h, i, j, t: jnp.where(i < j, -jnp.inf, s)
    i, j = np.ogrid[:6, :6]
    for example in range(3):
        for head in range(2):
            found = visualize_mask(x, x, x, **options, example=example, head=head)
            expected = table[head, np.clip(i - j, 0, 3)] | (example == 1)
            np.testing.assert_array_equal(found.allowed, expected)


def test_mask_and_bias_of_another_head():
    mask = np.arange(4)[:, None, None] >= np.zeros((4, 1, 1), int) + np.array([[0, 1, 2, 3]])[:, None]
    x = struct(4, 4, 8)
    for head in range(4):
        found = visualize_mask(x, x, x, mask=mask, head=head, block_sizes=TILES)
        np.testing.assert_array_equal(found.allowed, np.broadcast_to(np.arange(4) <= head, (4, 4)))


# Text.


def picture(*shape, **options):
    sizes = BlockSizes(block_q=2, block_kv=2)
    x = struct(*shape)
    return str(visualize_mask(x, x, x, **{"block_sizes": sizes, **options})).splitlines()


def test_picture_of_a_causal_call():
    assert picture(8, 1, 16, causal=True) == [
        "T = 8, S = 8, tiles of 2 x 2, example 0, head 0",
        "# 6 full, / 4 partial, . 6 skipped",
        "/...",
        "#/..",
        "##/.",
        "###/",
    ]


def test_picture_of_segments():
    ids = np.array([[0] * 12, [0, 0, 0, 0, 0, 3, 3, 3, 3, 3, 3, -1]])
    assert picture(2, 12, 1, 16, segment_ids=ids, example=1) == [
        "T = 12, S = 12, tiles of 2 x 2, example 1, head 0",
        "# 8 full, / 16 partial, . 12 skipped",
        "##/...",
        "##/...",
        "//////",
        "../##/",
        "../##/",
        "..////",
    ]


def test_picture_of_a_long_call_joins_tiles():
    lines = picture(512, 1, 16, window=(31, 0))
    assert lines[2] == "a character stands for 4 x 4 tiles" and len(lines) == 3 + 64
    for row, line in enumerate(lines[7:], 4):  # from where the window no longer begins before the first key
        assert line == "." * (row - 4) + "/###/" + "." * (63 - row)


def test_no_queries_or_no_keys():
    empty, full = struct(2, 0, 1, 16), struct(2, 5, 1, 16)
    for arrays in ((empty, full, full), (full, empty, empty)):
        assert visualize_mask(*arrays, causal=True).pairs == explain(*arrays).pairs == (0, 0, 0)
        assert str(visualize_mask(*arrays)).endswith("# 0 full, / 0 partial, . 0 skipped")


@pytest.mark.thorough
@pytest.mark.parametrize("page, shown", [("masks", 6), ("mods", 2)])
def test_a_page_prints_what_it_shows(page, shown, capsys):
    """The page's blocks of Python, those that print followed by the text; in one namespace."""
    text = (Path(__file__).parent.parent / "docs" / f"{page}.md").read_text()
    blocks = re.findall(r"```(python|text)\n(.*?)```", text, re.DOTALL)
    names, printed = {}, ""
    for language, block in blocks:
        if language == "python":
            assert not printed
            exec(block, names)
            printed = capsys.readouterr().out
        else:
            assert printed == block
            printed = ""
    assert not printed and [language for language, _ in blocks].count("text") == shown


# What would run.


def test_a_cpu_and_a_gpu_that_is_not_there():
    found = explain(X, X, X, causal=True)
    assert found.here.name == "cpu" and found.gpu.name == "an unknown NVIDIA GPU"
    assert found.here.picked == "xla" and found.gpu.picked == "triton" and found.named is None
    assert found.here.why_not == {"triton": NO_GPU, "mosaic_gpu": NO_MOSAIC, "xla": None, "reference": None}
    assert found.gpu.why_not == {"triton": None, "mosaic_gpu": NO_MOSAIC, "xla": None, "reference": None}
    assert found.tiles["forward"] == Tile(128, 64, 4, 3) and set(found.tiles) == {"forward", "dq", "dkv", "tangent"}
    assert found.shared_bytes["forward"] == 2 * 64 * (128 + 3 * 2 * 64)
    assert found.pairs == (1984, 128, 1984) and found.unknown == ()
    assert found.residual_bytes == {"out": 2 * 4096 * 8 * 64 * 2, "lse": 2 * 4096 * 8 * 4}


def test_the_table():
    with gpu_compile.lowering_for("NVIDIA H200"):
        text = str(explain(X, X, X, causal=True, implementation="triton"))
    assert (
        text
        == f"""\
query [2, 4096, 8, 64], key [2, 4096, 8, 64], value [2, 4096, 8, 64], bfloat16

implementation  this machine (cpu)  NVIDIA H200
triton          no [1]              picked
mosaic_gpu      no [2]              no [2]
xla             picked              yes
reference       yes                 yes
[1] {NO_GPU}
[2] {NO_MOSAIC}
implementation='triton' is named: it raises an error on this machine (cpu), runs on NVIDIA H200

triton's tiles  block_q  block_kv  num_warps  num_stages  shared memory
forward         128      64        4          3           64 KiB
dq              64       64        4          2           48 KiB
dkv             64       64        4          3           66 KiB
tangent         64       64        4          3           112 KiB

forward, pairs of tiles: 1984 full (48.4%), 128 partial (3.1%), 1984 skipped (48.4%); of one head, all examples
products of float32 inputs: float32 accuracy (on GPUs three TF32 products)
kept for the backward pass: out 8,388,608 bytes, lse 262,144 bytes"""
    )


def test_an_old_gpu():
    with gpu_compile.lowering_for("Tesla T4"):
        found = explain(X, X, X)
    assert found.gpu.name == "Tesla T4" and found.gpu.picked == "xla"
    assert found.gpu.why_not["triton"] == "it needs compute capability 8.0 or newer, and Tesla T4 has 7.5"
    assert found.tiles == {} and found.pairs is None and "triton's tiles" not in str(found)


def test_wide_heads():
    x = struct(8, 1, 512)
    found = explain(x, x, x, implementation="triton")
    assert found.here.why_not["triton"] == "it takes head dims up to 256, and these are 512 and 512"
    assert found.gpu.picked == "xla" and found.named == "triton"
    assert visualize_mask(x, x, x).blocks == (64, 64)


def test_float64():
    with jax.enable_x64(True):
        found = explain(*case("T8-f64").arrays())
        assert found.residual_bytes["lse"] == 8 * 2 * 8
    assert found.gpu.why_not["triton"] == "it takes bfloat16, float16 and float32, and the inputs are float64"


def test_interpret_mode():
    with flash_jax.interpret_mode():
        found = explain(X, X, X, implementation="triton")
    assert found.here.why_not["triton"] is None and found.here.picked == "xla"


@pytest.mark.parametrize(
    "sizes, reason",
    [
        (BlockSizes(block_q=100), "`block_sizes`: block_q of the forward pass must be a power of two of at least 16"),
        (BlockSizes(block_q=512, block_kv=512), "`block_sizes` for the forward pass needs about"),
    ],
    ids=["no-power-of-two", "too-large"],
)
def test_block_sizes_that_triton_does_not_take(sizes, reason):
    found = explain(X, X, X, block_sizes=sizes)
    assert found.gpu.why_not["triton"].startswith(reason) and found.gpu.picked is None and found.here.picked == "xla"
    with pytest.raises(ValueError) as error:
        gpu_compile.lower(lambda *x: flash_jax.flash_attention(*x, block_sizes=sizes), X, X, X, gpu="a GPU of tomorrow")
    assert str(error.value)[:40] == reason[:40]


@pytest.mark.parametrize(
    "precision, expected, words",
    [(None, "x3", "three TF32"), ("highest", "ieee", "IEEE float32"), ("tensorfloat32", "tf32", "one TF32 product")],
)
def test_precision(precision, expected, words):
    found = explain(X, X, X, precision=precision)
    assert found.precision == expected and words in str(found)


def test_explicit_mesh_axes():
    mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Explicit,))
    with jax.set_mesh(mesh):
        by_batch = jax.device_put(jnp.ones((2, 8, 1, 16)), jax.P("x"))
        by_length = jax.device_put(jnp.ones((2, 8, 1, 16)), jax.P(None, "x"))
        found, refused = explain(by_batch, by_batch, by_batch), explain(by_length, by_length, by_length)
    assert found.here.picked == "xla"
    assert refused.here.why_not["reference"] is None and refused.here.picked is None
    assert refused.here.why_not["xla"].startswith("Dim -3 of `query` is sharded over the explicit mesh axes ['x']")


# Traced and abstract operands.


def test_under_jit():
    """What shapes decide is known, and so is what does not rest on a traced value."""
    seen = {}

    @jax.jit
    def f(q, lengths, mask):
        seen["lengths"] = explain(q, q, q, kv_lengths=lengths), visualize_mask(q, q, q, kv_lengths=lengths)
        seen["constant"] = visualize_mask(q, q, q, causal=True, kv_lengths=np.array([3, 9]), example=1)
        seen["mask"] = visualize_mask(q, q, q, mask=mask), explain(q, q, q, mask=mask)
        seen["mapped"] = jax.vmap(lambda x: x * explain(x, x, x, causal=True).pairs.partial)(q)
        with pytest.raises(ValueError, match=r"cannot be drawn: kv_lengths have no values here. Call .* outside jit"):
            seen["lengths"][1].figure()
        return q

    f(jnp.ones((2, 40, 1, 16)), jnp.array([3, 9]), jnp.ones((40, 40), bool))
    explained, drawn = seen["lengths"]
    assert explained.pairs is None and explained.unknown == drawn.unknown == ("kv_lengths",)
    assert explained.tiles and "pairs of tiles: unknown, since these have no values here: kv_lengths" in str(explained)
    assert drawn.pairs is None and drawn.tiles is None and drawn.allowed is None
    assert str(drawn).endswith("\nunknown, since these have no values here: kv_lengths")
    np.testing.assert_array_equal(seen["constant"].allowed, np.tri(40, 40, 9 - 40) > 0)  # key j <= query i - 31
    drawn, explained = seen["mask"]
    assert drawn.allowed is None and drawn.unknown == ("mask",) and drawn.pairs.full == 0 == explained.pairs.full
    assert "entries unknown, since these have no values here: mask" in str(drawn)


def test_a_map_and_tables_without_values():
    """Abstract or traced; a table that no mask_mod reads is of no account."""
    x, table = struct(2, 40, 2, 16), struct(3, dtype="float32")
    same = lambda b, h, i, j, *t: i >= j  # noqa: E731
    read = lambda b, h, i, j, t: (i >= j) | (t[i] > 0)  # noqa: E731
    abstract = BlockMask(struct(2, 1, 1, 1, dtype="int8"), same, (2, 1, 40, 40))
    for found in (explain(x, x, x, block_mask=abstract), visualize_mask(x, x, x, block_mask=abstract)):
        assert found.unknown == ("block_mask",) and found.pairs is None
        assert "unknown, since these have no values here: block_mask" in str(found)
    found = visualize_mask(x, x, x, mask_mod=same, mod_operands=(table,))
    np.testing.assert_array_equal(found.allowed, np.tri(40, dtype=bool))
    found = visualize_mask(x, x, x, mask_mod=read, mod_operands=(table,))
    assert found.allowed is None and found.unknown == ("mod_operands[0]",) and found.pairs == (0, 1, 0)
    assert explain(x, x, x, mask_mod=read, mod_operands=(table,)).pairs.full == 0
    biased = explain(x, x, x, score_mod=lambda s, b, h, i, j, t: s + t[i - j], mod_operands=(table,))
    assert biased.pairs == explain(x, x, x).pairs and biased.gpu.picked == "triton"

    @jax.jit
    def f(table, traced):
        seen = visualize_mask(x, x, x, mask_mod=read, mod_operands=(table,))
        assert seen.allowed is None and seen.unknown == ("mod_operands[0]",)
        assert explain(x, x, x, block_mask=traced).unknown == ("block_mask",)
        assert explain(x, x, x, block_mask=known).pairs == (0, 2, 0)
        return table

    known = block_mask(same, (40, 40))
    f(jnp.ones(3), known)


def test_abstract_operands_count_as_unknown():
    ids = struct(2, 4096, dtype="int32")
    found = explain(X, X, X, segment_ids=ids, bias=struct(4096, 4096))
    assert found.unknown == ("q_segment_ids", "kv_segment_ids") and found.pairs is None


# Errors.


@pytest.mark.parametrize("function", [explain, visualize_mask])
@pytest.mark.parametrize(
    "options",
    [
        {"window": (-1, 3)},
        {"causal": 1},
        {"mask": np.ones((4, 4), np.int32)},
        {"return_lse": None},
        {"implementation": "cudnn"},
        {"prefix_lengths": 3},
        {"dropout_rate": 0.5},
        {"value": [1.0]},
        {"key": np.ones((4, 2, 8), np.float32)},
        {"query": np.ones((4, 8), jnp.bfloat16)},
        {"score_mod": lambda s, b, h, i, j: s > 0},
        {"mask_mod": lambda b, h, i, j: i - j},
        {"mod_operands": (np.ones(3),)},
        {"block_mask": np.ones((1, 1), np.int8)},
        {"block_mask": block_mask(lambda b, h, i, j: i >= j, (4, 5))},
    ],
    ids=lambda options: next(iter(options)),
)
def test_errors_are_those_of_flash_attention(function, options):
    x = np.ones((4, 2, 8), jnp.bfloat16)
    given = {"query": x, "key": x, "value": x, **options}
    with pytest.raises((TypeError, ValueError)) as expected:
        flash_jax.flash_attention(**given)
    with pytest.raises(expected.type) as error:
        function(**given)
    assert str(error.value) == str(expected.value)


def test_every_argument_of_flash_attention_is_taken():
    parameters = inspect.signature(flash_jax.flash_attention).parameters
    defaults = {name: p.default for name, p in parameters.items() if p.default is not p.empty}
    for function in (explain, visualize_mask):
        assert str(function(X, X, X, **defaults)) == str(function(X, X, X))
        with pytest.raises(TypeError, match=rf"{function.__name__}\(\) got an unexpected keyword argument 'is_causal'"):
            function(X, X, X, is_causal=True)


@pytest.mark.parametrize(
    "options, error, message",
    [
        ({"example": 2}, ValueError, "`example` must be at least 0 and less than 2, how many there are; got 2."),
        ({"example": -1}, ValueError, "`example` must be at least 0"),
        ({"head": 8}, ValueError, "`head` must be at least 0 and less than 8, how many there are; got 8."),
        ({"head": 1.0}, TypeError, "`head` must be an int; got float."),
    ],
)
def test_examples_and_heads_that_are_not_there(options, error, message):
    with pytest.raises(error, match=message):
        visualize_mask(X, X, X, **options)


# Figures.


def test_a_figure_is_written(tmp_path):
    pytest.importorskip("matplotlib")
    file, x = tmp_path / "mask.png", struct(40, 1, 16)
    found = visualize_mask(x, x, x, causal=True, block_sizes=TILES, path=file)
    assert file.read_bytes().startswith(b"\x89PNG")
    figure = found.figure()
    (axes,), (legend,) = figure.axes, figure.legends
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("keys", "queries")
    assert axes.get_xlim() == (0, 40) and axes.get_ylim() == (40, 0)
    np.testing.assert_array_equal(axes.images[0].get_array(), found.tiles)
    assert len(axes.collections[-1].get_offsets()) == 40 * 41 // 2
    labels = ["full: without a mask", "partial: with a mask", "skipped", "allowed entry"]
    assert [text.get_text() for text in legend.get_texts()] == labels


def test_a_figure_of_a_long_call_has_no_entries():
    pytest.importorskip("matplotlib")
    figure = visualize_mask(X, X, X, causal=True, block_sizes=BlockSizes(block_q=2, block_kv=16)).figure()
    assert figure.axes[0].images[0].get_array().shape == (1024, 256)
    assert len(figure.legends[0].get_texts()) == 3


def test_without_matplotlib(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.setitem(sys.modules, "matplotlib.colors", None)
    with pytest.raises(ImportError, match="drawn with matplotlib, which is not installed: `pip install matplotlib`"):
        visualize_mask(X, X, X, path=tmp_path / "mask.png")
