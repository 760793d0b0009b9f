"""The benchmarks count, judge, compare and draw rightly: what of them can be tested without a GPU."""

import copy
import dataclasses
import functools
import json
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import flash_jax
from benchmarks import (
    cases,
    compare,
    contenders,
    figure,
    judge,
    programs,
    report,
    speed,
    timing,
    torch_sdpa,
    train_step,
)
from benchmarks.cases import BACKWARD, BOTH, FORWARD, SUITES, Case
from benchmarks.contenders import Contender
from benchmarks.gpt import GPT

SMALL = Case("small", "test", 2, 24, 24, 4, 2, 8, 8, dtype="float32", causal=True)
ONCE = (1, 0.0, "host")


def ours(case):
    return contenders.flash("reference")(case)


def measured(case, *who):
    with ThreadPoolExecutor(1) as pool:
        futures = programs.compile_all(pool, [case], list(who))
    inputs = case.inputs()
    return programs.measure(case, futures, inputs, judge.truth(case, judge.head_of(case, *inputs)), ONCE)


# What is counted


def test_flops_are_those_of_the_paper():
    (full, causal) = (c for c in SUITES["headline"]() if c.name.startswith("d128-T16k"))
    assert (full.B, full.T, full.H, full.D) == (1, 16384, 16, 128)
    assert full.flops(FORWARD) == 4 * 16 * 16384 * 16384 * 128
    assert causal.flops(FORWARD) == full.flops(FORWARD) / 2
    assert full.flops(BACKWARD) == 2.5 * full.flops(FORWARD)
    assert full.flops(BOTH) == 3.5 * full.flops(FORWARD)


def test_flops_of_two_head_dims_windows_and_documents():
    mla = Case("mla", "test", 1, 4, 4, 1, 1, D=3, Dv=2)
    assert mla.flops(FORWARD) == 2 * 16 * (3 + 2)  # q k^T, p v
    assert mla.flops(BACKWARD) == 2 * 16 * (3 + 2 + 2 + 3 + 3)  # q k^T, dO v^T, p^T dO, dS k, dS^T q
    assert dataclasses.replace(mla, left=1).pairs() == 1 + 2 + 2 + 2
    documents = Case("packed", "test", 1, 100, 100, 1, 1, 8, 8, documents=3)
    assert documents.pairs() == documents.allowed(np.arange(100)).sum()
    assert dataclasses.replace(documents, causal=True).pairs() == documents.pairs() / 2
    assert dataclasses.replace(mla, left=2, S=7).pairs() == 4 * 3


def test_the_grid_is_the_papers():
    grid = SUITES["grid"]()
    assert len(grid) == 2 * 2 * 6
    assert {(c.D, c.T) for c in grid} == {(D, T) for D in (64, 128) for T in (512, 1024, 2048, 4096, 8192, 16384)}
    assert all(c.B * c.T == 16384 and c.H * c.D == 2048 for c in grid)
    decode = SUITES["decode"]()
    assert {c.T for c in decode} == {1, 2, 4, 8, 16} and all(c.S == 32768 and c.passes == (FORWARD,) for c in decode)
    assert SUITES["long"]()[0].T == 2**20
    names = [c.name for name, suite in SUITES.items() if name != "headline" for c in suite()]
    assert len(names) == len(set(names))


def test_model_flops_are_those_of_the_paper():
    model = GPT(layers=2, dim=8, heads=2, length=16, batch=3, vocabulary=32)
    weights = 32 * 8 + 16 * 8 + 8 + 2 * (2 * 8 + 4 * 8 * 8 + 2 * 4 * 8 * 8)
    assert model.weights() == weights
    assert model.flops() == 3 * (6 * 16 * weights + 12 * 2 * 8 * 16**2)


# Who is measured


