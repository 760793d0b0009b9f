"""Faults that people have met in other attention kernels, each as a test of this one; docs/cases.md maps all of them.

Where a case is large, its sizes are scaled down so that interpret mode can run it with tiles of 16, which keeps the
ratio of lengths to tiles, and with it the kind of the fault; the docstring says so.
"""

import functools
import pathlib
import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import flash_jax
from tests.support import gpu_compile
from tests.support.accuracy import assert_agrees, assert_slope, check
from tests.support.cases import case
from tests.support.programs import Program, forward, gradients, values_and_gradients
from tests.support.structure import temporary_bytes

ROW_0 = np.array([False, True, True, True])[:, None] & np.ones((4, 6), bool)
ROW_0_DEAD = {
    "offset": ({"causal": True, "q_offset": -1}, {}),
    "mask": ({"mask": ROW_0[None, None]}, {}),
    "bias": ({}, {"bias": np.where(ROW_0, np.float32(0), np.float32(-np.inf))}),
}


@pytest.mark.parametrize("options, riding", ROW_0_DEAD.values(), ids=ROW_0_DEAD)
def test_a01_a_row_with_nothing_to_attend(attend, options, riding):
    """Row 0 is dead, by a mask, a bias of -inf or an offset: zeros and -inf; the rows beside it are unharmed."""
    c = case("B1-T4-S6-H2-D8-f32")
    out, lse = check(forward(**options), attend, *c.arrays(), riding)
    assert not np.any(out[0, 0]) and (np.asarray(lse)[0, :, 0] == -np.inf).all()
    assert np.any(out[0, 1:], axis=-1).all()


@pytest.mark.thorough
@pytest.mark.parametrize("options, riding", ROW_0_DEAD.values(), ids=ROW_0_DEAD)
def test_a02_a_dead_row_outside_the_loss(attend, options, riding):
    """The loss reads rows 1 to 3 only: every gradient is finite, and that of the dead row is zero."""
    c = case("B1-T4-S6-H2-D8-bf16")
    dout = np.ones(c.arrays()[0].shape, c.dtype)
    dout[:, 0] = 0
    dq, *_, of_bias = check(gradients(**options), attend, (*c.arrays(), riding), (dout, None))
    assert not np.any(dq[0, 0])
    assert not riding or not np.any(of_bias["bias"][0])


@pytest.mark.thorough
def test_a03_the_lowest_finite_bias_is_no_mask(attend):
    """float16, 128 tokens scaled to 40: -65504 in a third of the cells and one row of nothing else, which is a softmax
    like any other; and zero cotangents give zeros."""
    c = case("B2-T40-H2-D64-f16")
    *inputs, riding = c.inputs(bias=(2, 1, 40, 40))
    low = c.normal((2, 1, 40, 40), 1, "low") > 0.4
    low[0, 0, 7] = True
    bias = np.where(low, np.finfo(np.float16).min, riding["bias"])
    given = (*inputs, {"bias": bias})
    (out, _), _ = check(values_and_gradients(), attend, given, c.cotangents())
    assert np.any(out[0, 7], axis=-1).all()
    zeros = jax.tree.map(np.zeros_like, c.cotangents())
    assert not any(np.any(g) for g in jax.tree.leaves(jax.jit(functools.partial(gradients(), attend))(given, zeros)))


@pytest.mark.thorough
@pytest.mark.parametrize("spelling", ["window", "mask", "bias"])
def test_a05_a_band_whose_first_tiles_are_masked(attend, spelling):
    """640 tokens, of which each sees 10: scaled to 160, ten tiles; late rows meet no live key in most of them."""
    c = case("T160-H1-D4-f32")
    distance = np.arange(160)[:, None] - np.arange(160)
    band = (distance >= 0) & (distance <= 9)
    options = {"window": {"window": (9, 0)}, "mask": {"mask": band}, "bias": {}}[spelling]
    riding = {"bias": np.where(band, np.float32(0), np.float32(-np.inf))} if spelling == "bias" else {}
    check(forward(**options), attend, *c.arrays(), riding)


@pytest.mark.parametrize("value", [133120.0, -133120.0])
def test_a09_scores_of_1e11(attend, value):
    """A single key has the weight 1, however large its score."""
    x = jnp.full((1, 1, 1, 64), value, jnp.bfloat16)
    np.testing.assert_array_equal(attend(x, x, x), x)


