"""Without a GPU: whole programs compiled for one, their memory and their kernels."""

import collections
import functools

import jax
import jax.numpy as jnp
import pytest

import flash_jax
from tests.support import gpu_compile

pytestmark = pytest.mark.compile

HEADS = 4
HEAD_DIM = 64
FORWARD, DQ, DKV, TANGENT = (f"flash_attention_{name}_kernel" for name in ("forward", "dq", "dkv", "tangent"))


def struct(*shape, dtype="bfloat16"):
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))


def loss(q, k, v, **options):
    options = {"causal": True, "implementation": "triton"} | options
    return jax.tree.reduce(jnp.add, [x.sum(dtype=jnp.float32) for x in jax.tree.leaves(attend(q, k, v, **options))])


def attend(q, k, v, **options):
    return flash_jax.flash_attention(q, k, v, **options)


# Memory.

OPTIONS = {
    "causal": lambda i: {},
    "full": lambda i: {"causal": False},
    "window": lambda i: {"window": (1000, 0)},
    "lse": lambda i: {"return_lse": True},
    "lengths": lambda i: {"q_lengths": i, "kv_lengths": i},
    "offsets": lambda i: {"q_offset": i},
}


def gradient_bytes(options, T):
    x = struct(1, T, HEADS, HEAD_DIM)

    def run(q, k, v, i):
        return jax.grad(lambda *arrays: loss(*arrays, **options(i)), (0, 1, 2))(q, k, v)

    return gpu_compile.compile_for(gpu_compile.H200, run, x, x, x, struct(1, dtype="int32")).temporary_bytes


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_memory_of_the_gradient_is_linear(options):
    half, whole = gradient_bytes(options, 8192), gradient_bytes(options, 16384)
    assert whole <= 2.1 * half
    # Besides arguments and results no more than two arrays like the query (the output and its cotangent) and two
    # numbers for each of its rows; a T x S array of a single head would be sixteen times as much.
    assert whole <= 16384 * HEADS * (2 * HEAD_DIM * 2 + 2 * 4) * 1.1


def test_a_tangent_needs_no_memory_but_its_results():
    """The output and the log-sum-exp, from which the tangent pass takes the probabilities."""

    def bytes_at(T):
        x = struct(1, T, HEADS, HEAD_DIM)

        def run(q, k, v):
            return jax.jvp(lambda *arrays: attend(*arrays, causal=True), (q, k, v), (v, q, k))

        return gpu_compile.compile_for(gpu_compile.H200, run, x, x, x).temporary_bytes

    half, whole = bytes_at(8192), bytes_at(16384)
    assert whole <= 2.1 * half
    assert whole <= 16384 * HEADS * (HEAD_DIM * 2 + 2 * 4) * 1.1


def test_memory_of_the_gradient_of_a_tangent_is_linear():
    """What differentiates a tangent runs the code of xla/: sums over tiles, whose tiles are larger for longer calls."""

    def bytes_at(T):
        x = struct(1, T, HEADS, HEAD_DIM)

        def run(*x):
            pushed = lambda q, k, v: jax.jvp(lambda *y: attend(*y, causal=True), (q, k, v), (v, q, k))[1]  # noqa: E731
            return jax.grad(lambda *y: pushed(*y).astype(jnp.float32).sum(), (0, 1, 2))(*x)

        return gpu_compile.compile_for(gpu_compile.H200, run, x, x, x).temporary_bytes

    # From one length to its double the compiler's arrangement of buffers changes too: measure over two doublings.
    quarter, whole = bytes_at(8192), bytes_at(32768)
    assert whole <= 4.2 * quarter
    assert whole < 32768 * 32768


# Launches.


def launches(function, *arguments):
    """How often the compiled program launches each kernel of ours, loops aside."""
    text = gpu_compile.compile_for(gpu_compile.H200, function, *arguments).program.as_text()
    calls = [line for line in text.splitlines() if "custom-call(" in line and "triton" in line]
    return collections.Counter(name for line in calls for name in (FORWARD, DQ, DKV, TANGENT) if f"/{name}/" in line)


X = (struct(1, 512, HEADS, HEAD_DIM),) * 3


def test_the_gradient_launches_three_kernels():
    assert launches(jax.grad(loss, (0, 1, 2)), *X) == {FORWARD: 1, DQ: 1, DKV: 1}


def test_frozen_keys_and_values_cost_nothing():
    assert launches(jax.grad(loss, 0), *X) == {FORWARD: 1, DQ: 1}


@pytest.mark.parametrize("wanted", [1, 2, (1, 2)], ids=["key", "value", "both"])
def test_a_frozen_query_costs_nothing(wanted):
    assert launches(jax.grad(loss, wanted), *X) == {FORWARD: 1, DKV: 1}


def test_a_call_without_gradient_launches_one_kernel():
    assert launches(loss, *X) == {FORWARD: 1}


def test_a_tangent_launches_two_kernels():
    run = lambda *x: jax.jvp(functools.partial(attend, implementation="triton"), x, x)  # noqa: E731
    assert launches(run, *X) == {FORWARD: 1, TANGENT: 1}


def layer(q, k, v):
    return jnp.sin(attend(jnp.sin(q), k, v, implementation="triton"))


def checkpointed(policy):
    def run(q, k, v):
        return jax.checkpoint(layer, policy=policy)(q, k, v).sum(dtype=jnp.float32)

    return jax.value_and_grad(run, (0, 1, 2))  # with the value, which needs the first run of forward


def test_checkpoint_by_name_runs_the_forward_kernel_once():
    policy = jax.checkpoint_policies.save_only_these_names("flash_attention_out", "flash_attention_lse")
    assert launches(checkpointed(policy), *X) == {FORWARD: 1, DQ: 1, DKV: 1}


def test_checkpoint_of_everything_runs_it_twice():
    """So that the test above is about the names."""
    assert launches(checkpointed(None), *X) == {FORWARD: 2, DQ: 1, DKV: 1}


def test_grouped_heads_are_not_repeated():
    """Keys and values of 2 of 16 heads: no buffer of the size that 16 of them have, but the query's own."""
    q, kv = struct(1, 4096, 16, 64), struct(1, 4096, 2, 64)
    bytes_needed = gpu_compile.compile_for(gpu_compile.H200, jax.grad(loss, (1, 2)), q, kv, kv).temporary_bytes
    assert bytes_needed <= 4096 * 16 * (2 * 64 * 2 + 2 * 4) * 1.1  # the output, its cotangent, lse and delta