@pytest.mark.filterwarnings("ignore:Explicitly requested dtype")
def test_a_contender_that_fails_or_is_wrong_is_its_own_result_and_ends_nothing():
    def does_not_import(case):
        raise ImportError("libnothing.so is missing")

    def raises(case):
        return lambda q, k, v, extras: jnp.zeros(3) @ q

    def unscaled(case):
        return lambda q, k, v, extras: flash_jax.flash_attention(q, k, v, causal=True, scale=1.0)

    def not_a_number(case):
        return lambda q, k, v, extras: ours(case)(q, k, v, extras) * jnp.float32(jnp.nan)

    cells = measured(
        SMALL,
        Contender("absent", ours, module="no_such_package"),
        Contender("import", does_not_import),
        Contender("raises", raises),
        Contender("unscaled", unscaled),
        Contender("nan", not_a_number),
        Contender("refuses", ours, lambda case: "too small"),
        Contender("right", ours),
    )
    for kind in (FORWARD, BOTH):
        assert cells[kind]["absent"] == {"left_out": "not installed"}
        assert cells[kind]["refuses"] == {"left_out": "too small"}
        assert cells[kind]["import"]["failed"] == "ImportError: libnothing.so is missing"
        assert "TypeError" in cells[kind]["raises"]["failed"]
        assert cells[kind]["unscaled"]["wrong"] and cells[kind]["nan"]["wrong"]
        assert not cells[kind]["right"]["wrong"] and max(cells[kind]["right"]["errors"].values()) < 1e-6
        assert report.ok(cells[kind]["right"]) and not report.ok(cells[kind]["unscaled"])
    assert set(cells[BOTH]["right"]["errors"]) == {"out", "dq", "dk", "dv"}
    assert cells[BOTH]["right"]["peak_mib"] >= cells[BOTH]["right"]["temporary_mib"]
    backward = programs.backward_of(SMALL, cells)
    assert backward["absent"] == {"left_out": "not installed"} and "failed" in backward["import"]


def test_a_call_that_fails_while_it_is_timed_is_its_own_result():
    calls = iter(range(3))

    def later():
        return jnp.zeros(next(calls))  # StopIteration in the fourth call

    found = timing.measure({"later": later, "fine": lambda: jnp.zeros(1)}, 3, 0.0)
    assert str(found["later"]).startswith("StopIteration") and isinstance(found["fine"], timing.Timing)


def test_what_a_library_would_get_wrong_is_refused():
    by_name = {c.name: c for c in contenders.registry()}
    (decode, *_), (packed, *_), (window, *_) = SUITES["decode"](), SUITES["packed"](), SUITES["window"]()
    assert by_name["flash_jax"].left_out(decode, FORWARD) is None
    assert by_name["jax.nn cudnn"].left_out(dataclasses.replace(decode, causal=True), FORWARD)
    assert by_name["jax.nn xla"].left_out(SUITES["long"]()[0], FORWARD) == "a matrix of scores of 4096 GiB"
    assert by_name["jax pallas b64"].left_out(decode, FORWARD) and by_name["jax pallas b64"].left_out(window, FORWARD)
    assert (
        by_name["jax pallas b32"].left_out(packed, FORWARD) and by_name["jax pallas b32"].left_out(packed, BOTH) is None
    )
    assert torch_sdpa.refuses(packed) and torch_sdpa.refuses(SUITES["grid"]()[0]) is None
    assert set(contenders.SAME_FORWARD) | set(contenders.SAME_FORWARD.values()) <= set(by_name)


@pytest.mark.parametrize(
    ("asked", "compiled"), [("forward", (FORWARD,)), ("forward+backward", (BOTH,)), ("backward", (FORWARD, BOTH))]
)
def test_only_the_passes_that_are_asked_for_are_compiled(asked, compiled):
    options = speed.parse(["--shapes", "d64-T512", "--passes", asked])
    assert speed.compiled_for(options) == compiled
    (full, causal) = speed.chosen(options)
    assert causal.name == "d64-T512-causal" and full.backward == (asked != "forward")


# What the truth is


def reference(case, arrays, extras):
    attend = programs.program(ours(case), BOTH)
    return attend(arrays, extras)


@pytest.mark.parametrize("change", ["", "window", "documents", "bias", "Dv", "longer"])
def test_the_judge_agrees_with_the_reference(change):
    more = {
        "window": {"left": 5, "causal": False},
        "documents": {"documents": 3},
        "bias": {"bias": True},
        "Dv": {"Dv": 5},
        "longer": {"S": 40},
    }
    case = dataclasses.replace(SMALL, **more.get(change, {}))
    arrays, extras = case.inputs()
    found = reference(case, arrays, extras)
    error = judge.errors(case, found, judge.truth(case, judge.head_of(case, arrays, extras)))
    assert set(error) == {"out", "dq", "dk", "dv"} and max(error.values()) < 1e-6


