"""`tune`: the fastest of what gives the same results, the table's own in doubt; what it keeps on disk; its errors.

On a CPU the kernels run in interpret mode, whose times mean nothing: most tests say what the clock shows.
"""

import dataclasses
import itertools
import json
import os
import sys
import threading
import time
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import flash_jax
from flash_jax import BlockSizes, compat, flash_attention, inspect, tune
from flash_jax.arguments import Call
from flash_jax.triton import tiling
from flash_jax.triton.tiling import Tile
from flash_jax.tuning import agreement, api, cache, candidates, checks, passes, search, timing
from flash_jax.tuning.search import Found
from flash_jax.tuning.timing import Timing
from tests.support import gpu_compile
from tests.support.accuracy import check
from tests.support.cases import case
from tests.support.programs import values_and_gradients
from tests.support.tiers import every

H200 = checks.Gpu("NVIDIA H200", "9.0")
CASE = case("B1-T40-S48-H2-K1-D16-bf16")
OWN = Tile(64, 64, 4, 3)  # the table's for CASE, forward
SMALL, WIDE = Tile(16, 32, 4, 2), Tile(32, 16, 8, 1)
TABLE = BlockSizes()


def struct(*shape, dtype="bfloat16"):
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))


X = struct(2, 256, 4, 64)


def call_of(*arrays, **options) -> Call:
    """The checked call, structs in place of query, key and value."""
    return inspect.normalised("tune", False, dict(zip(("query", "key", "value"), arrays, strict=True), **options))[0]


def found(tile=SMALL, complete=True):
    return Found(tile, OWN, 1.0, 2.0, 7, {}, {}, complete)


@pytest.fixture
def h200(monkeypatch):
    """Answers the question for the GPU, and runs the kernels in interpret mode."""
    monkeypatch.setattr(checks, "gpu", lambda call, query: H200)
    with flash_jax.interpret_mode():
        yield


@pytest.fixture
def few(monkeypatch):
    """Two candidates in place of all."""
    monkeypatch.setattr(api, "candidates", lambda name, call, own, limit: [x for x in (SMALL, WIDE) if x != own])


@pytest.fixture
def clock(monkeypatch):
    """Has `.shown`, what the clock is to show for each tile, 1 ms where nothing is said; `.timed`, what it timed."""
    said = SimpleNamespace(shown={}, timed=[])

    def measure(calls, *_, **__):
        said.timed.append(set(calls))
        return {x: Timing.of([said.shown.get(x, 1.0)]) for x in calls}

    monkeypatch.setattr(timing, "measure", measure)
    return said


def run(options=None, kept=None, case=CASE, **how):
    """`tune` on the arrays of a case, the forward pass alone by default."""
    how = {"passes": ("forward",), "seconds": 300, "progress": False, "cache": kept, **how}
    return tune(*case.arrays(), **(options or {}), **how)


def numbers(sizes):
    """The four of them as a tile."""
    return Tile(sizes.block_q, sizes.block_kv, sizes.num_warps, sizes.num_stages)


# What wins.


def test_the_fastest_wins_in_each_pass(h200, few, clock):
    clock.shown |= {SMALL: 0.7, WIDE: 0.8}
    sizes = run(passes=("forward", "dkv"))
    assert numbers(sizes) == numbers(sizes.dkv) == SMALL
    assert sizes.dq == sizes.tangent == TABLE
    clock.shown |= {WIDE: 0.6}
    assert numbers(run()) == WIDE


@pytest.mark.thorough
def test_all_are_timed_beside_the_tables_own_in_the_end(h200, few, clock):
    run()
    assert clock.timed[-1] == {OWN, SMALL, WIDE}
    assert OWN not in set().union(*clock.timed[:-1])


def test_the_table_is_kept_within_the_noise(h200, few, clock):
    clock.shown |= {SMALL: 0.995, WIDE: 1.3}
    assert run() == BlockSizes(dq=TABLE, dkv=TABLE, tangent=TABLE)


