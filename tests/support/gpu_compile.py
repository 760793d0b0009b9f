"""A GPU compiler on a machine without a GPU: lowers and compiles for a described GPU, and reads what the compiler says.

`lower` needs JAX alone. The rest needs the CUDA plugin of jax's own version and CUDA's compiler (the `compile` extra).
"""

import contextlib
import dataclasses
import functools
import math
import os
import re
import sys
import tempfile

import jax
from jax.experimental import topologies
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, NamedSharding, PartitionSpec


@dataclasses.dataclass(frozen=True)
class Target:
    """A GPU as XLA's compiler wants it described. Sizes in bytes."""

    name: str
    capability: tuple[int, int]
    shared_memory: int
    cores: int
    memory: int
    bandwidth: int

    def config(self, shared_memory: int | None = None) -> str:
        """The text of XLA's `GpuTargetConfigProto`."""
        major, minor = self.capability
        extension = " feature_extension: ACCELERATED_FEATURES" if major >= 9 else ""
        return f"""gpu_device_info {{
            threads_per_warp: 32 threads_per_block_limit: 1024 threads_per_core_limit: 2048 core_count: {self.cores}
            shared_memory_per_block: 49152 shared_memory_per_block_optin: {shared_memory or self.shared_memory}
            shared_memory_per_core: {self.shared_memory + 1024} fpus_per_core: 128
            registers_per_core_limit: 65536 registers_per_block_limit: 65536 l2_cache_size: 50000000
            block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
            thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
            clock_rate_ghz: 1.8 memory_bandwidth: {self.bandwidth} device_memory_size: {self.memory}
            cuda_compute_capability {{ major: {major} minor: {minor}{extension} }}
            name: "{self.name}" }}
            platform_name: "CUDA" device_description_str: "{self.name}" """


A100 = Target("NVIDIA A100", (8, 0), 163 << 10, 108, 80 << 30, 2_000_000_000_000)
H200 = Target("NVIDIA H200", (9, 0), 227 << 10, 132, 141 << 30, 4_800_000_000_000)
TARGETS = (A100, H200)


@dataclasses.dataclass(frozen=True)
class Kernel:
    """What ptxas says of one kernel. `notes` are the codes of its remarks, such as C7515 where it serialises wgmma."""

    name: str
    registers: int
    spill_stores: int
    spill_loads: int
    notes: tuple[str, ...]

    @property
    def spills(self) -> int:
        """Bytes of registers that are written to memory and read back."""
        return self.spill_stores + self.spill_loads


@dataclasses.dataclass(frozen=True)
class Compiled:
    """A compiled program, the kernels that ptxas saw, and the processor time of lowering and compiling, ptxas included.

    Processor time, because other work on the machine does not lengthen it.
    """

    program: jax.stages.Compiled
    kernels: tuple[Kernel, ...]
    seconds: float

    @property
    def temporary_bytes(self) -> int:
        """Memory besides arguments and results, by the compiler's own analysis."""
        return self.program.memory_analysis().temp_size_in_bytes


def lower(function, *arguments, gpu: str = H200.name) -> jax.stages.Lowered:
    """`function` lowered for a GPU of that name; the kernels inside are Triton IR."""
    with lowering_for(gpu):
        return jax.jit(function).trace(*arguments).lower(lowering_platforms=("cuda",))


def lowering_for(gpu: str) -> contextlib.AbstractContextManager:
    """The context in which JAX lowers for a GPU of that name."""
    return jax.sharding.use_abstract_mesh(_abstract_mesh(gpu))


def compile_for(target: Target, function, *arguments) -> Compiled:
    """`function` of arguments (anything with shape and dtype) compiled for `target`."""
    with _plugin_stderr() as log:
        start = _processor_seconds()
        program = _compile(_mesh(target, None), function, arguments)
        seconds = _processor_seconds() - start
    kernels = _kernels(log[0])
    if not kernels:
        raise RuntimeError("ptxas told nothing: the CUDA plugin was loaded before this module was imported.")
    return Compiled(program, kernels, seconds)