def test_a_sample_of_rows_gives_the_same_and_sees_what_is_wrong(monkeypatch):
    monkeypatch.setattr(judge, "WHOLE", 0)
    monkeypatch.setattr(judge, "SAMPLE", 5)
    monkeypatch.setattr(judge, "BLOCK", 48)
    arrays, extras = SMALL.inputs()
    exact = judge.truth(SMALL, judge.head_of(SMALL, arrays, extras))
    assert exact.dk is None and {0, 23} <= set(exact.rows) and len(exact.rows) < 24
    out, gradients = reference(SMALL, arrays, extras)
    error = judge.errors(SMALL, (out, gradients), exact)
    assert set(error) == {"out", "dq"} and max(error.values()) < 1e-6
    # Of the last example's last heads the last row is 1.5 times what it should be: by the norm of that row alone.
    off = judge.errors(SMALL, out.at[-1, -1].multiply(1.5), exact)
    share = np.linalg.norm(exact.out[-1]) / np.linalg.norm(exact.out)
    assert off["out"] == pytest.approx(0.5 * share, rel=1e-5) and judge.wrong(SMALL, off)


# What has changed


def made_up(**ms):
    cells = {name: {"ms": x, "low_ms": 0.98 * x, "high_ms": 1.02 * x, "wrong": False} for name, x in ms.items()}
    row = {"case": "d64-T2k-full", "suite": "grid", "pass": FORWARD, "cells": cells}
    return {"device": "H200", "timer": "host", "jax": "0", "rows": [row]}


def test_compare_lists_regressions_improvements_and_what_is_gone(capsys):
    old = made_up(flash_jax=1.0, cudnn=1.0, near=1.0, absent=1.0, broken=1.0)
    new = made_up(flash_jax=1.1, cudnn=0.5, near=1.03, broken=1.0)
    new["rows"][0]["cells"]["broken"] = {"failed": "it no longer compiles"}
    found = {c.contender: c for c in compare.changes(old, new)}
    assert set(found) == {"flash_jax", "cudnn", "broken"}  # what lies within the spread is no change
    assert found["flash_jax"].percent == pytest.approx(10) and "10.0% slower" in str(found["flash_jax"])
    assert "50.0% faster" in str(found["cudnn"]) and "it no longer compiles" in str(found["broken"])
    assert compare.missing(old, new) == [("d64-T2k-full", FORWARD, "absent")]
    assert compare.show(old, new, None) == 0
    assert compare.show(old, new, 20) == 0
    assert compare.show(old, new, 5) == 1
    assert compare.show(old, made_up(flash_jax=1.0, cudnn=3.0), 5) == 0  # another's regression is not ours
    text = capsys.readouterr().out
    assert "not measured this time: 1 results" in text and "1 of ours by more than 5%" in text


def test_compare_counts_ours_gone_wrong_and_refuses_another_device(capsys):
    old, new = made_up(flash_jax=1.0), made_up(flash_jax=1.0)
    new["rows"][0]["cells"]["flash_jax"]["wrong"] = True
    assert compare.show(old, new, 5) == 1
    assert compare.show(old, copy.deepcopy(old) | {"device": "A100"}, 5) == 2
    assert compare.show(old, copy.deepcopy(old) | {"timer": "cupti"}, 5) == 2
    assert compare.show(old, copy.deepcopy(old) | {"shrink": 64}, 5) == 2
    assert "differ in their device: 'H200' and 'A100'" in capsys.readouterr().out


# What is shown


@functools.cache
def drawn_report():
    rows = []
    for case in cases.SUITES["grid"]()[:3] + cases.SUITES["decode"]()[:1]:
        t = timing.Timing(1.0, 0.9, 1.1)
        cells = {"flash_jax": programs.speed(case, FORWARD, t), "other": programs.speed(case, FORWARD, t)}
        cells["other"]["wrong"] = case.T == 1024
        rows.append({"case": case.name, "suite": case.suite, "pass": FORWARD, "cells": cells})
    ceilings = {"product_tflops": 700.0, "copy_gb_per_s": 4000.0}
    return {"device": "none", "jax": "0", "timer": "host", "rows": rows, "ceilings_before": ceilings}


