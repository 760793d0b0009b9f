"""Speed of attention, ours beside others', in one process: a table, JSON and figures.

    python3 -m benchmarks.speed                                      every suite, as far as --seconds reaches
    python3 -m benchmarks.speed --suite grid                         the FlashAttention-2 paper's grid
    python3 -m benchmarks.speed --shapes d128-T16k --passes forward
    python3 -m benchmarks.speed --blocks forward=128x64w4s2,dq=64x64w4s2,dkv=64x64w4s3
    python3 -m benchmarks.speed --compare OLD.json --fail-over 5     exit status 1 if ours has become 5% slower
    python3 -m benchmarks.speed --shrink 64 --implementation xla --suite gqa mla     on a CPU, to try the script

TFLOP/s count 4*B*H*T*T*D (half if causal) for a forward pass, 2.5 times that backward and 3.5 times for both. Every
number is the median of interleaved samples of several back-to-back calls, "spread" the greatest less the least over it.
The backward pass by itself is forward+backward less forward. "err" is ||x - r|| / ||r|| of out, dq, dk and dv on one
head, r being float64 (judge.py). docs/benchmarks.md says more.
"""

import argparse
import dataclasses
import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax

from benchmarks import cases as all_cases
from benchmarks import compare, contenders, figure, judge, machine, programs, report, timing, torch_sdpa, workloads
from benchmarks.cases import BACKWARD, BOTH, FORWARD, Case

COMPILING = 0.6  # share of the seconds given after which what has not begun to compile is given up


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    suites = list(all_cases.SUITES)
    parser.add_argument("--suite", nargs="+", choices=suites, metavar="NAME", help=f"of {' '.join(suites)}")
    parser.add_argument("--shapes", nargs="+", help="self-attention such as d128-T16k, in the place of suites")
    parser.add_argument("--passes", nargs="+", choices=(FORWARD, BACKWARD, BOTH), default=[FORWARD, BACKWARD, BOTH])
    parser.add_argument(
        "--mask", nargs="+", choices=["full", "causal"], default=["full", "causal"], help="for --shapes"
    )
    parser.add_argument("--contenders", nargs="+", metavar="TEXT", help="only those with one of these in their names")
    parser.add_argument("--blocks", help="our tiles, for example forward=128x64w4s2,dq=64x64w4s2,dkv=64x64w4s3")
    parser.add_argument("--implementation", default="triton", help="of ours")
    parser.add_argument("--timer", choices=["host", "cupti"], default="host", help="the host's clock, or GPU time")
    parser.add_argument("--samples", type=int, default=7)
    parser.add_argument("--sample-ms", type=float, default=40.0)
    parser.add_argument("--seconds", type=float, default=3600.0, help="what is not measured by then is left out")
    parser.add_argument("--json", type=Path, default=Path("out/speed.json"), help="figures go beside it")
    parser.add_argument("--compare", type=Path, metavar="OLD.json")
    parser.add_argument("--fail-over", type=float, metavar="PERCENT")
    parser.add_argument("--shrink", type=int, default=1, help="divides all lengths, to try the script on a CPU")
    options = parser.parse_args(arguments)
    if options.fail_over is not None and options.compare is None:
        parser.error("--fail-over needs --compare")
    return options


def chosen(options: argparse.Namespace) -> list[Case]:
    """The cases that are asked for."""
    if options.shapes:
        found = [case for shape in options.shapes for case in all_cases.named(shape, options.mask)]
    else:
        # What "headline" has is in the grid and in d256 too.
        names = options.suite or [name for name in all_cases.SUITES if name != "headline"]
        found = [case for name in names for case in all_cases.SUITES[name]()]
    if options.passes == [FORWARD]:  # nothing is judged, nor computed by PyTorch, that nobody asks for
        found = [dataclasses.replace(case, backward=False) for case in found]
    return [case.shrunk(options.shrink) for case in found]


def entrants(options: argparse.Namespace) -> list[contenders.Contender]:
    """The contenders that are asked for."""
    found = contenders.registry(options.implementation, workloads.parse_blocks(options.blocks))
    return [c for c in found if wanted(c.name, options)]


def compiled_for(options: argparse.Namespace) -> tuple[str, ...]:
    """The passes that are compiled: the backward pass by itself is the difference of two."""
    return (FORWARD, BOTH) if BACKWARD in options.passes else tuple(options.passes)


def wanted(name: str, options: argparse.Namespace) -> bool:
    """Whether --contenders names it."""
    return not options.contenders or any(text in name for text in options.contenders)


def head(options: argparse.Namespace, who: list[contenders.Contender]) -> dict[str, Any]:
    """What a report begins with."""
    device = jax.devices()[0]
    absent = [c.name for c in who if c.left_out(machine.SMALL, BOTH) == contenders.NOT_INSTALLED]
    return {
        "device": device.device_kind,
        "jax": jax.__version__,
        "timer": options.timer,
        "implementation": options.implementation,
        "blocks": options.blocks,
        "shrink": options.shrink,
        "versions": {c.name: c.version() for c in who if c.name not in absent},
        "not_installed": absent,
        "rows": [],
    }


