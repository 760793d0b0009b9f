"""Bars in the form of the FlashAttention-2 paper's figures: groups by length, a panel for each head dim and mask."""

import re
from pathlib import Path
from typing import Any

from benchmarks import report as reports

HEIGHT = 3.2  # inches of a panel
LABEL_LIMIT = 60  # bars of a panel that still have their numbers written on them


def panel_of(row: reports.Row) -> tuple[str, str]:
    """(title of a row's panel, label of its group of bars)."""
    match = re.fullmatch(r"d(\d+)-T(\w+)-(full|causal)", row["case"])
    if match is None:
        return row["suite"], row["case"]
    return f"head dim {match[1]}, {'causal' if match[3] == 'causal' else 'no mask'}", match[2]


def draw(report: dict[str, Any], stem: Path) -> list[Path]:
    """One PNG for each suite, `<stem>-<suite>.png`; none where matplotlib is not installed."""
    try:
        import matplotlib
    except ImportError:
        return []
    matplotlib.use("Agg")
    suites = dict.fromkeys(row["suite"] for row in report["rows"])
    return [_suite(report, suite, [row for row in report["rows"] if row["suite"] == suite], stem) for suite in suites]


def _suite(report: dict[str, Any], suite: str, rows: list[reports.Row], stem: Path) -> Path:
    """Panels of a suite: a line of them for each pass."""
    from matplotlib import pyplot

    passes = list(dict.fromkeys(row["pass"] for row in rows))
    panels = list(dict.fromkeys(panel_of(row)[0] for row in rows))
    names = [n for n in dict.fromkeys(n for row in rows for n in row["cells"]) if _timed(rows, n)]
    most = max(sum(panel_of(r)[0] == p and r["pass"] == passes[0] for r in rows) for p in panels)
    width = max(5.0, 0.22 * (most * (len(names) + 1)))
    figure, axes = pyplot.subplots(
        len(passes),
        len(panels),
        squeeze=False,
        figsize=(width * len(panels), HEIGHT * len(passes)),
        layout="constrained",
    )
    ceiling = report.get("ceilings_before", {}).get("copy_gb_per_s" if suite == "decode" else "product_tflops")
    for kind, line in zip(passes, axes, strict=True):
        for panel, axis in zip(panels, line, strict=True):
            _bars(axis, [r for r in rows if r["pass"] == kind and panel_of(r)[0] == panel], names)
            axis.set_title(f"{kind}, {panel}", fontsize=9)
            axis.set_ylabel(reports.unit(suite), fontsize=8)
            if ceiling:
                axis.axhline(ceiling, color="0.6", linestyle=":", linewidth=1)
    figure.suptitle(
        f"{report['device']}, jax {report['jax']}, {report['timer']} time; dotted: this run's ceiling", fontsize=9
    )
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=min(6, max(1, len(names))), fontsize=8)
    path = stem.with_name(f"{stem.name}-{suite}.png")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return path


def _timed(rows: list[reports.Row], name: str) -> bool:
    return any(reports.ok(row["cells"].get(name, {})) for row in rows)


def _bars(axis: Any, rows: list[reports.Row], names: list[str]) -> None:
    """Groups of bars, a colour for each contender; a result that is wrong has no bar and says so."""
    wide = 0.8 / max(1, len(names))
    for n, name in enumerate(names):
        cells = [row["cells"].get(name, {}) for row in rows]
        places = [i + (n - (len(names) - 1) / 2) * wide for i in range(len(rows))]
        heights = [reports.value(c, r["suite"]) if reports.ok(c) else 0.0 for c, r in zip(cells, rows, strict=True)]
        bars = axis.bar(places, heights, wide, label=name, color=f"C{n}")
        if len(rows) * len(names) <= LABEL_LIMIT:
            texts = [
                f"{h:.3g}" if h else "wrong" if c.get("wrong") else "" for h, c in zip(heights, cells, strict=True)
            ]
            axis.bar_label(bars, texts, fontsize=5, rotation=90, padding=2)
    axis.set_xticks(range(len(rows)), [panel_of(row)[1] for row in rows], fontsize=7)
    if any(len(panel_of(row)[1]) > 8 for row in rows):
        axis.tick_params(axis="x", labelrotation=15)
    axis.margins(y=0.18)
