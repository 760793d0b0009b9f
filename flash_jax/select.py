"""Which implementation runs a call, and why the others do not."""

import dataclasses
from types import ModuleType

import jax

from flash_jax import compat, triton, xla
from flash_jax.spec import AttentionSpec

_MODULES = {"triton": triton, "xla": xla}
_PREFERENCE = ("triton", "xla")
_TRITON_MAX_HEAD_DIM = 256
_TRITON_MIN_CAPABILITY = (8, 0)


def check_arguments(spec: AttentionSpec, q: jax.Array, v: jax.Array) -> None:
    """Raises what the arguments alone decide about the named implementation, so that tracing shows it."""
    if spec.implementation is None:
        return
    reason = _argument_reason(spec.implementation, spec, q, v)
    if reason:
        raise NotImplementedError(_refusal(spec.implementation, reason, spec, q, v))
    if spec.implementation == "triton":
        triton.check_block_sizes(spec)


def choose(spec: AttentionSpec, q: jax.Array, k: jax.Array, v: jax.Array, platform: str) -> ModuleType:
    """The module (with forward, backward and tangent) that runs the call on `platform`, "cuda" or "other".

    Called while lowering, when the platform is known. Raises NotImplementedError where the named implementation cannot.
    """
    if spec.implementation is not None:
        reason = _platform_reason(spec.implementation, spec, platform)
        if reason:
            raise NotImplementedError(_refusal(spec.implementation, reason, spec, q, v))
        return _MODULES[spec.implementation]
    name = preferred(spec, q, v, platform)
    if name == "triton":
        triton.check_block_sizes(spec)  # which tracing could not do: the sizes may have been for xla
    return _MODULES[name]


def preferred(spec: AttentionSpec, q: jax.Array, v: jax.Array, platform: str) -> str:
    """The implementation that `implementation=None` takes on `platform`."""
    unnamed = dataclasses.replace(spec, implementation=None)
    for name in _PREFERENCE:
        if not _argument_reason(name, spec, q, v) and not _platform_reason(name, unnamed, platform):
            return name
    raise NotImplementedError("No implementation serves this call.")  # not reached: xla serves all


def why_not(name: str, spec: AttentionSpec, q: jax.Array, v: jax.Array, platform: str) -> str | None:
    """Why `name`, if it were the named implementation, would not run the call on `platform`; None where it would."""
    named = dataclasses.replace(spec, implementation=name)
    return _argument_reason(name, spec, q, v) or _platform_reason(name, named, platform)


def _argument_reason(name: str, spec: AttentionSpec, q: jax.Array, v: jax.Array) -> str | None:
    """Why `name` cannot serve these arguments on any platform; None where it can."""
    if name == "mosaic_gpu":
        return "the Mosaic GPU kernels are not part of this version"
    if name == "reference" and spec.context_axis is not None:
        return "it attends whole sequences, and `context_axis` shares them among devices"
    if name != "triton":
        return None
    if q.dtype == "float64":
        return "it takes bfloat16, float16 and float32, and the inputs are float64"
    if max(q.shape[-1], v.shape[-1]) > _TRITON_MAX_HEAD_DIM:
        return f"it takes head dims up to {_TRITON_MAX_HEAD_DIM}, and these are {q.shape[-1]} and {v.shape[-1]}"
    return None


def _platform_reason(name: str, spec: AttentionSpec, platform: str) -> str | None:
    """Why `name` cannot run on what is being lowered for; None where it can."""
    if name != "triton" or spec.interpret and spec.implementation == "triton":
        return None
    if platform != "cuda":
        return "it needs an NVIDIA GPU, and this program is lowered for another platform"
    device, capability = compat.gpu_description()
    if capability is not None and tuple(map(int, capability.split("."))) < _TRITON_MIN_CAPABILITY:
        needed = ".".join(map(str, _TRITON_MIN_CAPABILITY))
        return f"it needs compute capability {needed} or newer, and {device} has {capability}"
    return None


def _refusal(name: str, reason: str, spec: AttentionSpec, q: jax.Array, v: jax.Array) -> str:
    nearest = "triton" if name == "mosaic_gpu" and _argument_reason("triton", spec, q, v) is None else "xla"
    hint = " (or wrap the call in `flash_jax.interpret_mode()` to test the kernel)" if "platform" in reason else ""
    return f"implementation={name!r} cannot serve this call: {reason}. Use implementation={nearest!r} or None{hint}."
