"""Each pass of one call by itself: a function that runs its kernels, and the arrays that it takes."""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax

from flash_jax import triton
from flash_jax.arguments import Call
from flash_jax.spec import BlockSizes, Operands
from flash_jax.tuning.candidates import has_dense_bias


class Arrays(NamedTuple):
    """What the passes after the forward one take."""

    q: jax.Array
    k: jax.Array
    v: jax.Array
    operands: Operands
    out: jax.Array
    lse: jax.Array
    out_ct: jax.Array  # random
    dots: dict[str, jax.Array]  # tangents of query, key and value, random


def of_call(name: str, call: Call, sizes: BlockSizes | None) -> Callable[..., dict[str, jax.Array]]:
    """The pass as a function of `Arrays` (forward: of query, key, value and operands), its results by name.

    dq gives the gradient of a bias, too, where that has one for each query and key, since the same sizes hold for it.
    """
    spec = dataclasses.replace(call.spec, implementation="triton", block_sizes=sizes)
    triton.check_block_sizes(spec)
    lead = call.q.shape[:-3]
    if name == "forward":

        def forward(q, k, v, operands):
            out, lse = triton.forward(q, k, v, operands, spec)
            return {"out": out, "lse": lse}

        return forward
    if name == "tangent":

        def tangent(q, k, v, operands, out, lse, out_ct, dots):
            out_dot, lse_dot = triton.tangent((q, k, v, operands), out, lse, dots, spec)
            return {"out_dot": out_dot, "lse_dot": lse_dot}

        return tangent
    wanted = {"query": lead} if name == "dq" else {"key": lead, "value": lead}
    if name == "dq" and has_dense_bias(call):
        wanted["bias"] = call.operands.bias.shape[: len(lead)]

    def backward(q, k, v, operands, out, lse, out_ct, dots):
        return triton.backward((q, k, v, operands), out, lse, out_ct, None, wanted, spec)

    return backward


def arrays(call: Call, forward: Callable, passes: tuple[str, ...]) -> Arrays:
    """What the `passes` take, by the compiled `forward` pass; tangents only where one of them reads them."""
    q, k, v, operands, _ = call
    found = forward(q, k, v, operands)
    (device,) = q.devices()
    keys = iter(jax.random.split(jax.random.key(17), 4))

    def like(x):
        return jax.device_put(jax.random.normal(next(keys), x.shape, x.dtype), device)

    out_ct = like(found["out"])
    dots = {"query": like(q), "key": like(k), "value": like(v)} if "tangent" in passes else {}
    return Arrays(q, k, v, operands, found["out"], found["lse"], out_ct, dots)