@pytest.mark.parametrize(
    ("own", "other", "wins"),
    [
        ([1.0, 1.01, 0.99], [0.9, 0.91, 0.89], True),
        ([1.0, 1.01, 0.99], [1.1, 1.11, 1.09], False),
        ([1.0, 1.3, 0.7], [0.9, 0.91, 0.89], False),
        ([1.0, 1.0, 9.0], [0.9, 0.9, 0.9], True),
        ([1.0, 1.0, 1.0], [0.995, 0.995, 0.995], False),
    ],
    ids=["faster", "slower", "scattered", "one-outlier", "by-half-a-percent"],
)
def test_noise(own, other, wins):
    times = {OWN: Timing.of(own), SMALL: Timing.of(other), WIDE: "ValueError: no"}
    assert (search.winner(times, OWN) == SMALL) is wins


def test_real_clock(h200, few):
    """Whatever it says, the answer is one of the three."""
    sizes = run()
    assert numbers(sizes) in (SMALL, WIDE) or sizes == BlockSizes(dq=TABLE, dkv=TABLE, tangent=TABLE)


def test_measuring_is_interleaved_and_stops_in_time():
    order, calls = [], {name: lambda name=name: order.append(name) for name in "abcd"}
    times = timing.measure(calls, samples=9, sample_ms=1e-9, until=0.0)
    rounds = [tuple(order[-12 + n : -8 + n or None]) for n in (0, 4, 8)]
    assert len(order) == 16 + 12 and all(sorted(each) == list("abcd") for each in rounds)
    assert len(set(rounds)) > 1  # what comes before a call changes
    assert all(t.low <= t.median <= t.high and t.deviation >= 0 for t in times.values())
    broken = timing.measure({"e": lambda: 1 / 0, **calls}, samples=3)
    assert broken["e"] == "ZeroDivisionError: division by zero" and isinstance(broken["a"], Timing)


# What takes part.


def changed(monkeypatch, tile, change):
    """Has a pass with this tile give `change(results)`, traced."""
    made = passes.of_call

    def of_call(name, call, sizes):
        f = made(name, call, sizes)
        one = sizes if name == "forward" else sizes and getattr(sizes, name)
        return (lambda *args: change(f(*args))) if one and one.block_q and numbers(one) == tile else f

    monkeypatch.setattr(passes, "of_call", of_call)


WRONG = {
    "one-entry": lambda r: {**r, "out": r["out"].at[0, 3, 1, 2].add(jnp.bfloat16(0.5))},
    "nan": lambda r: {**r, "out": r["out"].at[0, 3, 1, 2].set(jnp.nan)},
    "lse": lambda r: {**r, "lse": r["lse"] + 1e-3},
    "dead-row": lambda r: {**r, "lse": r["lse"].at[0, 1, 3].set(-jnp.inf)},
}


@pytest.mark.parametrize("wrong", every(2, WRONG))
def test_another_result_is_dropped_and_reported(h200, few, clock, monkeypatch, wrong):
    clock.shown |= {SMALL: 0.1, WIDE: 0.8}
    changed(monkeypatch, SMALL, WRONG[wrong])
    with pytest.warns(UserWarning, match="forward pass with the tile 16x32w4s2 gives other results") as warned:
        sizes = run()
    assert numbers(sizes) == WIDE and len(warned) == 1


@pytest.mark.thorough
def test_another_gradient_is_dropped(h200, few, clock, monkeypatch):
    clock.shown |= {SMALL: 0.1}
    changed(monkeypatch, SMALL, lambda r: {**r, "key": r["key"] * 1.1})
    with pytest.warns(UserWarning, match=r"dkv pass .* \(key: differs by"):
        sizes = run(passes=("dkv",))
    assert sizes == BlockSizes(dq=TABLE, dkv=TABLE, tangent=TABLE)


def test_what_fails_is_counted(h200, few, clock, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "tqdm", None)

    def fail(results):
        raise RuntimeError("no such register")

    clock.shown |= {SMALL: 0.1, WIDE: 0.8}
    changed(monkeypatch, SMALL, fail)
    assert numbers(run(progress=True)) == WIDE
    said = capsys.readouterr().err
    assert "2 tiles to try" in said
    assert "forward: 32x16w8s1, 0.8 ms, the table's 64x64w4s3 1 ms (2 others tried, 1 failed, 0 with other" in said