def test_a09_equal_scores_of_1e11(attend):
    """Several equal keys in several tiles share the weight evenly: score and row maximum round alike."""
    x = jnp.full((1, 40, 1, 64), 133120, jnp.bfloat16)
    np.testing.assert_array_equal(attend(x, x, x), x)


def test_a10_scores_beyond_float16(attend):
    """q . k is 720000, more than a float16 holds."""
    x = jnp.full((1, 4, 1, 8), 300, jnp.float16)
    np.testing.assert_array_equal(attend(x, x, x), x)
    ones = jnp.ones((1, 40, 1, 8), jnp.float16)
    np.testing.assert_array_equal(attend(ones, ones, ones, causal=True), ones)


def test_a12_scores_beyond_the_cap(attend):
    """128 tokens scaled to 40; queries and keys times 4, so that many scores exceed the cap of 20."""
    c = case("B1-T40-H2-D64-f32")
    q, k, v = c.arrays()
    check(values_and_gradients(softcap=20.0), attend, (4 * q, 4 * k, v), c.cotangents())


def test_a12_finite_differences():
    """Three entries of each gradient, in float64."""
    with jax.enable_x64(True):
        c = case("T9-S13-H2-D5-f64")
        arrays, (dout, _) = tuple(4 * x for x in c.arrays()), c.cotangents()
        tiles = flash_jax.BlockSizes(block_q=4, block_kv=4)
        attend = functools.partial(flash_jax.flash_attention, softcap=3.0, implementation="xla", block_sizes=tiles)
        loss = jax.jit(lambda *x: (attend(*x) * dout).sum())
        for argument, gradient in enumerate(jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(*arrays)):
            for index in [(3, 1, 2), (7, 0, 0), (0, 1, 4)]:
                assert_slope(gradient, loss, arrays, argument, index)


@pytest.mark.parametrize("name", ["B1-T1-S1-H1-D16-f16", "B1-T40-S1-H2-D16-f16", "B1-T40-S1-H2-D16-f32"])
def test_a13_one_key_has_no_gradient_to_its_score(attend, name):
    """The output is the value, its gradient the cotangents' sum; dq and dk cancel (the 1e-3 is the case's)."""
    c = case(name)
    inputs = tuple(3 * x for x in c.arrays())
    out, pull = jax.vjp(attend, *inputs)
    np.testing.assert_array_equal(out, np.broadcast_to(inputs[2], out.shape))
    dq, dk, dv = pull(jnp.ones_like(out))
    np.testing.assert_array_equal(dv, np.full_like(dv, c.T))
    for gradient in (dq, dk):
        assert np.abs(np.asarray(gradient, np.float32)).max() <= 1e-3


@pytest.mark.parametrize("name", ["B2-T32-S128-H2-D64-f16", "B2-T128-S32-H2-D64-f16"])
def test_b01_lengths_that_differ(attend, name):
    """512 queries and 2048 keys, and the reverse: scaled by 16."""
    check(forward(), attend, *case(name).arrays())


def test_b03_causal_with_more_queries_than_keys(attend):
    """2048 queries, 1024 keys: scaled to 128 and 64. The first half of the rows is dead, gradients included."""
    c = case("B1-T128-S64-H2-D64-bf16")
    (out, lse), (dq, _, _) = check(values_and_gradients(causal=True), attend, c.arrays(), c.cotangents())
    assert not np.any(out[:, :64]) and not np.any(dq[:, :64]) and (np.asarray(lse)[..., :64] == -np.inf).all()


def test_b04_one_query_sees_every_key(attend):
    """Bottom-right by default; `q_offset=0` is the other choice, and sees the first key alone."""
    q, k, v = case("B1-T1-S6-H2-D8-f32").arrays()
    np.testing.assert_array_equal(attend(q, k, v, causal=True), attend(q, k, v))
    np.testing.assert_array_equal(attend(q, k, v, causal=True, q_offset=0)[:, 0], v[:, 0])


def test_b06_forward_and_backward_agree_on_the_diagonal(attend):
    """96 queries, 160 keys, 8 heads on 2: scaled by 2 in the lengths and heads."""
    c = case("B2-T48-S80-H4-K1-D64-bf16")
    check(gradients(causal=True), attend, c.arrays(), c.cotangents())


def test_b08_a_window_of_two_is_three_keys(attend):
    q, k, v = np.zeros((8, 1, 8), np.float32), np.ones((8, 1, 8), np.float32), np.eye(8, dtype=np.float32)[:, None]
    out = check(forward(window=(2, 0)), attend, q, k, v)[0]
    assert list(np.flatnonzero(out[5, 0])) == [3, 4, 5]


