"""What is wrong with the arguments of `tune`, and which GPU it is to time."""

import dataclasses
import math
import os
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from flash_jax import arguments, compat, inspect, select
from flash_jax.inspect import ArrayOrStruct
from flash_jax.spec import interpreting
from flash_jax.triton import tiling


class Gpu(NamedTuple):
    """The GPU that is tuned for."""

    name: str
    capability: str  # such as "9.0"


def gpu(call: arguments.Call, query: ArrayOrStruct) -> Gpu:
    """The GPU on which the query lies, or would be made; raises NotImplementedError where triton has none there."""
    placed = query if isinstance(query, jax.Array) else jnp.zeros(())
    (device,), platform = placed.devices(), compat.platform_of(placed)
    reason = select.why_not("triton", call.spec, call.q, call.v, platform)
    if interpreting():
        reason = "interpret_mode() is in force"
    elif platform != "cuda":
        reason = f"the query is on a device of the platform {device.platform!r} ({device.device_kind})"
    name, capability = compat.gpu_description()
    if reason is not None or capability is None:
        raise NotImplementedError(
            "`tune` times kernels on an NVIDIA GPU that 'triton' serves, of compute capability 8.0 or newer; here "
            f"{reason or 'that is unknown'}. Interpret mode is not timed. Without such a GPU leave `block_sizes` at "
            "None, for the table's."
        )
    return Gpu(name, capability)


def own_arguments(passes: Any, seconds: Any, cache: Any) -> None:
    """Raises what is wrong with the arguments that flash_attention does not have."""
    known = ", ".join(map(repr, tiling.PASSES))
    listed = isinstance(passes, (tuple, list)) and len(passes) > 0
    if not listed or any(name not in tiling.PASSES for name in passes) or len(set(passes)) < len(passes):
        raise ValueError(f"`passes` must be a tuple of one or more of {known}, each once; got {passes!r}.")
    if isinstance(seconds, (bool, np.bool_)) or not isinstance(seconds, (int, float, np.integer, np.floating)):
        raise TypeError(f"`seconds` must be a number; got {type(seconds).__name__}.")
    if not 0 < seconds < math.inf:
        raise ValueError(f"`seconds` must be positive and finite; got {seconds}.")
    if cache is not None and not isinstance(cache, (str, os.PathLike)):
        raise TypeError(f"`cache` must be the path of a folder, 'auto' or None; got {type(cache).__name__}.")


def call(given: dict[str, Any], return_lse: bool) -> arguments.Call:
    """The checked call, by triton, structs in place of query, key, value and of what has no values."""
    for name, value in given.items():
        for x in jax.tree.leaves(value):
            _is_of_one_device(name, x)
    if isinstance(jnp.zeros(()), Tracer):
        raise TypeError("`tune` measures time, which it cannot inside jit or another transformation: call it outside.")
    if given.get("block_sizes") is not None:
        raise ValueError("`block_sizes` is what `tune` finds; leave it at None.")
    if given.get("context_axis") is not None:
        raise ValueError(
            "`tune` times the kernels of one GPU: leave `context_axis` at None, and give it the part of one device."
        )
    found, unknown = inspect.normalised("tune", return_lse, given)
    if found.spec.implementation not in (None, "triton"):
        raise ValueError(
            "`implementation` must be None or 'triton' for `tune`, which times the kernels of 'triton'; got "
            f"{found.spec.implementation!r}."
        )
    found = found._replace(spec=dataclasses.replace(found.spec, implementation="triton"))
    select.check_arguments(found.spec, found.q, found.v)
    if 0 in found.q.shape or 0 in found.v.shape:
        raise ValueError(f"`tune` has nothing to time: query is {found.q.shape}, and value {found.v.shape}.")
    _has_values(found, unknown)
    return found


def _is_of_one_device(name: str, x: Any) -> None:
    if isinstance(x, Tracer):
        raise TypeError(
            f"`tune` measures time, and `{name}` is traced: call it outside jit, grad and vmap, with arrays or a "
            "jax.ShapeDtypeStruct, and give what it returns to the traced function."
        )
    if isinstance(x, jax.Array) and len(x.devices()) > 1:
        raise ValueError(
            f"`tune` times the kernels of one GPU, and `{name}` lies on {len(x.devices())} devices; give it what one "
            "of them computes, such as a jax.ShapeDtypeStruct with its part of batch and heads."
        )


def _has_values(found: arguments.Call, unknown: tuple[str, ...]) -> None:
    """Raises ValueError for structs that random data cannot stand in for."""
    integers = [
        name
        for name, x in found.operands.items()
        if isinstance(x, jax.ShapeDtypeStruct) and jnp.issubdtype(x.dtype, jnp.signedinteger) and name not in unknown
    ]
    for name in (*unknown, *integers):
        shown = "mod_operands" if name.startswith("mods.") else name
        raise ValueError(
            f"`tune` needs the values of `{shown}`, which decide what is computed; got a jax.ShapeDtypeStruct."
        )
