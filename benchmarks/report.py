"""The results as text and as a file."""

import json
from pathlib import Path
from typing import Any

from benchmarks.contenders import NOT_INSTALLED

Row = dict[str, Any]  # {"case", "suite", "pass", "shape": the case's fields, "cells": {contender: result}}


def ok(cell: dict[str, Any]) -> bool:
    """Whether a result counts: it was timed, and is not wrong."""
    return "ms" in cell and not cell.get("wrong", False)


def faults(rows: list[Row]) -> list[str]:
    """Where ours failed or is wrong."""
    ours = [(row, row["cells"].get("flash_jax", {})) for row in rows]
    return [f"{row['case']} {row['pass']}" for row, cell in ours if "failed" in cell or cell.get("wrong")]


def block(row: Row) -> str:
    """One case and pass: a line for each contender that is installed, ours first."""
    lines, out = [f"{row['case']}  {row['pass']}"], []
    ours = row["cells"].get("flash_jax", {})
    for name, cell in row["cells"].items():
        if "left_out" not in cell:
            lines.append(f"    {name:20} {_line(cell, ours, name)}")
        elif cell["left_out"] != NOT_INSTALLED:
            out.append(f"{name} ({cell['left_out']})")
    return "\n".join(lines + [f"    left out: {', '.join(out)}"] * bool(out))


def _line(cell: dict[str, Any], ours: dict[str, Any], name: str) -> str:
    if "ms" not in cell:
        return f"failed ({cell['failed']})"
    spread = 100 * (cell["high_ms"] - cell["low_ms"]) / cell["ms"]
    parts = [f"{cell['ms']:10.4f} ms (spread {spread:3.0f}%) {cell['tflops']:7.4g} TFLOP/s"]
    if "gb_per_s" in cell:
        parts.append(f"{cell['gb_per_s']:6.0f} GB/s")
    if "errors" in cell:
        parts.append("err " + " ".join(f"{x:.1e}" for x in cell["errors"].values()))
    if "peak_mib" in cell:
        temporary = f", temporary {cell['temporary_mib']:.0f}" if "temporary_mib" in cell else ""
        parts.append(f"peak {cell['peak_mib']:.0f} MiB{temporary}")
    if "compile_s" in cell:
        parts.append(f"traced {cell['trace_s']:.1f} s, compiled {cell['compile_s']:.1f} s")
    if name != "flash_jax" and ok(ours):
        parts.append(f"ours takes {ours['ms'] / cell['ms']:.2f}x its time")
    return ("WRONG  " if cell.get("wrong") else "") + "   ".join(parts)


def table(rows: list[Row]) -> str:
    """All in Markdown: TFLOP/s, or GB/s for decoding."""
    names = [n for n in _names(rows) if any("ms" in row["cells"].get(n, {}) for row in rows)]
    head = f"| case | pass | {' | '.join(names)} |\n|---|---|{'---|' * len(names)}"
    return "\n".join([head, *(f"| {row['case']} | {row['pass']} | {_cells(row, names)} |" for row in rows)])


def _cells(row: Row, names: list[str]) -> str:
    return " | ".join(_short(row["cells"].get(name, {}), row["suite"]) for name in names)


def _short(cell: dict[str, Any], suite: str) -> str:
    if "ms" not in cell:
        return "failed" if "failed" in cell else "-"
    if cell.get("wrong"):
        return "wrong"
    x = value(cell, suite)
    return f"{x:.0f}" if x >= 10 else f"{x:.3g}"


def value(cell: dict[str, Any], suite: str) -> float:
    """What a table and a figure show of a result: TFLOP/s, or GB/s for decoding, which memory bounds."""
    return cell["gb_per_s"] if suite == "decode" else cell["tflops"]


def unit(suite: str) -> str:
    """The unit of `value`."""
    return "GB/s of query, key, value and output" if suite == "decode" else "TFLOP/s"


def _names(rows: list[Row]) -> list[str]:
    return list(dict.fromkeys(name for row in rows for name in row["cells"]))


def write(report: dict[str, Any], path: Path) -> None:
    """The report as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=1) + "\n")
