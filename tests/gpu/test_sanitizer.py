"""compute-sanitizer on a small ragged case: nothing out of bounds (memcheck), no race in shared memory (racecheck)."""

import glob
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).resolve().parents[2]
PLACES = ["/usr/local/cuda*/bin", "/usr/local/cuda*/compute-sanitizer", "/opt/nvidia/nsight-compute/*/host/*/sanitizer"]
PLACES += ["/opt/nvidia/*/compute-sanitizer", "/opt/nvidia/*/*/compute-sanitizer", "/opt/cuda*/bin"]
FOUND = 77  # the exit status that asks the tool to say that it found something
SECONDS = 240


def sanitizer():
    """The tool's path; the test fails, saying so, where there is none."""
    on_path = shutil.which("compute-sanitizer")
    found = [on_path] if on_path else sorted(p for place in PLACES for p in glob.glob(f"{place}/compute-sanitizer"))
    found = [p for p in found if os.path.isfile(p) and os.access(p, os.X_OK)]
    if not found:
        pytest.fail(f"compute-sanitizer is neither on PATH nor in {', '.join(PLACES)}", pytrace=False)
    return found[0]


def run(tool, *flags):
    """(exit status, output) of the small case under a tool of compute-sanitizer's."""
    command = [sanitizer(), "--tool", tool, "--error-exitcode", str(FOUND), "--print-limit", "20"]
    command += [sys.executable, "-m", "tests.gpu.sanitized", *flags]
    done = subprocess.run(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=SECONDS, check=False
    )
    return done.returncode, done.stdout


@pytest.mark.parametrize(
    ("tool", "summary"), [("memcheck", "ERROR SUMMARY: 0 errors"), ("racecheck", "RACECHECK SUMMARY: 0 hazards")]
)
def test_finds_nothing(tool, summary):
    status, output = run(tool)
    assert status == 0, output[-6000:]
    assert "done" in output and summary in output, output[-6000:]


def test_finds_what_was_planted():
    """Or the two tests above would prove nothing."""
    status, output = run("memcheck", "--plant")
    assert status == FOUND and "Invalid __global__ write" in output, output[-6000:]
