"""Without a GPU: a sequence that four GPUs share, compiled for them; its kernels, collectives and memory (R15, R24)."""

import collections
import functools
import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import flash_jax
from tests.support import gpu_compile

pytestmark = pytest.mark.compile

COLLECTIVES = ("all-gather", "all-reduce", "all-to-all", "collective-permute", "reduce-scatter")
TOKENS = P(None, "gpu")


def compiled(strategy, T):
    """The forward and backward pass on four H200s, of which each has a quarter of the tokens."""
    mesh = gpu_compile.devices(gpu_compile.H200, (4,), ("gpu",))
    x = jax.ShapeDtypeStruct((1, T, 8, 64), jnp.bfloat16, sharding=NamedSharding(mesh, TOKENS))
    attend = functools.partial(
        flash_jax.flash_attention, causal=True, implementation="triton", context_axis="gpu", context_strategy=strategy
    )

    def step(q, k, v, dout):
        out, pull = jax.vjp(attend, q, k, v)
        return out, pull(dout)

    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        part = jax.shard_map(step, mesh=mesh, in_specs=(TOKENS,) * 4, out_specs=(TOKENS, (TOKENS,) * 3))
        return jax.jit(part).lower(x, x, x, x).compile()


@pytest.mark.parametrize(
    ("strategy", "expected", "parts"),
    [
        ("ring", {"collective-permute"}, 4),
        ("all_gather", {"all-gather", "reduce-scatter"}, 1),
        ("heads", {"all-to-all"}, 1),
    ],
)
def test_kernels_and_collectives(strategy, expected, parts):
    text = compiled(strategy, 4096).as_text()
    assert {name for name in COLLECTIVES if re.search(rf"= [^\n]* {name}(?:-start)?\(", text)} == expected
    calls = [line for line in text.splitlines() if 'custom_call_target="__gpu$xla.gpu.triton"' in line]
    names = collections.Counter(re.search(r"/flash_attention_(\w+)_kernel/", line)[1] for line in calls)
    assert names == {"forward": parts, "dq": parts, "dkv": parts}


@pytest.mark.parametrize("strategy", ["ring", "all_gather", "heads"])
def test_memory_is_linear(strategy):
    half, whole = (compiled(strategy, T).memory_analysis().temp_size_in_bytes for T in (8192, 16384))
    assert whole <= 2.1 * half
