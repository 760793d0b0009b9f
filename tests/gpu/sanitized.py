"""Small ragged forward, backward and tangent passes, for compute-sanitizer; with `--plant`, a write out of bounds.

Inputs are made and results looked at by NumPy, so that few kernels besides ours run.
"""

import argparse
import functools
import os

# A cudaMalloc for each buffer: then a step past the end of an array is a step past the end of an allocation.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
os.environ.setdefault("XLA_PYTHON_CLIENT_ALLOCATOR", "platform")

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

import flash_jax


def all_passes(attend, q, k, v, dout):
    """(out, gradients, tangent of out along arrays that are there)."""
    out, pull = jax.vjp(attend, q, k, v)
    return out, pull(dout), jax.jvp(attend, (q, k, v), (q, v, k))[1]


def attention(dtype, T, S, D, **options):
    """Runs the four kernels; returns all results after checking that they are finite and not all zero."""
    rng = np.random.default_rng(0)
    arrays = [
        rng.standard_normal(shape).astype(dtype) for shape in ((2, T, 4, D), (2, S, 2, D), (2, S, 2, D), (2, T, 4, D))
    ]
    attend = functools.partial(flash_jax.flash_attention, implementation="triton", **options)
    results = jax.jit(functools.partial(all_passes, attend))(*arrays)
    for x in jax.tree.leaves(results):
        numbers = np.asarray(x, np.float32)
        if not np.isfinite(numbers).all() or not numbers.any():
            raise SystemExit("a result is not finite, or all zero")


def planted():
    """A kernel that writes far behind its output."""

    def kernel(x_ref, out_ref):
        rows = pl.ds(10_000_000 * (pl.program_id(0) + 1), 16)  # not a number that tracing could refuse
        plgpu.store(out_ref.at[rows], x_ref[...])

    call = pl.pallas_call(
        kernel,
        grid=(1,),
        out_shape=jax.ShapeDtypeStruct((16,), jnp.float32),
        compiler_params=plgpu.CompilerParams(num_warps=1, num_stages=1),
        interpret=jax.default_backend() == "cpu",
    )
    np.asarray(jax.jit(call)(np.ones(16, np.float32)))


def main():
    """Runs what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--plant", action="store_true")
    if parser.parse_args().plant:
        planted()
    else:
        attention(jnp.bfloat16, 100, 77, 72, causal=True)
        attention(
            jnp.float16, 63, 130, 64, window=(30, 10), kv_lengths=np.array([130, 41]), q_lengths=np.array([40, 63])
        )
        attention(jnp.float32, 65, 65, 32, causal=True)
    print("done")


if __name__ == "__main__":
    main()
