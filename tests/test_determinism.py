"""The same call gives the same bits, every time, forward and backward (R14)."""

import functools
import hashlib
import os
import pathlib
import subprocess
import sys

import jax
import numpy as np
import pytest

import flash_jax
from tests.support.cases import case
from tests.support.programs import values_and_gradients

NAME = "B2-T63-S100-H4-K2-D40-bf16"
OPTIONS = {"causal": True, "kv_lengths": np.array([100, 71])}
ANOTHER_PROCESS = """
import jax; jax.config.update("jax_num_cpu_devices", 8)
from tests.test_determinism import digest; print(digest())
"""


def bits(results):
    return [np.asarray(x).tobytes() for x in jax.tree.leaves(results)]


def digest():
    """A digest of all bits of one call's results and gradients, by `xla`."""
    c = case(NAME)
    attend = functools.partial(flash_jax.flash_attention, implementation="xla")
    results = jax.jit(functools.partial(values_and_gradients(**OPTIONS), attend))(c.arrays(), c.cotangents())
    return hashlib.sha256(b"".join(bits(results))).hexdigest()


def test_ten_calls(attend):
    c = case(NAME)
    run = jax.jit(functools.partial(values_and_gradients(**OPTIONS), attend))
    first = bits(run(c.arrays(), c.cotangents()))
    assert all(bits(run(c.arrays(), c.cotangents())) == first for _ in range(9))


def test_compiled_anew(attend):
    c = case(NAME)

    def run():
        return bits(jax.jit(lambda *x: values_and_gradients(**OPTIONS)(attend, *x))(c.arrays(), c.cotangents()))

    assert run() == run()


@pytest.mark.parametrize("seed", [0, 1])
def test_other_examples_of_the_batch_do_not_matter(attend, seed):
    """Bit for bit: an example gives the same whatever lies beside it."""
    c = case(NAME)
    mine, other = c.arrays(), c.arrays(seed=seed + 7)
    beside = tuple(np.stack([x[0], y[1]]) for x, y in zip(mine, other, strict=True))
    run = jax.jit(functools.partial(values_and_gradients(causal=True), attend))
    results, results_beside = run(mine, c.cotangents()), run(beside, c.cotangents())
    assert bits(jax.tree.map(lambda x: x[0], results)) == bits(jax.tree.map(lambda x: x[0], results_beside))


def test_another_process():
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}  # as in conftest
    root = pathlib.Path(__file__).parents[1]
    command = [sys.executable, "-c", ANOTHER_PROCESS]
    run = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=root)
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip() == digest()