def devices(target: Target, shape: tuple[int, ...], names: tuple[str, ...]) -> jax.sharding.Mesh:
    """A mesh of several such GPUs on one host, to compile for; it takes as much as `jax.make_mesh`, with auto axes."""
    topology = topologies.get_topology_desc(
        platform="cuda", target_config=target.config(), topology=f"1x1x{math.prod(shape)}"
    )
    return topologies.make_mesh(topology, shape, names)


def shared_bytes(target: Target, function, *arguments) -> int:
    """Bytes of shared memory that the one kernel in `function` asks for.

    XLA tells them only when they are too many: so this compiles for a GPU that has next to none.
    """
    try:
        with _plugin_stderr():
            _compile(_mesh(target, 16), function, arguments)
    except jax.errors.JaxRuntimeError as error:
        found = re.search(r"[Ss]hared memory.*?requested[^\d]*(\d+)", str(error), re.S)
        if not found:
            raise
        return int(found[1])
    return 0


def triton_ir(lowered: jax.stages.Lowered) -> dict[str, str]:
    """{kernel name: Triton IR} of the Pallas kernels in a lowered program."""
    from jax.interpreters import mlir
    from jaxlib.mlir import ir
    from jaxlib.triton import dialect

    found = {}
    for attributes in _triton_calls(lowered.compiler_ir("stablehlo").operation):
        config = attributes["mhlo.backend_config"]
        context = mlir.make_ir_context()
        dialect.register_dialect(context)
        context.allow_unregistered_dialects = True
        with context:
            module = ir.Module.parse(ir.StringAttr(config["ir"]).value_bytes)
            found[ir.StringAttr(config["name"]).value] = str(module)
    return found


def _triton_calls(operation):
    for region in operation.regions:
        for block in region:
            for inner in block.operations:
                attributes = inner.operation.attributes
                if inner.operation.name == "stablehlo.custom_call" and "triton" in str(attributes["call_target_name"]):
                    yield attributes
                yield from _triton_calls(inner.operation)


def _abstract_mesh(gpu: str) -> AbstractMesh:
    try:
        device = AbstractDevice(gpu, 1, "cuda")
    except TypeError:  # before JAX 0.11 it knows no platform
        device = AbstractDevice(gpu, 1)
    return AbstractMesh((1,), ("device",), (AxisType.Auto,), abstract_device=device)


def _processor_seconds() -> float:
    return sum(os.times()[:4])


@functools.cache
def _mesh(target: Target, shared_memory: int | None):
    config = target.config(shared_memory)
    topology = topologies.get_topology_desc(platform="cuda", target_config=config, topology="1x1x1")
    return topologies.make_mesh(topology, (1,), ("device",))


def _compile(mesh, function, arguments):
    everywhere = NamedSharding(mesh, PartitionSpec())
    structs = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=everywhere), arguments)
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        return jax.jit(function).lower(*structs).compile()


def _kernels(log: str) -> tuple[Kernel, ...]:
    report = re.compile(
        r"Compiling entry function '(?P<name>\w+)'.*?(?P<stores>\d+) bytes spill stores, "
        r"(?P<loads>\d+) bytes spill loads.*?Used (?P<registers>\d+) registers",
        re.S,
    )
    found = []
    for m in report.finditer(log):
        notes = re.findall(rf"\((C\d+)\)[^\n]*function '{m['name']}'", log)
        found.append(
            Kernel(m["name"], int(m["registers"]), int(m["stores"]), int(m["loads"]), tuple(sorted(set(notes))))
        )
    return tuple(found)


@contextlib.contextmanager
def _plugin_stderr():
    """Yields a list that holds, afterwards, what was written to file descriptor 2, where compiled code writes."""
    sys.stderr.flush()
    saved, captured = os.dup(2), []
    with tempfile.TemporaryFile() as file:
        os.dup2(file.fileno(), 2)
        try:
            yield captured
        finally:
            sys.stderr.flush()
            os.dup2(saved, 2)
            os.close(saved)
            file.seek(0)
            captured.append(file.read().decode(errors="replace"))