def rows_of(case: Case, cells: dict[str, programs.Cells], torch: dict[str, Any], options: argparse.Namespace) -> list:
    """A case's rows, PyTorch's results beside the others', of the passes that are asked for."""
    if case.backward and BACKWARD in options.passes:
        cells = cells | {BACKWARD: programs.backward_of(case, cells)}
    by_pass = torch.get("cells", {}).get(case.name, {})
    rows = []
    for kind in (k for k in (FORWARD, BACKWARD, BOTH) if k in cells and k in options.passes):
        beside = by_pass.get(kind, {"left_out": torch.get("left_out", "not asked for")})
        results = cells[kind] | ({torch_sdpa.NAME: beside} if wanted(torch_sdpa.NAME, options) else {})
        rows.append({"case": case.name, "suite": case.suite, "pass": kind, "shape": case.to_json(), "cells": results})
    return rows


def measure_all(
    cases: list[Case],
    futures: programs.Futures,
    truths: dict[Case, judge.Truth],
    found: dict,
    options,
    torch,
    end: float,
) -> None:
    """Measures case by case, prints each and writes the report after it: a run cut short leaves what it has."""
    for case in cases:
        if time.perf_counter() > end:
            found.setdefault("not_reached", []).append(case.name)
            continue
        timer = (options.samples, options.sample_ms, options.timer)
        inputs = case.inputs()
        cells = programs.measure(case, futures, inputs, truths[case], timer)
        del inputs
        rows = rows_of(case, cells, torch, options)
        found["rows"] += rows
        for row in rows:
            print(report.block(row), flush=True)
        report.write(found, options.json)


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Compiles everything in threads while the truth is computed, then measures."""
    start = time.perf_counter()
    cases, who = chosen(options), entrants(options)
    torch: dict[str, Any] = {"left_out": "not asked for"}
    if wanted(torch_sdpa.NAME, options):  # first: it needs the memory that JAX is going to take
        torch = torch_sdpa.run(cases, options.samples, options.sample_ms, options.seconds / 4)
    found = head(options, who)
    found["torch"] = {key: x for key, x in torch.items() if key != "cells"}
    if options.timer == "cupti" and (why := timing.why_no_cupti()):
        raise SystemExit(f"no timing by CUPTI here ({why}); leave --timer at host")
    absent = found["not_installed"] + [torch_sdpa.NAME] * (torch.get("left_out") == torch_sdpa.NOT_INSTALLED)
    print(f"not installed: {', '.join(absent)}" if absent else "all contenders are installed", flush=True)
    with ThreadPoolExecutor(workloads.threads()) as pool:
        futures = programs.compile_all(pool, cases, who, compiled_for(options))
        truths = {}
        for case in cases:
            truths[case] = judge.truth(case, judge.head_of(case, *case.inputs()))
        programs.wait(futures, start + COMPILING * options.seconds)
    found["compiled_after_s"] = time.perf_counter() - start
    print(f"compiled after {found['compiled_after_s']:.0f} s on {found['device']}; {options.timer} time", flush=True)
    timer = (options.samples, options.sample_ms, options.timer)
    found["ceilings_before"] = machine.ceilings(options.shrink, timer)
    found["overhead"] = machine.overhead(who)
    measure_all(cases, futures, truths, found, options, torch, start + 0.95 * options.seconds)
    found["ceilings_after"] = machine.ceilings(options.shrink, timer)
    found["seconds"] = time.perf_counter() - start
    return found


def summary(found: dict[str, Any]) -> None:
    """What ends the text: the table of all, overheads, ceilings, and what was left out."""
    print(f"\n{report.table(found['rows'])}\n")
    for name, x in found["overhead"].items():
        text = x.get("failed") or f"{x['eager_us']:7.0f} us outside jit, {x['jit_us']:5.0f} us under it"
        print(f"a small call on the host, {name:20} {text}")
    if found.get("not_reached"):
        print(f"not reached in time: {', '.join(found['not_reached'])}")
    if "torch" in found["torch"]:
        t = found["torch"]
        product = f"its {t['product_side']}^3 product: {t['product_tflops']:.3g} TFLOP/s"
        print(f"{t['note']}, by {t['clock']}; torch {t['torch']}; {product}")
    one, two = found["ceilings_before"], found["ceilings_after"]
    print(
        f"bf16 product: {one['product_tflops']:.3g} and {two['product_tflops']:.3g} TFLOP/s, "
        f"copy: {one['copy_gb_per_s']:.3g} and {two['copy_gb_per_s']:.3g} GB/s, {found['timer']} time; "
        f"{found['seconds']:.0f} s"
    )


def main(arguments: list[str] | None = None) -> int:
    """Runs, writes, draws and compares; the exit status, which is 1 also where ours failed or is wrong."""
    options = parse(arguments)
    workloads.quiet()
    old = json.loads(options.compare.read_text()) if options.compare else None  # may be the file that is written
    found = run(options)
    report.write(found, options.json)
    pictures = figure.draw(found, options.json.with_suffix(""))
    summary(found)
    print(f"{options.json} {' '.join(map(str, pictures)) or '(matplotlib is not installed: no figures)'}")
    faults = report.faults(found["rows"])
    if faults:
        print(f"OURS FAILED OR WRONG: {', '.join(faults)}")
    status = compare.show(old, found, options.fail_over) if old else 0
    return status or int(bool(faults))


if __name__ == "__main__":
    sys.exit(main())