@pytest.mark.thorough
def test_what_fails_on_the_device_is_passed_over(h200, few, clock, monkeypatch):
    def stop(_):
        raise RuntimeError("an error of the device")

    def fail(results):
        jax.debug.callback(stop, results["lse"])
        return results

    clock.shown |= {SMALL: 0.1, WIDE: 0.8}
    changed(monkeypatch, SMALL, fail)
    assert numbers(run()) == WIDE


def test_what_fails_with_the_tables_own_sizes_is_raised(h200, few, monkeypatch):
    monkeypatch.setattr(tiling, "shared_limit", lambda capability: 2**30)

    def of_call(name, call, sizes):
        raise RuntimeError("no such register")

    monkeypatch.setattr(passes, "of_call", of_call)
    with pytest.raises(RuntimeError, match="no such register"):
        run()


def test_a_device_that_breaks_is_an_error(h200, few, clock, monkeypatch):
    monkeypatch.setattr(timing, "measure", lambda calls, *_, **__: dict.fromkeys(calls, "XlaRuntimeError: address"))
    with pytest.raises(RuntimeError, match=r"forward pass .* fails now: XlaRuntimeError: address"):
        run()


def test_without_time_the_table_stays(h200, few, clock, tmp_path):
    assert run(seconds=1e-3, kept=tmp_path) == BlockSizes(dq=TABLE, dkv=TABLE, tangent=TABLE)
    (file,) = tmp_path.iterdir()
    assert json.loads(file.read_text())["complete"] is False


@pytest.mark.thorough
def test_a_tile_that_compiles_for_long_is_not_waited_for(h200, few, clock, monkeypatch):
    clock.shown |= {SMALL: 0.1}
    released = threading.Event()
    changed(monkeypatch, SMALL, lambda results: results if released.wait(60) else None)
    start = time.perf_counter()
    try:
        assert run(seconds=6) in (
            BlockSizes(dq=TABLE, dkv=TABLE, tangent=TABLE),
            candidates.block_sizes({"forward": WIDE}),
        )
        assert time.perf_counter() - start < 40
    finally:
        released.set()


