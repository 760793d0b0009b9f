"""Regressions: one report of `benchmarks.speed` against an older one.

    python3 -m benchmarks.compare OLD.json NEW.json [--fail-over PERCENT]

A result is slower, or faster, where the samples of the two runs do not overlap at all. With --fail-over the exit status
is 1 where one of ours is slower by more than so many percent, or was there and is gone or wrong now; what others do is
listed and does not count. Reports of different devices, timers or --shrink are refused (exit status 2).
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.report import ok


class Change(NamedTuple):
    """One result that is not what it was: by how much slower in percent (negative: faster; infinite: gone)."""

    case: str
    kind: str
    contender: str
    percent: float
    says: str

    def __str__(self) -> str:
        return f"{self.case} {self.kind}, {self.contender}: {self.says}"


class Incomparable(Exception):
    """The reports are not of the same machine, or not timed in the same way."""


def changes(old: dict[str, Any], new: dict[str, Any]) -> list[Change]:
    """What is slower, faster or gone, slowest first; cells that only one report asked for are passed over."""
    for key in ("device", "timer", "shrink"):
        if old.get(key) != new.get(key):
            raise Incomparable(f"the reports differ in their {key}: {old.get(key)!r} and {new.get(key)!r}")
    before, found = _cells(old), []
    for key, cell in _cells(new).items():
        was = before.get(key)
        if was is None or not ok(was):
            continue
        if not ok(cell):
            reason = "wrong" if cell.get("wrong") else cell.get("failed") or cell.get("left_out")
            found.append(Change(*key, float("inf"), f"gone ({reason}), was {was['ms']:.4f} ms"))
        elif cell["low_ms"] > was["high_ms"] or cell["high_ms"] < was["low_ms"]:
            percent = 100 * (cell["ms"] / was["ms"] - 1)
            word = "slower" if percent > 0 else "faster"
            says = f"{abs(percent):.1f}% {word}, {was['ms']:.4f} -> {cell['ms']:.4f} ms"
            found.append(Change(*key, percent, says))
    return sorted(found, key=lambda change: -change.percent)


def missing(old: dict[str, Any], new: dict[str, Any]) -> list[tuple[str, str, str]]:
    """Results of the old report that the new one has no place for: other cases, passes or contenders."""
    after = _cells(new)
    return [key for key, cell in _cells(old).items() if ok(cell) and key not in after]


def _cells(report: dict[str, Any]) -> dict[tuple[str, str, str], dict[str, Any]]:
    return {(row["case"], row["pass"], name): cell for row in report["rows"] for name, cell in row["cells"].items()}


def ours(change: Change) -> bool:
    """Whether a change is of this library."""
    return change.contender.startswith("flash_jax")


def show(old: dict[str, Any], new: dict[str, Any], fail_over: float | None) -> int:
    """Prints the comparison and returns the exit status."""
    try:
        found = changes(old, new)
    except Incomparable as error:
        print(f"not compared: {error}")
        return 2
    for what, before, after in (("jax", old.get("jax"), new.get("jax")), *_ceilings(old, new)):
        if before != after:
            print(f"{what}: was {before}, is {after}")
    for change in found:
        print(change)
    gone = missing(old, new)
    if gone:
        print(f"not measured this time: {len(gone)} results, such as {' '.join(gone[0])}")
    bad = [c for c in found if ours(c) and fail_over is not None and c.percent > fail_over]
    slower = sum(c.percent > 0 for c in found)
    counts = f"{slower} slower or gone, {len(found) - slower} faster, of {len(_cells(new))}"
    print(counts if fail_over is None else f"{counts}; {len(bad)} of ours by more than {fail_over:g}%")
    return 1 if bad else 0


def _ceilings(old: dict[str, Any], new: dict[str, Any]) -> list[tuple[str, str, str]]:
    """The matrix product of both runs: what differs there differs everywhere."""
    found = [f"{r.get('ceilings_before', {}).get('product_tflops', float('nan')):.0f} TFLOP/s" for r in (old, new)]
    return [("matrix product", found[0], found[1])]


def main() -> None:
    """Compares two files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--fail-over", type=float, metavar="PERCENT")
    args = parser.parse_args()
    sys.exit(show(json.loads(args.old.read_text()), json.loads(args.new.read_text()), args.fail_over))


if __name__ == "__main__":
    main()
