"""What a call asks for: the static choices (`AttentionSpec`) and the arrays that ride along (`Operands`)."""

import contextlib
import contextvars
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import jax

Band = tuple[int | None, int | None]
Optional: TypeAlias = Any  # a jax.Array or None; in and around a kernel, the block spec or ref in its place


@dataclasses.dataclass(frozen=True)
class BlockSizes:
    """Tile sizes and launch parameters of the GPU kernels; a field left at None comes from the built-in table.

    Args:
      block_q: rows of queries that one tile holds; a power of two, at least 16.
      block_kv: keys and values that one tile holds; a power of two, at least 16.
      num_warps: warps (of 32 threads) that work on one tile: 1, 2, 4, 8 or 16.
      num_stages: depth of the software pipeline that loads tiles ahead; at least 1.
      dq: sizes for the pass that computes query gradients; None means the table's.
      dkv: sizes for the pass that computes key and value gradients, by one kernel or two; None means the table's.
      tangent: sizes for the pass that computes tangents (`jax.jvp`); None means the table's.

    The four numbers hold for the forward pass, for both backward passes where `dq` and `dkv` are None, and where
    `tangent` is None for the tangent pass, cut to fit: it holds twice as much. `xla` reads `block_q` and `block_kv`
    only, where any positive size is right. Raises ValueError where a number is not one of the above.

    Example:
      >>> BlockSizes(block_q=64, block_kv=64, dkv=BlockSizes(block_q=32, block_kv=64, num_warps=8))
      BlockSizes(block_q=64, block_kv=64, num_warps=None, num_stages=None, dq=None, dkv=BlockSizes(block_q=32, \
block_kv=64, num_warps=8, num_stages=None, dq=None, dkv=None, tangent=None), tangent=None)
    """

    block_q: int | None = None
    block_kv: int | None = None
    num_warps: int | None = None
    num_stages: int | None = None
    dq: "BlockSizes | None" = None
    dkv: "BlockSizes | None" = None
    tangent: "BlockSizes | None" = None

    def __post_init__(self):
        for name in ("block_q", "block_kv", "num_warps", "num_stages"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise ValueError(f"`BlockSizes.{name}` must be a positive int or None; got {value!r}.")
        for name in ("dq", "dkv", "tangent"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, BlockSizes):
                raise TypeError(f"`BlockSizes.{name}` must be a BlockSizes or None; got {type(value).__name__}.")
            if value is not None and any(x is not None for x in (value.dq, value.dkv, value.tangent)):
                raise ValueError(
                    f"`BlockSizes.{name}` is for one pass, so it can have no dq, dkv or tangent of its own; "
                    f"got {value}."
                )


@functools.partial(jax.tree_util.register_dataclass, data_fields=["states"], meta_fields=["mask_mod", "shape"])
@dataclasses.dataclass(frozen=True)
class BlockMask:
    """Which blocks of scores a `mask_mod` leaves visible, made by `block_mask` and given to `flash_attention`.

    It is a pytree of one array, so that it passes through `jit` and is sharded like the batch.

    Attributes:
      states: int8 [..., H, blocks of queries, blocks of keys]: 0 where nothing of a block is allowed, 2 where all is,
        else 1. A block is 128 x 128; a dim before the blocks may be 1, for all examples or heads alike.
      mask_mod: the function of which this is the map, which `flash_attention` also takes if it is given none.
      shape: the shape [..., H, T, S] that `block_mask` was called with.
    """

    states: jax.Array
    mask_mod: Callable
    shape: tuple[int, ...]


MAP_BLOCK = 128
"""Queries, and keys, of one entry of a BlockMask."""


@dataclasses.dataclass(frozen=True, eq=False)
class Mod:
    """A `score_mod` or `mask_mod`, equal to itself alone: the user's function, and what it does to one entry.

    `jaxpr` takes the scalars (score, batch, head, q index, k index), a mask_mod's without the score, and reads operands
    by `tiles.mods.read_p`. `batch` and `heads` are what batch and head index count over.
    """

    function: Callable
    jaxpr: Any
    batch: tuple[int, ...]
    heads: int


@dataclasses.dataclass(frozen=True)
class AttentionSpec:
    """Every static choice of a call, hashable, the one static parameter of the primitives.

    `scale`, `q_offset`, `q_length`, `kv_length` and `prefix_length` are None where the value is an array in
    `Operands`; for `q_offset` None in both places means the default, kv length minus query length. `precision` is one
    of "ieee", "x3" and "tf32": how float32 operands are multiplied. `context_axis` is a mesh axis over which T and S
    are sharded, `context_strategy` how (a name) they are then attended. `whole` is (T, S) of sequences of which a
    device holds a part, None where it holds them whole.
    """

    scale: float | None = None
    softcap: float | None = None
    score_mod: Mod | None = None
    mask_mod: Mod | None = None
    causal: bool = False
    window: Band | None = None
    prefix_length: int | None = None
    chunk_size: int | None = None
    dropout_rate: float = 0.0
    q_offset: int | None = None
    q_length: int | None = None
    kv_length: int | None = None
    precision: str = "x3"
    implementation: str | None = None
    block_sizes: BlockSizes | None = None
    interpret: bool = False
    whole: tuple[int, int] | None = None
    context_axis: str | None = None
    context_strategy: str | None = None

    @property
    def band(self) -> Band:
        """(left, right): key j is in sight of query i iff -left <= pos(j) - pos(i) <= right; causal is right = 0."""
        left, right = self.window or (None, None)
        if self.causal:
            right = 0 if right is None else min(right, 0)
        return left, right


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Operands:
    """The optional arrays of a call, None where absent.

    Each begins with dims of the rank of the batch shape, of the batch's size or 1; its own dims follow. `scale`,
    `bias`, `alibi_slopes` and `sinks` are differentiable: float32 (float64 for float64 inputs), but for `bias`, which
    keeps its dtype, as do `mods`, differentiable where they are floating-point. Numbers of slots are int32. A dim of
    `bias`, `mask` and `block_map` has its full size or 1.
    """

    scale: Optional = None  # [...]
    bias: Optional = None  # [..., H, T, S]
    mask: Optional = None  # [..., H, T, S] bool
    alibi_slopes: Optional = None  # [..., H]
    sinks: Optional = None  # [..., H]
    q_offset: Optional = None  # [...]
    q_lengths: Optional = None  # [...]
    kv_lengths: Optional = None  # [...]
    prefix_lengths: Optional = None  # [...]
    q_positions: Optional = None  # [..., T]
    kv_positions: Optional = None  # [..., S]
    q_segment_ids: Optional = None  # [..., T]
    kv_segment_ids: Optional = None  # [..., S]
    dropout_words: Optional = None  # [..., H, 2] uint32, see tiles/dropout.py
    block_map: Optional = None  # [..., H, blocks of queries, blocks of keys] int8, see tiles/block_map.py
    mod_examples: Optional = None  # [...]: the batch and the head index of a mod, which count over all devices
    mod_heads: Optional = None  # [..., H]
    row_start: Optional = None  # [...]: of a part of a call, its first row and column in the whole (see parts.py)
    col_start: Optional = None  # [...]
    mods: tuple = ()  # what mods read: leading dims of size 1, then the user's own

    def items(self) -> list[tuple[str, Any]]:
        """(name, array) of all that are there; those in `mods` are called "mods.0", "mods.1", ..."""
        return [
            *((name, x) for name, x in vars(self).items() if name != "mods" and x is not None),
            *((f"mods.{n}", x) for n, x in enumerate(self.mods)),
        ]

    def map(self, f: Callable[[str, Any], Any]) -> "Operands":
        """With `f(name, array)` in the place of each array."""
        new = {name: f(name, x) for name, x in self.items()}
        mods = tuple(new.pop(f"mods.{n}") for n in range(len(self.mods)))
        return Operands(**new, mods=mods)


OWN_RANK = {
    "bias": 3, "mask": 3, "alibi_slopes": 1, "sinks": 1, "q_positions": 1, "kv_positions": 1, "q_segment_ids": 1,
    "kv_segment_ids": 1, "dropout_words": 2, "block_map": 3, "mod_heads": 1, "mod_examples": 0, "scale": 0,
    "q_offset": 0, "q_lengths": 0, "kv_lengths": 0, "prefix_lengths": 0, "row_start": 0, "col_start": 0,
}  # fmt: skip
"""Dims that an operand has besides the leading (batch) ones; those in `mods` may have any number."""


def leads(operands: Operands, count: int) -> list[tuple[int, ...]]:
    """The leading dims, `count` of them, of each operand that is there."""
    return [x.shape[:count] for _, x in operands.items()]


_interpret = contextvars.ContextVar("flash_jax_interpret", default=False)


@contextlib.contextmanager
def interpret_mode() -> Iterator[None]:
    """Within this context, calls that name a GPU implementation run it in Pallas interpret mode, on any platform.

    Meant for tests on machines without a GPU: the kernel's own code runs, slowly, as XLA operations. The mode is read
    when a call is traced and stays with what was traced, so a function that was jitted inside keeps it, and one that
    was already traced outside is not affected. It holds for this thread only; inside `jax.shard_map`, JAX's interpreter
    needs check_vma=False.

    Example:
      >>> import jax.numpy as jnp, flash_jax
      >>> x = jnp.ones((1, 8, 2, 16))
      >>> with flash_jax.interpret_mode():
      ...     flash_jax.flash_attention(x, x, x, implementation="triton").shape
      (1, 8, 2, 16)
    """
    token = _interpret.set(True)
    try:
        yield
    finally:
        _interpret.reset(token)


def interpreting() -> bool:
    """Whether `interpret_mode` is in force here."""
    return _interpret.get()
