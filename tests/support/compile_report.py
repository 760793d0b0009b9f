"""A pytest plugin for the compile lane: a table, at the end of the run, of what the compiler said of each kernel.

A test hands its rows over with `record_property("kernel", row)`, which also works from the workers of pytest-xdist.
"""

import os

COLUMNS = ("kernel", "registers", "spilled bytes", "notes", "seconds")


def ask():
    """Has ptxas's report of each kernel written to stderr, from the time that JAX's CUDA plugin is loaded.

    Its logger reads the environment then. Only in the compile lane: a test that starts a program would find it in its
    own.
    """
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "0"
    os.environ["TF_CPP_VMODULE"] = "subprocess_compilation=2"


def pytest_configure():
    """Before any test loads the plugin."""
    ask()


def pytest_terminal_summary(terminalreporter):
    """Prints the table."""
    reports = [r for group in terminalreporter.stats.values() for r in group if hasattr(r, "user_properties")]
    rows = sorted({tuple(value) for r in reports for name, value in r.user_properties if name == "kernel"})
    if not rows:
        return
    terminalreporter.section("what the compiler says")
    cells = [COLUMNS, *rows]
    widths = [max(len(row[i]) for row in cells) for i in range(len(COLUMNS))]
    for row in cells:
        terminalreporter.write_line("  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)))
    spilled = sum(row[2] != "0" for row in rows)
    terminalreporter.write_line(f"{len(rows)} kernels, {spilled} with spills")
