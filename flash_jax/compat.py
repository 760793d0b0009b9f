"""Everything that depends on JAX's version or on names that JAX does not promise to keep.

No other file of flash_jax asks for a version or imports ``jax._src``; ``tests/test_compat.py`` checks each entry on
every supported version.
"""

import contextlib
import contextvars
import warnings
from collections.abc import Iterator

import jax
from jax import lax
from jax._src import core
from jax._src.dispatch import prim_requires_devices_during_lowering

MINIMUM_JAX = (0, 10, 2)

if jax.__version_info__ < MINIMUM_JAX:
    raise ImportError(
        f"flash_jax needs jax >= {'.'.join(map(str, MINIMUM_JAX))}; found jax {jax.__version__}. "
        "Run `pip install -U jax`."
    )


def jax_version() -> str:
    """Such as "0.11.2"."""
    return jax.__version__


@contextlib.contextmanager
def quiet_triton_lowering() -> Iterator[None]:
    """Silences the deprecation warning that JAX 0.11 and later give each time that a Pallas-Triton kernel is lowered.

    The README tells users of the deprecation; their logs need not repeat it at every compilation.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The Pallas Triton backend is deprecated", DeprecationWarning)
        yield


def constants_in_place() -> contextlib.AbstractContextManager:
    """Undoes `jax.ensure_compile_time_eval` within: numbers in what is traced stay literals, as they are without it.

    There a jitted function of JAX's own, such as the remainder, takes results of constants as inputs of its jaxpr.
    """
    from jax._src.config import eager_constant_folding

    return eager_constant_folding(False)


_UNKNOWN_GPU = "an unknown NVIDIA GPU"
# Stands in for it: the oldest that the kernels run on, so that what is lowered for it runs on all of them.
_OLDEST_GPU = "NVIDIA A100-SXM4-80GB"


@contextlib.contextmanager
def some_gpu() -> Iterator[None]:
    """Lowers for CUDA where this process sees no GPU and is told of none, as for ``jax.export`` on a laptop.

    From 0.11 on, JAX lowers Pallas-Triton kernels only for a GPU whose name it knows. (A mesh of CPU devices in force
    is left as it is: what was traced under it names its devices, and JAX's own error says what to do.)
    """
    mesh = jax.sharding.get_abstract_mesh()
    if jax.__version_info__ < (0, 11) or mesh.abstract_device is not None or _cuda_device() is not None:
        yield
        return
    device = jax.sharding.AbstractDevice(_OLDEST_GPU, None, "cuda")
    token = _stand_in.set(True)
    try:
        axes = mesh.axis_sizes, mesh.axis_names, mesh.axis_types
        with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh(*axes, abstract_device=device)):
            yield
    finally:
        _stand_in.reset(token)


_stand_in = contextvars.ContextVar("flash_jax_stand_in", default=False)


def _is_gpu(abstract_device) -> bool:
    return abstract_device is not None and getattr(abstract_device, "platform", "cuda") in ("cuda", "gpu")


def _cuda_device():
    try:
        return jax.local_devices(backend="cuda")[0]
    except RuntimeError:
        return None


def gpu_description() -> tuple[str, str | None]:
    """(device name, compute capability such as "9.0" or None where unknown) of the GPU that is being lowered for.

    The abstract mesh's device wins (cross-compilation); else the first CUDA device of this process; on a machine
    without one (``jax.export``, ahead-of-time compilation) the capability is unknown.
    """
    if _stand_in.get():
        return _UNKNOWN_GPU, None
    abstract = jax.sharding.get_abstract_mesh().abstract_device
    if _is_gpu(abstract):
        return abstract.device_kind, _capability_of_kind(abstract.device_kind)
    device = _cuda_device()
    if device is None:
        return _UNKNOWN_GPU, None
    return device.device_kind, str(device.compute_capability)


# Names by which JAX's abstract devices call the GPUs that have another compute capability than their siblings.
_CAPABILITY_BY_NAME = (
    ("A100", "8.0"), ("A30", "8.0"), ("A10", "8.6"), ("A16", "8.6"), ("A40", "8.6"), ("A6000", "8.6"),
    ("RTX 30", "8.6"), ("L4", "8.9"), ("RTX 40", "8.9"), ("H100", "9.0"), ("H200", "9.0"), ("GH200", "9.0"),
    ("B200", "10.0"), ("B300", "10.3"), ("RTX 50", "12.0"),
    ("P100", "6.0"), ("V100", "7.0"), ("T4", "7.5"), ("RTX 20", "7.5"), ("GTX 16", "7.5"),
)  # fmt: skip


def _capability_of_kind(kind: str) -> str | None:
    for device in jax.local_devices():
        if device.device_kind == kind and hasattr(device, "compute_capability"):
            return str(device.compute_capability)
    return next((capability for name, capability in _CAPABILITY_BY_NAME if name in kind), None)


def lower_with_devices(primitive) -> None:
    """Has JAX tell the devices when it lowers `primitive`, which `custom_partitioning` inside needs; not public."""
    prim_requires_devices_during_lowering.add(primitive)


def manual_axis_type(x: jax.Array | jax.ShapeDtypeStruct):
    """How x varies over the manual axes of an enclosing ``shard_map`` (None where JAX does not say)."""
    return (x if isinstance(x, jax.ShapeDtypeStruct) else jax.typeof(x)).manual_axis_type


def shape_like(shape: tuple[int, ...], dtype, like: jax.Array | jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    """A ShapeDtypeStruct that varies over the same manual axes as `like`, as ``shard_map(check_vma=True)`` demands."""
    return jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=manual_axis_type(like))


def vary_like(tree, *others):
    """`tree` (say, zeros that start a loop) with its arrays marked as varying over all manual axes that `others` do."""
    types = [manual_axis_type(x) for x in jax.tree.leaves(others)]
    if not types or any(t is None for t in types):
        return tree
    union = frozenset().union(*(t.varying for t in types))

    def mark(x):
        missing = union - manual_axis_type(x).varying
        return lax.pcast(x, tuple(missing), to="varying") if missing else x

    return jax.tree.map(mark, tree)


def explicit_part(aval) -> list[tuple[str, ...]]:
    """The explicit mesh axes over which each dim of an abstract value is sharded."""
    placed = aval.sharding
    types = dict(zip(placed.mesh.axis_names, placed.mesh.axis_types, strict=True))
    dims = [axes if isinstance(axes, tuple) else () if axes is None else (axes,) for axes in placed.spec]
    return [tuple(axis for axis in axes if types.get(axis) == jax.sharding.AxisType.Explicit) for axes in dims]


def own_axes(mesh) -> set[str]:
    """The axes of `mesh` over which a `shard_map` can be here: neither manual already nor what a `vmap` maps over."""
    types = zip(mesh.axis_names, mesh.axis_types, strict=True)
    free = {axis for axis, kind in types if kind != jax.sharding.AxisType.Manual}
    return free - core.get_axis_env().explicit_mesh_axis_names


def explicit_axes(aval) -> list[str]:
    """The explicit mesh axes over which an abstract value is sharded."""
    return sorted(axis for axes in explicit_part(aval) for axis in axes)


def replicated_like(aval, shape: tuple[int, ...], dtype):
    """An abstract value of another shape and dtype that lives where `aval` does, sharded over nothing."""
    placed = jax.sharding.NamedSharding(aval.sharding.mesh, jax.sharding.PartitionSpec(*(None,) * len(shape)))
    return aval.update(shape=shape, dtype=dtype, weak_type=False, sharding=placed)


def platform_of(x: jax.Array) -> str:
    """ "cuda" where a concrete array lies on an NVIDIA GPU, else "other"."""
    (device, *_) = x.devices()
    is_nvidia = str(getattr(device, "compute_capability", "")).replace(".", "").isdigit()  # AMD's are called gfx...
    return "cuda" if device.platform in ("gpu", "cuda") and is_nvidia else "other"