@pytest.mark.parametrize("gpu", ["NVIDIA H200", "NVIDIA A100", "NVIDIA L4"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("dim", [64, 256])
def test_candidates_fit_the_gpu_and_the_likeliest_come_first(gpu, dtype, dim):
    """No candidate is one that `flash_attention` would refuse for its shared memory; with a bias, also its gradient."""
    call = call_of(*[struct(1, 1000, 2, dim, dtype=dtype)] * 3, bias=struct(2, 1000, 1000, dtype="float32"))
    q, k, v, operands, spec = call
    with gpu_compile.lowering_for(gpu):
        limit = tiling.shared_limit(compat.gpu_description()[1])
        for name in tiling.PASSES:
            own = tiling.tile_for(name, spec, q, k, v, operands)
            tiles = candidates.candidates(name, call, own, limit)
            steps = [candidates.distance(x, own) for x in tiles]
            assert steps == sorted(steps) and own not in tiles and len(set(tiles)) == len(tiles)
            for tile in tiles:
                given = dataclasses.replace(spec, block_sizes=candidates.block_sizes({name: tile}))
                for kernel in (name, "stored", "partial", "dbias") if name == "dq" else (name,):
                    assert tiling.tile_for(kernel, given, q, k, v, operands) == tile


def test_what_does_not_fit_is_no_candidate():
    call = call_of(*[struct(1, 1000, 2, 128)] * 3)
    tiles = {n: candidates.candidates("forward", call, Tile(128, 64, 4, 2), n * 1024) for n in (99, 227)}
    too_much = [x for x in tiles[227] if candidates.shared_bytes("forward", call, x) > 99 * 1024]
    assert too_much and set(tiles[99]) == set(tiles[227]) - set(too_much)
    assert Tile(128, 128, 4, 2) not in tiles[227]  # 256 accumulators a thread
    assert Tile(128, 128, 8, 2) in tiles[227]


def test_candidates_are_not_longer_than_the_sequences():
    call = call_of(struct(8, 1, 4, 64), *[struct(8, 50, 4, 64)] * 2)
    tiles = candidates.candidates("forward", call, Tile(16, 64, 4, 3), 99 * 1024)
    assert {x.block_q for x in tiles} == {16} and max(x.block_kv for x in tiles) == 64


@pytest.mark.parametrize("name", tiling.PASSES)
def test_each_pass_lowers_for_a_gpu(name):
    call = call_of(*[struct(1, 256, 2, 64)] * 3, bias=struct(2, 256, 256), causal=True)
    stats = struct(1, 2, 256, dtype="float32")
    dots = dict.fromkeys(("query", "key", "value"), call.q)
    given = (*call[:4],) if name == "forward" else (*call[:4], call.q, stats, call.q, dots)
    sizes = candidates.block_sizes({name: Tile(32, 64, 4, 2)})
    with compat.quiet_triton_lowering():
        kernels = gpu_compile.triton_ir(gpu_compile.lower(passes.of_call(name, call, sizes), *given))
    assert kernels and ("dq" in " ".join(kernels)) == (name == "dq")


# What is returned.

OPTIONS = {
    "plain": {},
    "one-key": {"window": (0, 0)},
    "bias": {"bias": CASE.normal((2, 40, 48), 0, "bias")},
    "bias-of-minus-inf": {"bias": np.where(np.arange(48) < 20, -np.inf, 0).astype(np.float32)},
    "segments": {"q_segment_ids": np.arange(40) // 10, "kv_segment_ids": np.arange(48) // 16},
    "sinks": {"sinks": np.ones(2, np.float32)},
    "mods": {
        "score_mod": lambda s, b, h, i, j, x: s + x[h, i],
        "mod_operands": (np.ones((2, 40), np.float32),),
    },
}


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("option", "dtype"),
    [
        *((option, "f32") for option in OPTIONS),
        ("plain", "f16"),
        ("plain", "bf16"),
        ("one-key", "bf16"),
        ("bias", "bf16"),
    ],
)
def test_rounding_is_no_difference(h200, few, clock, dtype, option):
    """All passes, tiles that are far from the table's: a warning, which is an error here, would be a false alarm."""
    clock.shown |= {SMALL: 0.5}
    small = case(f"B1-T40-S48-H2-K1-D16-{dtype}")
    sizes = run(OPTIONS[option], case=small, passes=tiling.PASSES)
    assert {numbers(x) for x in (sizes, sizes.dq, sizes.dkv, sizes.tangent)} == {SMALL}


@pytest.mark.parametrize(
    ("dtype", "precision", "scores", "explained"),
    [("bf16", None, 3.0, 2**-5), ("f16", None, 3.0, 2**-8), ("f16", None, 1e4, 2**-6), ("f32", None, 3.0, 2**-16),
     ("f32", None, 80.0, 2**-13), ("f32", "tensorfloat32", 3.0, 2**-8)],
)  # fmt: skip
def test_what_rounding_explains(dtype, precision, scores, explained):
    """Relative to the largest result; 16 bits whatever the scores, if they are not huge, and float32 in proportion."""
    x = case(f"T16-S16-H1-K1-D16-{dtype}").arrays()[0]
    call = call_of(x, x, x, precision=precision)
    assert explained / 2 < agreement._relative("out", x, call, scores) <= 2 * explained


@pytest.mark.thorough
@pytest.mark.parametrize("T, S", [(16, 1), (200, 200)])
def test_where_all_cancels(h200, few, clock, T, S):
    ones = np.ones((1, T, 1, 16), np.float32), np.ones((1, S, 1, 16), np.float32), np.ones((1, S, 1, 16), np.float32)
    tune(*ones, passes=tiling.PASSES, seconds=300, cache=None, progress=False)


@pytest.mark.thorough
def test_the_sizes_change_no_result(h200, few, clock):
    clock.shown |= {SMALL: 0.5}
    sizes = run({"causal": True}, passes=("forward", "dq", "dkv"))
    assert numbers(sizes) == numbers(sizes.dq) == numbers(sizes.dkv) == SMALL

    def attend(*arrays, **options):
        return flash_attention(*arrays, **options, implementation="triton", block_sizes=sizes)

    check(values_and_gradients(causal=True), attend, CASE.arrays(), CASE.cotangents())


@pytest.mark.thorough
def test_structs_and_arrays_are_one(h200, few, clock):
    """Random data for query, key, value, bias and mask; numbers of slots are given."""
    clock.shown |= {WIDE: 0.5}
    q, k = struct(1, 40, 2, 16), struct(1, 48, 2, 16)
    options = {"bias": struct(40, 48), "mask": struct(1, 48, dtype="bool"), "kv_lengths": np.array([40])}
    sizes = tune(q, k, k, **options, passes=["forward"], seconds=300, cache=None, progress=False)
    assert numbers(sizes) == WIDE


# What is kept.


def key(*arrays, gpu=H200, name="forward", **options):
    return cache.key_of(name, call_of(*(arrays or (X, X, X)), **options), gpu)


def test_same_kind_of_call():
    near = struct(3, 200, 3, 64)  # 200 is in the bucket of 256, 9 heads in that of 16, as 8 are
    assert key(struct(2, 250, 4, 64), *[struct(2, 250, 4, 64)] * 2) == key(near, near, near)
    assert key(window=(120, 0)) == key(window=(100, 0))
    assert key(softcap=30.0) == key(softcap=50.0)
    assert key(score_mod=lambda s, b, h, i, j: s * 2) == key(score_mod=lambda score, *_: score * 2)
    assert json.loads(json.dumps(key())) == key()


OTHERS = {
    "another-pass": lambda: key(name="dq"),
    "another-gpu": lambda: key(gpu=checks.Gpu("NVIDIA L4", "8.9")),
    "dtype": lambda: key(*[struct(2, 256, 4, 64, dtype="float16")] * 3),
    "head-dim": lambda: key(*[struct(2, 256, 4, 80)] * 3),
    "value-head-dim": lambda: key(X, X, struct(2, 256, 4, 32)),
    "grouping": lambda: key(X, *[struct(2, 256, 2, 64)] * 2),
    "longer": lambda: key(*[struct(2, 257, 4, 64)] * 3),
    "ragged": lambda: key(*[struct(2, 255, 4, 64)] * 3),
    "more-heads": lambda: key(*[struct(5, 256, 4, 64)] * 3),
    "causal": lambda: key(causal=True),
    "window": lambda: key(window=(100, 0)),
    "wider": lambda: key(window=(130, 0)),
    "softcap": lambda: key(softcap=30.0),
    "dropout": lambda: key(dropout_rate=0.1, dropout_key=jax.random.key(0)),
    "bias": lambda: key(bias=struct(4, 256, 256)),
    "bias-of-each-example": lambda: key(bias=struct(2, 4, 256, 256)),
    "bias-of-three-examples": lambda: key(*[struct(3, 256, 2, 64)] * 3, bias=struct(2, 256, 256)),
    "bias-by-key": lambda: key(bias=struct(256)),
    "bias-float32": lambda: key(bias=struct(4, 256, 256, dtype="float32")),
    "mask": lambda: key(mask=struct(256, 256, dtype="bool")),
    "segments": lambda: key(segment_ids=np.zeros(256, np.int32)),
    "lengths": lambda: key(kv_lengths=np.array([9, 8])),
    "score-mod": lambda: key(score_mod=lambda s, b, h, i, j: s * 2),
    "another-score-mod": lambda: key(score_mod=lambda s, b, h, i, j: s - 2),
    "mask-mod": lambda: key(mask_mod=lambda b, h, i, j: i > j),
}


def test_other_kinds_of_calls(monkeypatch):
    keys = {"plain": key(), **{name: make() for name, make in OTHERS.items()}}
    monkeypatch.setattr(compat, "jax_version", lambda: "0.99")
    keys["another-jax"] = key()
    monkeypatch.undo()
    monkeypatch.setattr(cache, "_generation", lambda: "other kernels")
    keys["other-kernels"] = key()
    texts = {name: json.dumps(x, sort_keys=True) for name, x in keys.items()}
    assert [(a, b) for a, b in itertools.combinations(texts, 2) if texts[a] == texts[b]] == []


def test_precision_of_float32():
    x = struct(2, 256, 4, 64, dtype="float32")
    assert key(x, x, x) == key(x, x, x, precision="high") != key(x, x, x, precision="highest")


def test_what_was_found_is_found_again(h200, few, clock, monkeypatch, tmp_path, capsys):
    clock.shown |= {SMALL: 0.5}
    first = run(kept=tmp_path, seconds=np.float32(300))
    monkeypatch.setattr(search, "search", None)
    assert run(kept=str(tmp_path), progress=True) == first
    assert capsys.readouterr().err == "tune: forward: 16x32w4s2, from the cache\n"
    (file,) = tmp_path.iterdir()
    assert json.loads(file.read_text())["tile"] == [16, 32, 4, 2]


@pytest.mark.thorough
def test_each_pass_is_kept_by_itself(h200, few, clock, monkeypatch, tmp_path):
    searched = []

    def of_tiles(call, tiles, seconds, shown):
        searched.append(list(tiles))
        return {name: found(None) for name in tiles}

    monkeypatch.setattr(search, "search", of_tiles)
    run(kept=tmp_path)
    run(kept=tmp_path, passes=("forward", "dq"))
    run({"causal": True}, kept=tmp_path)
    run(kept=None)
    assert searched == [["forward"], ["dq"], ["forward"], ["forward"]]


def test_a_short_search_does_not_stand_for_a_long_one(tmp_path):
    kept = cache.Cache(tmp_path)
    kept.store(key(), found(complete=False), 10.0)
    assert kept.load(key(), 10.0) == (SMALL,) and kept.load(key(), 10.5) is None
    kept.store(key(), found(None, complete=True), 10.0)
    assert kept.load(key(), 1000.0) == (None,)


@pytest.mark.thorough
def test_sizes_that_this_call_does_not_take_are_not_taken(h200, few, clock, monkeypatch, tmp_path):
    """As where a bias of 16 bits was tuned, and the folder comes from elsewhere."""
    run(kept=tmp_path)
    (file,) = tmp_path.iterdir()
    kept = json.loads(file.read_text())
    for tile in ([128, 128, 4, 64], [24, 32, 4, 2]):
        file.write_text(json.dumps({**kept, "tile": tile}))
        assert run(kept=tmp_path) == BlockSizes(dq=TABLE, dkv=TABLE, tangent=TABLE)
        assert json.loads(file.read_text())["tile"] is None


DAMAGE = {
    "empty": b"",
    "cut": b'{"key": {"pass": "forw',
    "no-text": b"\xff\xfe\x00",
    "a-list": b"[1, 2]",
    "deep": b"[" * 100_000,
    "missing": b'{"tile": null}',
    "no-tile": lambda kept: {**kept, "tile": [16, "32", 4, 2]},
    "negative": lambda kept: {**kept, "tile": [16, -32, 4, 2]},
    "three": lambda kept: {**kept, "tile": [16, 32, 4]},
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_file_is_a_warning_and_written_anew(tmp_path, damage):
    kept, spoil = cache.Cache(tmp_path), DAMAGE[damage]
    kept.store(key(), found(), 10.0)
    (file,) = tmp_path.iterdir()
    whole = json.loads(file.read_text())
    file.write_bytes(spoil if isinstance(spoil, bytes) else json.dumps(spoil(whole)).encode())
    with pytest.warns(UserWarning, match="cannot be read, and the search is made again"):
        assert kept.load(key(), 10.0) is None
    kept.store(key(), found(), 10.0)
    assert kept.load(key(), 10.0) == (SMALL,)


def test_a_file_of_another_call_is_not_taken(tmp_path):
    kept = cache.Cache(tmp_path)
    kept.store(key(), found(), 10.0)
    (file,) = tmp_path.iterdir()
    file.rename(tmp_path / cache._file(key(causal=True)))
    assert kept.load(key(causal=True), 10.0) is None


def test_damage_does_not_stop_a_search(h200, few, clock, tmp_path):
    clock.shown |= {SMALL: 0.5}
    run(kept=tmp_path)
    (file,) = tmp_path.iterdir()
    file.write_text("{")
    with pytest.warns(UserWarning, match="cannot be read"):
        assert numbers(run(kept=tmp_path)) == SMALL
    assert json.loads(file.read_text())["tile"] == [16, 32, 4, 2]


def test_a_write_that_fails_leaves_what_was_there(tmp_path, monkeypatch):
    kept = cache.Cache(tmp_path)
    kept.store(key(), found(), 10.0)

    def full(*_):
        raise OSError("no space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.warns(UserWarning, match=r"cannot be kept in .*no space left"):
        kept.store(key(), found(WIDE), 10.0)
    assert kept.load(key(), 10.0) == (SMALL,) and len(list(tmp_path.iterdir())) == 1


def test_a_folder_that_cannot_be_is_a_warning(tmp_path):
    (tmp_path / "file").write_text("")
    kept = cache.Cache(tmp_path / "file" / "folder")
    with pytest.warns(UserWarning, match="cannot be read"):
        assert kept.load(key(), 1.0) is None
    with pytest.warns(UserWarning, match="cannot be kept"):
        kept.store(key(), found(), 1.0)


def test_writers_at_once(tmp_path):
    """A reader sees one of the two tiles at any time, and never a part of a file."""
    kept, stop, seen = cache.Cache(tmp_path), threading.Event(), set()
    kept.store(key(), found(), 1.0)
    mine = key()

    def write(tile):
        while not stop.is_set():
            kept.store(mine, found(tile), 1.0)

    threads = [threading.Thread(target=write, args=(tile,)) for tile in (SMALL, WIDE)]
    for thread in threads:
        thread.start()
    for _ in range(300):
        seen.add(kept.load(mine, 1.0))
    stop.set()
    for thread in threads:
        thread.join()
    assert seen <= {(SMALL,), (WIDE,)} and len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize(
    ("platform", "variable", "value", "folder"),
    [
        ("linux", "XDG_CACHE_HOME", "/x", "/x/flash_jax"),
        ("linux", "XDG_CACHE_HOME", "not/absolute", "/home/me/.cache/flash_jax"),
        ("linux", "XDG_CACHE_HOME", None, "/home/me/.cache/flash_jax"),
        ("darwin", "XDG_CACHE_HOME", "/x", "/home/me/Library/Caches/flash_jax"),
        ("win32", "LOCALAPPDATA", "/x", "/x/flash_jax"),
        ("win32", "LOCALAPPDATA", None, "/home/me/AppData/Local/flash_jax"),
    ],
)
def test_default_folder(monkeypatch, platform, variable, value, folder):
    monkeypatch.setattr(sys, "platform", platform)
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.delenv(variable, raising=False)
    if value is not None:
        monkeypatch.setenv(variable, value)
    assert cache.default_folder().as_posix() == folder


def test_without_a_home_nothing_is_kept(monkeypatch):
    def no_home():
        raise RuntimeError("could not determine home directory")

    monkeypatch.setattr(api, "default_folder", no_home)
    with pytest.warns(UserWarning, match="nothing is kept"):
        assert api._folder("auto") is None


# What is shown.


def test_no_progress_is_silent(h200, few, clock, capsys):
    run()
    assert capsys.readouterr().err == ""


def test_a_bar(h200, few, clock, capsys):
    pytest.importorskip("tqdm")
    run(progress=True)
    said = capsys.readouterr()
    assert "2/2" in said.err and "forward: the table's 64x64w4s3, 1 ms (2 others tried, 0 failed" in said.err
    assert said.out == ""


# What is refused.


def test_a_machine_without_a_gpu():
    with pytest.raises(NotImplementedError, match=r"compute capability 8.0 or newer; here the query is on .*'cpu'"):
        tune(X, X, X)


def test_interpret_mode_is_not_timed():
    with (
        flash_jax.interpret_mode(),
        pytest.raises(NotImplementedError, match=r"interpret_mode\(\) is in force. Interpret mode is not timed"),
    ):
        tune(X, X, X)


def test_transformations():
    with pytest.raises(TypeError, match="`query` is traced: call it outside jit, grad and vmap"):
        jax.jit(lambda q: tune(q, X, X))(jnp.ones(X.shape, X.dtype))
    with pytest.raises(TypeError, match="`mod_operands` is traced"):
        jax.jit(lambda t: tune(X, X, X, score_mod=lambda s, *x: s, mod_operands=(t,)))(jnp.ones(3))
    with pytest.raises(TypeError, match="cannot inside jit or another transformation"):
        jax.jit(lambda: tune(X, X, X))()


@pytest.mark.parametrize(
    ("how", "error", "text"),
    [
        ({"implementation": "xla"}, ValueError, "must be None or 'triton' for `tune`"),
        ({"implementation": "cuda"}, ValueError, "`implementation` must be"),
        ({"passes": ()}, ValueError, "`passes` must be a tuple of one or more of 'forward', 'dq', 'dkv', 'tangent'"),
        ({"passes": "forward"}, ValueError, "got 'forward'"),
        ({"passes": ("dq", "dq")}, ValueError, "each once"),
        ({"passes": ("backward",)}, ValueError, r"got \('backward',\)"),
        ({"passes": (["dq"],)}, ValueError, "`passes` must be"),
        ({"seconds": 0}, ValueError, "`seconds` must be positive and finite; got 0"),
        ({"seconds": -1.5}, ValueError, "got -1.5"),
        ({"seconds": float("nan")}, ValueError, "got nan"),
        ({"seconds": float("inf")}, ValueError, "got inf"),
        ({"seconds": "60"}, TypeError, "`seconds` must be a number; got str"),
        ({"seconds": True}, TypeError, "`seconds` must be a number; got bool"),
        ({"cache": 3}, TypeError, "`cache` must be the path of a folder, 'auto' or None; got int"),
        ({"progress": 1}, TypeError, "`progress` must be True or False"),
        ({"return_lse": 1}, TypeError, "`return_lse` must be True or False"),
        ({"block_sizes": BlockSizes()}, ValueError, "`block_sizes` is what `tune` finds"),
        ({"context_axis": "x"}, ValueError, "leave `context_axis` at None"),
        ({"causal": 1}, TypeError, "`causal` must be True or False"),
        ({"casual": True}, TypeError, r"tune\(\) got an unexpected keyword argument 'casual'"),
        ({"kv_lengths": struct(2, dtype="int32")}, ValueError, "needs the values of `kv_lengths`"),
        (
            {"mask_mod": lambda b, h, i, j, t: t[i] > j, "mod_operands": (struct(256, dtype="int32"),)},
            ValueError,
            "needs the values of `mod_operands`",
        ),
    ],
    ids=lambda x: "-".join(x) if isinstance(x, dict) else "",  # of functions str would tell the address
)
def test_arguments(how, error, text):
    with pytest.raises(error, match=text):
        tune(X, X, X, **how)


@pytest.mark.parametrize(
    ("x", "error", "text"),
    [
        (struct(1, 64, 2, 64, dtype="float64"), NotImplementedError, "the inputs are float64"),
        (struct(1, 64, 2, 320), NotImplementedError, "head dims up to 256"),
        (struct(1, 0, 2, 64), ValueError, "nothing to time"),
        (struct(0, 64, 2, 64), ValueError, "nothing to time"),
    ],
    ids=str,
)
def test_calls_that_triton_does_not_serve(x, error, text):
    with jax.enable_x64(True), pytest.raises(error, match=text):
        tune(x, x, x)


@pytest.mark.multi_device
def test_arrays_of_several_devices():
    mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    x = jax.device_put(jnp.ones(X.shape, X.dtype), sharding)
    with pytest.raises(ValueError, match="`key` lies on 2 devices"):
        tune(X, x, X)
