"""Without a GPU: each option goes through the GPU's own compiler, forward and backward, in memory linear in T."""

import pytest

from benchmarks import memory
from tests.support import gpu_compile

pytestmark = pytest.mark.compile

T = 1024
MAX_SPILLED = 4096  # bytes a thread, in all loops together; what an option costs in time is measured on a GPU
NAMES = list(memory.options(T))


def linear(name):
    """Bytes that may be needed at length T: dq, dk, dv in float32, and per-row numbers, but nothing of T * T."""
    rows = 3 * T * memory.H * memory.D * 4 + 16 * T * memory.H * 4
    return rows + (2**16 if "bias" not in name and name != "all together" else 8 * T * memory.H * memory.D * 4)


@pytest.mark.parametrize("name", NAMES)
def test_each_option_alone_and_all_together(name, record_property):
    program = memory.compiled(*memory.options(T)[name], T, passes="backward")
    for kernel in program.kernels:
        if kernel.name.startswith("flash"):
            row = f"{name}: {kernel.name}", str(kernel.registers), str(kernel.spills), " ".join(kernel.notes)
            record_property("kernel", (*row, f"{program.seconds:.1f} for all"))
    assert program.temporary_bytes <= linear(name)
    assert {k.name: k.spills for k in program.kernels if k.spills > MAX_SPILLED} == {}


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("head_dim", [64, 256])
@pytest.mark.parametrize("target", gpu_compile.TARGETS, ids=lambda target: target.name.split()[-1])
def test_all_together_fits(head_dim, dtype, target):
    """The shared memory of every kernel: the compiler refuses what does not fit."""
    options = memory.options(T)["all together"]
    program = memory.compiled(*options, T, passes="backward", target=target, head_dim=head_dim, dtype=dtype)
    assert program.kernels
