"""What the GPU tests run under: several processes share one GPU, so none takes its memory ahead."""

import functools
import os

import pytest

# Read when JAX first asks for a device, which is after the collection of the tests.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")


@pytest.fixture(scope="session", autouse=True)
def gpu():
    """Fails every test here, with a reason, where JAX sees no NVIDIA GPU."""
    import jax

    if jax.default_backend() != "gpu":
        pytest.fail(f"`-m gpu` needs an NVIDIA GPU and JAX with CUDA; JAX sees {jax.devices()}", pytrace=False)


@pytest.fixture
def attend():
    """`flash_attention` by the Triton kernels, with the table's tiles."""
    import flash_jax

    return functools.partial(flash_jax.flash_attention, implementation="triton")