def test_b10_windows_beside_the_keys(attend):
    """T = 129, S = 64, window (32, 64): rows whose window lies before the first key are dead."""
    out, lse = check(forward(window=(32, 64)), attend, *case("T129-S64-H1-D16-f32").arrays())
    seen = [max(0, i - 65 - 32) <= min(63, i - 65 + 64) for i in range(129)]
    assert list(np.any(out[:, 0], axis=-1)) == seen and list(np.isfinite(lse[0])) == seen


@pytest.mark.parametrize("window", [(0, 31), (0, 0)])
def test_b12_a_window_without_a_mask(attend, window):
    """2048 queries, 2080 keys: scaled to 128 and 160, which keeps the offset of 32."""
    arrays = case("T128-S160-H1-D16-f32").arrays()
    out = check(forward(window=window), attend, *arrays)[0]
    assert np.any(out != attend(*arrays))


ALONE = [
    {"causal": True},
    {"window": (3, 2)},
    {"window": (None, 2)},
    {"causal": True, "q_offset": 3},
    {"q_lengths": np.array([9])},
    {"kv_lengths": np.array([30])},
    {"q_lengths": 9},
    {"kv_lengths": 30},
    {"scale": 0.9},
    {"bias": np.arange(35, dtype=np.float32)},
    {"mask": np.arange(35) > 2},
    {"causal": True, "prefix_lengths": 25},
    {"chunk_size": 19},
    {"causal": True, "q_positions": np.arange(20)},
    {"causal": True, "kv_positions": np.arange(35)[::-1]},
    {"q_segment_ids": np.zeros(20, int), "kv_segment_ids": np.arange(35) // 30},
    {"softcap": 1.0},
    {"alibi_slopes": np.array([0.0, 0.5], np.float32)},
    {"sinks": np.array([0.0, 1.0], np.float32)},
    {"dropout_rate": 0.1, "dropout_key": np.array([0, 1], np.uint32)},
]


@pytest.mark.parametrize("options", ALONE, ids=lambda options: "-".join(options))
def test_b12_every_argument_has_an_effect_of_its_own(attend, options):
    arrays = case("B1-T20-S35-f32").arrays()
    without = attend(*arrays, causal="causal" in options and len(options) > 1)
    assert np.any(attend(*arrays, **options) != without)


def test_b13_a_window_hides_the_future_without_causal(attend):
    q, k, v = case("T32-H1-D16-f32").arrays()
    changed = k.copy()
    changed[20:] *= -3
    before, after = attend(q, k, v, window=(4, 0)), attend(q, changed, v, window=(4, 0))
    np.testing.assert_array_equal(before[:20], after[:20])
    assert np.any(before[20:] != after[20:])


def test_b14_a_length_just_short_of_a_tile(attend):
    """4092 tokens in tiles of 128: scaled to 124 in tiles of 16. Ten calls, bit for bit, and right."""
    c = case("B1-T124-H2-D32-f32")
    run = jax.jit(lambda *x: attend(*x, return_lse=True))
    calls = [run(*c.arrays()) for _ in range(10)]
    for call in calls[1:]:
        jax.tree.map(np.testing.assert_array_equal, call, calls[0])
    assert_agrees(calls[0], forward(), *c.arrays())


@pytest.mark.thorough
@pytest.mark.parametrize("length", [1, 7, 17, 63, 65, 100, 192])
def test_b15_lengths_that_are_no_multiple_of_the_tile(implementation, length):
    """Tiles of 128, as in the case."""
    tiles = flash_jax.BlockSizes(block_q=128, block_kv=128)
    attend = functools.partial(flash_jax.flash_attention, implementation=implementation, block_sizes=tiles)
    check(forward(), attend, *case(f"B1-T{length}-H2-D16-bf16").arrays())


@pytest.mark.thorough
@pytest.mark.parametrize("length", [63, 65])
def test_b17_the_tail_of_a_head_stays_in_its_head(attend, length):
    """The gradients of a head, within a call of three, are those of the call with this head alone."""
    c = case(f"B2-T{length}-H3-D64-f32")
    (q, k, v), (dout, dlse) = c.arrays(), c.cotangents()
    together = jax.jit(functools.partial(gradients(), attend))((q, k, v), (dout, dlse))
    for h in (1, 2):
        one = np.s_[:, :, h : h + 1]
        alone = (q[one], k[one], v[one]), (dout[one], dlse[:, h : h + 1])
        assert_agrees(tuple(g[one] for g in together), gradients(), *alone)


def test_b18_no_keys_at_all(attend):
    c = case("B1-T4-S0-H2-D8-f32")
    (out, lse), (dq, dk, dv) = check(values_and_gradients(), attend, c.arrays(), c.cotangents())
    assert not np.any(out) and (np.asarray(lse) == -np.inf).all() and not np.any(dq)
    assert dk.shape == dv.shape == (1, 0, 2, 8)


def test_b18_no_keys_in_some_examples(attend):
    c = case("B4-T2-S2-H2-D68-f16")
    options = {"kv_lengths": np.array([0, 2, 0, 2]), "q_lengths": np.array([1, 2, 1, 2])}
    (out, _), (dq, dk, dv) = check(values_and_gradients(**options), attend, c.arrays(), c.cotangents())
    for x in (out, dq, dk, dv):
        assert not np.any(x[::2]) and np.any(x[1::2])


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_c01_shared_heads_sum_their_gradients(attend, dtype):
    """As if key and value had been repeated for each query head and the gradients of the copies summed."""
    c = case(f"B2-T33-H8-K2-D32-{dtype}")

    def repeated(attend, inputs, cotangents):
        many = lambda q, k, v: attend(q, jnp.repeat(k, 4, axis=2), jnp.repeat(v, 4, axis=2), return_lse=True)  # noqa: E731
        return jax.vjp(many, *inputs)[1](cotangents)

    found = jax.jit(functools.partial(gradients(), attend))(c.arrays(), c.cotangents())
    assert_agrees(found, Program(repeated, derivative=True), c.arrays(), c.cotangents())


@pytest.mark.thorough
def test_c07_vmap_with_a_mask_for_all_and_its_gradient(attend):
    """(16, 512, 16, 48) scaled to (3, 20, 4, 48), one array as query, key and value; the mask's cotangent is float0."""
    c = case("B3-T20-H4-D48-bf16")
    x, bias, mask = c.arrays()[0], c.normal((3, 4, 20, 20), 0, "bias"), np.arange(20)[None, None] % 7 > 0

    def pulled(attend, x, bias, mask, dout):
        one = jax.vmap(lambda x, bias, mask: attend(x, x, x, bias, mask), in_axes=(0, 0, None))
        return jax.vjp(one, x, bias, mask)[1](dout)

    def of_floats(attend, *arrays):
        dx, dbias, _ = pulled(attend, *arrays)
        return dx, {"bias": dbias}

    check(Program(of_floats, derivative=True), attend, x, bias, mask, c.cotangents()[0])
    *_, dmask = jax.eval_shape(functools.partial(pulled, attend), x, bias, mask, c.cotangents()[0])
    assert dmask.dtype == jax.dtypes.float0 and dmask.shape == mask.shape


def test_d02_a_mask_of_keys_for_each_example(attend):
    """The case's own sizes; values and gradients."""
    c = case("B4-T32-H4-D16-bf16")
    mask = (np.arange(32) < np.array([32, 7, 1, 20])[:, None]).reshape(4, 1, 1, 32)
    check(values_and_gradients(mask=mask), attend, c.arrays(), c.cotangents())


@pytest.mark.thorough
def test_d04_a_mask_that_moves_with_the_query(attend):
    """256 tokens in tiles of 128, a band of 50: scaled to 40, tiles of 16, a band of 8; a bias of [B, H, T, 1]."""
    c = case("B2-T40-H2-D16-f32")
    mask = np.arange(40) <= np.arange(40)[:, None] + 8
    check(values_and_gradients(mask=mask), attend, c.inputs(bias=(2, 2, 40, 1)), c.cotangents())


def test_f01_float32_is_float32(attend):
    """On a GPU this is where TF32 shows; here it holds the formulas to float32's own error."""
    c = case("B1-T128-H1-D32-f32")
    check(values_and_gradients(causal=True), attend, c.arrays(), c.cotangents())


def test_g01_head_dim_72(attend):
    """512 tokens and 16 heads scaled to 50 and 2; four calls, bit for bit."""
    c = case("B1-T50-H2-D72-f16")
    run = jax.jit(functools.partial(values_and_gradients(), attend))
    calls = [run(c.arrays(), c.cotangents()) for _ in range(4)]
    for call in calls[1:]:
        jax.tree.map(np.testing.assert_array_equal, call, calls[0])
    assert_agrees(calls[0], values_and_gradients(), c.arrays(), c.cotangents())


def test_g11_segments_cost_linear_memory():
    """131072 tokens: a mask of bools would be 16 GiB."""
    array = jax.ShapeDtypeStruct((1, 131072, 1, 8), jnp.float32)
    ids = jax.ShapeDtypeStruct((1, 131072), jnp.int32)

    def loss(q, k, v, ids):
        return flash_jax.flash_attention(q, k, v, segment_ids=ids, causal=True, implementation="xla").sum()

    assert temporary_bytes(jax.grad(loss, argnums=(0, 1, 2)), array, array, array, ids) < 2**27


def test_h11_on_another_device(attend):
    """Inputs on device 1 give outputs on device 1, and the same numbers."""
    device = jax.devices()[1]
    arrays = case("B1-T19-S23-f32").arrays()
    out = attend(*(jax.device_put(x, device) for x in arrays))
    assert out.devices() == {device}
    np.testing.assert_array_equal(out, attend(*arrays))


def test_h17_no_warning_reaches_the_user():
    """JAX deprecates the Triton lowering: whoever calls this library is not told so at every compilation."""
    x = jax.ShapeDtypeStruct((1, 48, 2, 64), jnp.bfloat16)
    gradient = jax.grad(lambda *y: flash_jax.flash_attention(*y).astype(jnp.float32).sum(), argnums=(0, 1, 2))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert "xla.gpu.triton" in gpu_compile.lower(gradient, x, x, x).as_text()


def test_i01_the_default_scale_is_that_of_the_head_dim(attend):
    """[..., T, H, D] with T = 9 and H = 3: neither of these is the head dim."""
    arrays = case("B1-T9-S9-H3-D16-f32").arrays()
    np.testing.assert_array_equal(attend(*arrays), attend(*arrays, scale=0.25))


def test_i04_a_symmetric_window_at_head_dim_80(attend):
    """float32 taken as it is; 1024 tokens and 16 heads scaled to 70 and 2."""
    check(forward(window=(9, 9)), attend, *case("B1-T70-H2-D80-f32").arrays())


def test_i05_decoding_needs_no_padding_by_hand(attend):
    """One query against a cache: 8 x 32 heads and 4096 keys, scaled to 2 x 4 on 2 heads and 257."""
    check(forward(causal=True), attend, *case("B2-T1-S257-H4-K2-D128-bf16").arrays())


def test_i07_a_mask_of_keys_never_reaches_the_queries(attend):
    """4096 queries and 300 keys, scaled to 64 and 30: the rows past the keys' length are as alive as the others."""
    q, k, v = case("B2-T64-S30-H2-D16-f32").arrays()
    valid = np.array([17, 30])
    mask = np.arange(30) < valid[:, None]
    out = attend(q, k, v, mask=mask[:, None, None])
    assert np.any(out, axis=-1).all()
    np.testing.assert_allclose(out, attend(q, k, v, kv_lengths=valid), rtol=1e-5, atol=1e-6)
    with pytest.raises(ValueError, match=r"`mask` must be broadcastable to .*got shape \(2, 30\)"):
        attend(q, k, v, mask=mask)


@pytest.mark.parametrize("name", ["T64-S77-H2-D40-f16", "T32-S77-H2-D80-f16", "T16-S77-H2-D160-f16"])
def test_i08_cross_attention_to_77_tokens(attend, name):
    """The three resolutions of the case, 4096, 1024 and 256 pixels, scaled to 64, 32 and 16."""
    check(forward(), attend, *case(name).arrays())


def test_the_table_names_tests_that_exist():
    """docs/cases.md, read line by line: each `file::test`, where `...` stands for any ending, is there."""
    root = pathlib.Path(__file__).parents[1]
    rows = [
        line for line in (root / "docs" / "cases.md").read_text().splitlines() if re.match(r"\| [A-I]\d\d \|", line)
    ]
    assert len(rows) > 40
    for row in rows:
        file = None
        for name in re.findall(r"`((?:[\w/]+\.py)?(?:::[\w.]+)?)`", row.rsplit("|", 2)[1]):
            found, _, test = name.partition("::")
            file = found or file
            assert file
            text = (root / "tests" / file).read_text()
            ending = r"\w*\(" if test.endswith("...") else r"\("
            assert not test or re.search(rf"def {test.removesuffix('...')}{ending}", text), f"{row[2:5]}: {name}"
