"""What every test runs under: the CPU with eight virtual devices, strict dtype promotion, small tiles."""

import functools
import os

import pytest


def pytest_configure(config):
    """Chooses the platform before the first test module imports JAX, which reads it once."""
    expression = config.getoption("markexpr") or ""
    selected = {name for name in ("gpu", "compile") if name in expression and f"not {name}" not in expression}
    if "gpu" not in selected:
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
    if "compile" in selected:
        from tests.support import compile_report

        config.pluginmanager.register(compile_report)
    import jax
    import jax.experimental.pallas.tpu  # noqa: F401  (else a function in interpret mode compiles twice)

    jax.config.update("jax_num_cpu_devices", 8)
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    # Most of the suite's time is compiling small programs for the CPU, a third of it optimisation that nothing repays.
    jax.config.update("jax_disable_most_optimizations", not selected)


@pytest.fixture(params=["xla", "triton"])
def implementation(request):
    """The name of each blockwise implementation; `triton` runs in Pallas interpret mode."""
    if request.param != "triton":
        yield request.param
        return
    import flash_jax

    with flash_jax.interpret_mode():
        yield request.param


@pytest.fixture
def attend(implementation):
    """`flash_attention` by each implementation, in tiles so small that a short sequence has several."""
    import flash_jax

    tiles = flash_jax.BlockSizes(block_q=16, block_kv=16)
    return functools.partial(flash_jax.flash_attention, implementation=implementation, block_sizes=tiles)
