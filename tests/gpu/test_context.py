"""On two GPUs or more: a sequence that they share is attended as one GPU attends it (R24)."""

import functools

import jax
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import flash_jax
from tests.support.accuracy import assert_accurate, judges
from tests.support.cases import case
from tests.support.programs import values_and_gradients

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(jax.device_count() < 2, reason="needs two GPUs")]

TOKENS, STATS = P(None, "seq"), P(None, None, "seq")
RNG = np.random.default_rng(0)
# Options with the partition of each that is an array, and shapes of what is differentiated besides.
CASES = {
    "causal": ({"causal": True}, {}, {}),
    "packed": (
        {"causal": True, "segment_ids": np.sort(RNG.integers(0, 5, (2, 1152)), -1).astype(np.int32)},
        {"segment_ids": TOKENS}, {},
    ),
    "window-and-lengths": ({"window": (300, 20), "kv_lengths": np.array([1000, 1152])}, {"kv_lengths": P()}, {}),
    "dropout": ({"causal": True, "dropout_rate": 0.2, "dropout_key": jax.random.key(1)}, {"dropout_key": P()}, {}),
    "bias": ({"softcap": 20.0}, {"bias": TOKENS, "sinks": P()}, {"bias": (8, 1152, 1152), "sinks": (8,)}),
}  # fmt: skip


@pytest.mark.parametrize("dtype", ["bf16", "f32"])
@pytest.mark.parametrize("strategy", ["ring", "all_gather", "heads"])
@pytest.mark.parametrize("name", CASES)
def test_two_gpus(name, strategy, dtype):
    given, partitions, shapes = CASES[name]
    c = case(f"B2-T1152-S1152-H8-K2-D64-{dtype}")
    mesh = jax.make_mesh((2,), ("seq",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])

    def on_devices(query, key, value, **options):
        arrays = {name: x for name, x in options.items() if name in partitions}
        fixed = {name: x for name, x in options.items() if name not in arrays}
        attend = functools.partial(
            flash_jax.flash_attention, **fixed, implementation="triton", context_axis="seq", context_strategy=strategy
        )
        part = jax.shard_map(
            lambda q, k, v, arrays: attend(q, k, v, **arrays),
            mesh=mesh,
            in_specs=(TOKENS, TOKENS, TOKENS, {name: partitions[name] for name in arrays}),
            out_specs=(TOKENS, STATS),
        )
        return part(query, key, value, arrays)

    program, inputs, cotangents = values_and_gradients(**given), c.inputs(**shapes), c.cotangents()
    found = jax.jit(functools.partial(program, on_devices))(inputs, cotangents)
    oracle = judges(program, inputs, cotangents)
    for n, leaves in enumerate(zip(*map(jax.tree.leaves, (found, *oracle)), strict=True)):
        assert_accurate(*leaves, derivative=n > 1, name=f"{name}, result {n}")
