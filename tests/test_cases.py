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
from tests.support.accuracy import assert_agrees, check
from tests.support.cases import case
from tests.support.programs import Program, forward, gradients, values_and_gradients


def test_a01_a_row_with_nothing_to_attend(attend):
    """Row 0 is dead, by an offset in the place of the case's mask: zeros and -inf; the rows beside it are unharmed."""
    c = case("B1-T4-S6-H2-D8-f32")
    out, lse = check(forward(causal=True, q_offset=-1), attend, *c.arrays())
    assert not np.any(out[0, 0]) and (np.asarray(lse)[0, :, 0] == -np.inf).all()
    assert np.any(out[0, 1:], axis=-1).all()


def test_a02_a_dead_row_outside_the_loss(attend):
    """The loss reads rows 1 to 3 only: every gradient is finite, and that of the dead row is zero."""
    c = case("B1-T4-S6-H2-D8-bf16")
    dout = np.ones(c.arrays()[0].shape, c.dtype)
    dout[:, 0] = 0
    dq, _, _ = check(gradients(causal=True, q_offset=-1), attend, c.arrays(), (dout, None))
    assert not np.any(dq[0, 0])


def test_a05_a_band_whose_first_tiles_are_masked(attend):
    """640 tokens, of which each sees 10: scaled to 160, ten tiles; late rows meet no live key in most of them."""
    c = case("T160-H1-D4-f32")
    check(forward(window=(9, 0)), attend, *c.arrays())


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
]


@pytest.mark.parametrize("options", ALONE, ids=str)
def test_b12_every_argument_has_an_effect_of_its_own(attend, options):
    arrays = case("B1-T20-S35-f32").arrays()
    without = attend(*arrays, causal="q_offset" in options)
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


@pytest.mark.parametrize("length", [1, 7, 17, 63, 65, 100, 192])
def test_b15_lengths_that_are_no_multiple_of_the_tile(implementation, length):
    """Tiles of 128, as in the case."""
    tiles = flash_jax.BlockSizes(block_q=128, block_kv=128)
    attend = functools.partial(flash_jax.flash_attention, implementation=implementation, block_sizes=tiles)
    check(forward(), attend, *case(f"B1-T{length}-H2-D16-bf16").arrays())


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


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_c01_shared_heads_sum_their_gradients(attend, dtype):
    """As if key and value had been repeated for each query head and the gradients of the copies summed."""
    c = case(f"B2-T33-H8-K2-D32-{dtype}")

    def repeated(attend, inputs, cotangents):
        many = lambda q, k, v: attend(q, jnp.repeat(k, 4, axis=2), jnp.repeat(v, 4, axis=2), return_lse=True)  # noqa: E731
        return jax.vjp(many, *inputs)[1](cotangents)

    found = jax.jit(functools.partial(gradients(), attend))(c.arrays(), c.cotangents())
    assert_agrees(found, Program(repeated, derivative=True), c.arrays(), c.cotangents())


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