def test_figures_are_written(tmp_path):
    pytest.importorskip("matplotlib")
    paths = figure.draw(drawn_report(), tmp_path / "speed")
    assert [p.name for p in paths] == ["speed-grid.png", "speed-decode.png"]
    assert all(p.read_bytes().startswith(b"\x89PNG") for p in paths)
    assert figure.panel_of(drawn_report()["rows"][0]) == ("head dim 64, no mask", "512")


def test_the_table_has_no_number_for_what_is_wrong():
    lines = report.table(drawn_report()["rows"]).splitlines()
    assert lines[0] == "| case | pass | flash_jax | other |"
    assert lines[2] == "| d64-T512-full | forward | 69 | 69 |"  # 4 * 32 * 32 * 512 * 512 * 64 FLOPs in 1 ms
    assert lines[3].endswith("| wrong |")
    text = report.block(drawn_report()["rows"][1])
    assert "WRONG" in text and "GB/s" in text


# All of it


@pytest.mark.thorough
def test_the_command_measures_writes_draws_and_compares(tmp_path, capsys):
    path = tmp_path / "speed.json"
    flags = "--suite gqa decode --shrink 128 --implementation xla --contenders flash_jax xla torch".split()
    flags += ["--samples", "2", "--sample-ms", "0", "--json", str(path)]
    assert speed.main(flags) == 0
    found = json.loads(path.read_text())
    assert {row["pass"] for row in found["rows"]} == {FORWARD, BACKWARD, BOTH}
    for row in found["rows"]:
        assert row["pass"] == BACKWARD or report.ok(row["cells"]["flash_jax"]), row
    assert found["overhead"]["flash_jax"]["eager_us"] > 0 and found["ceilings_after"]["product_tflops"] > 0
    assert (tmp_path / "speed-decode.png").exists()
    assert "| decode-B8-T1-S32k-gqa32/8-d128 | forward |" in capsys.readouterr().out
    assert speed.main([*flags, "--compare", str(path)]) == 0
    assert "slower or gone" in capsys.readouterr().out


@pytest.mark.thorough
def test_the_training_step_runs_and_its_losses_agree(tmp_path, capsys):
    path = tmp_path / "step.json"
    flags = "--layers 2 --dim 32 --heads 2 --lengths 32 --tokens 64 --vocabulary 64 --steps 4 --rounds 1".split()
    flags += ["--implementation", "xla", "--contenders", "flash_jax", "xla", "--json", str(path)]
    jax.config.update("jax_numpy_dtype_promotion", "standard")  # optax relies on it, also in the compiling threads
    try:
        assert train_step.main(flags) == 0
    finally:
        jax.config.update("jax_numpy_dtype_promotion", "strict")
    cells = json.loads(path.read_text())["rows"][0]["cells"]
    assert cells["flash_jax"]["losses"][-1] < cells["flash_jax"]["losses"][0]
    assert not cells["jax.nn xla"]["wrong"] and cells["flash_jax"]["tflops"] > 0


def test_another_loss_is_marked():
    losses = {"a": [2.0, 1.0], "b": [2.0, 1.005], "c": [2.0, 1.1], "d": [2.0, float("nan")]}
    cells = {name: {"losses": x} for name, x in losses.items()} | {"e": {"failed": "out of memory"}}
    train_step.mark(cells)
    assert [cells[n].get("wrong") for n in "abcde"] == [False, False, True, True, None]


def test_what_is_wrong_of_ours_is_a_fault():
    rows = [
        {"case": "a", "pass": FORWARD, "cells": {"flash_jax": {"failed": "x"}}},
        {"case": "b", "pass": FORWARD, "cells": {"flash_jax": {"ms": 1.0, "wrong": True}, "other": {"failed": "x"}}},
        {"case": "c", "pass": FORWARD, "cells": {"flash_jax": {"left_out": "x"}, "other": {"failed": "x"}}},
    ]
    assert report.faults(rows) == ["a forward", "b forward"]
