"""What a call would run, and what its mask looks like: `explain` and `visualize_mask`. Nothing of it is computed."""

import inspect
import itertools
import math
import os
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.typing import ArrayLike

from flash_jax import arguments, compat, partition, select, validate
from flash_jax.arguments import Call
from flash_jax.explanation import Explanation, Target
from flash_jax.picture import MaskPicture
from flash_jax.spec import OWN_RANK, Operands
from flash_jax.tiles import survey
from flash_jax.tiles.reads import reads_of
from flash_jax.tiles.survey import DECIDING, Pairs
from flash_jax.triton import tiling
from flash_jax.triton.tiling import Tile

ArrayOrStruct: TypeAlias = ArrayLike | jax.ShapeDtypeStruct

_FALLBACK = 64  # tile size in pictures of calls that triton does not serve
_ENTRIES = 128  # lengths up to which a picture knows the single entries


def explain(
    query: ArrayOrStruct,
    key: ArrayOrStruct,
    value: ArrayOrStruct,
    bias: ArrayOrStruct | None = None,
    mask: ArrayOrStruct | None = None,
    *,
    return_lse: bool = False,
    **options: Any,
) -> Explanation:
    """What `flash_attention` would run for these arguments, and why not something else; it prints as a table.

    Takes the arguments of `flash_attention` and raises what it raises about them, but for a named implementation that
    does not serve the call, which is part of the answer. Nothing is computed of query, key and value.

    Args:
      query, key, value, bias, mask: arrays, or a `jax.ShapeDtypeStruct` in place of any.
      return_lse: makes no difference to what runs.
      options: the other arguments of `flash_attention`, by name, with a `jax.ShapeDtypeStruct` in place of any array,
        also of those in mod_operands and in a block_mask. Under `jit` traced ones are taken; what depends on values
        that are not there is reported as unknown.

    Raises:
      TypeError, ValueError, NotImplementedError: as `flash_attention` for arguments that are wrong.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from flash_jax import explain
      >>> x = jax.ShapeDtypeStruct((2, 4096, 8, 64), jnp.bfloat16)
      >>> found = explain(x, x, x, causal=True)
      >>> found.gpu.picked, found.pairs
      ('triton', Pairs(full=1984, partial=128, skipped=1984))
      >>> explain(x, x, x, implementation="mosaic_gpu").gpu.why_not["mosaic_gpu"]
      'the Mosaic GPU kernels are not part of this version'
    """
    given = {"query": query, "key": key, "value": value, "bias": bias, "mask": mask, **options}
    call, unknown = normalised("explain", return_lse, given)
    q, k, v, operands, spec = call
    with jax.ensure_compile_time_eval():
        default = jnp.zeros(())
    (device, *_), platform = default.devices(), compat.platform_of(default)
    tiles, misfit = _tiles(call)
    sharded = _sharding_reason(given)
    gpu = _target(compat.gpu_description()[0], "cuda", call, misfit, sharded)
    here = gpu if platform == "cuda" else _target(device.platform, platform, call, misfit, sharded)
    pairs, heads = None, 1 if operands.block_map is None else operands.block_map.shape[-3]
    if tiles and not unknown:
        pairs = _pairs(call, (tiles["forward"].block_q, tiles["forward"].block_kv), heads)
    rows, stats = math.prod(q.shape[:-1]), np.promote_types(q.dtype, np.float32)
    shapes = ", ".join(f"{name} {list(x.shape)}" for name, x in (("query", q), ("key", k), ("value", v)))
    return Explanation(
        call=f"{shapes}, {q.dtype.name}",
        named=spec.implementation,
        here=here,
        gpu=gpu,
        tiles=tiles,
        shared_bytes={name: tiling.sizer(name, spec, q, k, v, operands)(tile) for name, tile in tiles.items()},
        pairs=pairs,
        heads=heads,
        unknown=unknown,
        precision=spec.precision,
        residual_bytes={"out": rows * v.shape[-1] * q.dtype.itemsize, "lse": rows * stats.itemsize},
    )


def visualize_mask(  # noqa: PLR0913
    query: ArrayOrStruct,
    key: ArrayOrStruct,
    value: ArrayOrStruct,
    bias: ArrayOrStruct | None = None,
    mask: ArrayOrStruct | None = None,
    *,
    example: int = 0,
    head: int = 0,
    path: str | os.PathLike | None = None,
    return_lse: bool = False,
    **options: Any,
) -> MaskPicture:
    """Which tiles of scores the forward kernel computes whole, computes with a mask, and skips, as a picture.

    The judgement is the one that the kernels make. A dense `mask`, or a mask_mod without a block_mask, skips nothing
    and makes each tile partial; a bias of -inf is not looked at. All three count in the single entries, which are found
    where T and S are at most 128. What a score_mod makes -inf is not looked at, neither for tiles nor for entries.

    Args:
      query, key, value, bias, mask: arrays, or a `jax.ShapeDtypeStruct` in place of any.
      example: which example to draw, by its row-major index over the leading dims.
      head: which query head to draw; only a mask, a mask_mod, a block_mask or a bias of -inf makes heads differ.
      path: where to write a figure too, such as "mask.png"; this needs matplotlib.
      return_lse: makes no difference.
      options: the other arguments of `flash_attention`, by name. `block_sizes` sets the tiles; by default they are
        those of triton's forward pass (64 x 64 for calls that it does not serve).

    Raises:
      TypeError, ValueError, NotImplementedError: as `flash_attention`; ValueError also for an example or head that is
        not there, and for a `path` where the values that decide the picture are traced.
      ImportError: `path` is given, and matplotlib is not installed.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from flash_jax import BlockSizes, visualize_mask
      >>> x = jax.ShapeDtypeStruct((512, 8, 64), jnp.bfloat16)
      >>> print(visualize_mask(x, x, x, causal=True, block_sizes=BlockSizes(block_q=128, block_kv=64)))
      T = 512, S = 512, tiles of 128 x 64, example 0, head 0
      # 12 full, / 8 partial, . 12 skipped
      //......
      ##//....
      ####//..
      ######//
    """
    given = {"query": query, "key": key, "value": value, "bias": bias, "mask": mask, **options}
    call, unknown = normalised("visualize_mask", return_lse, given)
    q, k, _, operands, spec = call
    lead, lengths = q.shape[:-3], (q.shape[-3], k.shape[-3])
    _check_index("example", example, math.prod(lead))
    _check_index("head", head, q.shape[-2])
    blocks, found, allowed = _forward_blocks(call), None, None
    read = () if spec.mask_mod is None else sorted({x.operand for x in reads_of(spec.mask_mod)})
    dense = {name: getattr(operands, name) for name in ("bias", "mask")}
    dense |= {f"mod_operands[{n}]": operands.mods[n] for n in read}
    no_values = tuple(name for name, x in dense.items() if isinstance(x, jax.ShapeDtypeStruct))
    if not unknown:
        with jax.ensure_compile_time_eval():
            single = survey.of_example(operands, lead, example, head, () if no_values else ("bias", "mask"))
            found = survey.survey(single, spec, lengths, blocks, operands.mask is not None)
            if max(lengths) <= _ENTRIES and not no_values:
                tables = {n: operands.mods[n].reshape(operands.mods[n].shape[len(lead) :]) for n in read}
                allowed = survey.entries(single, spec, lengths, (example, head), tables)
    picture = MaskPicture(lengths, blocks, example, head, allowed, (*unknown, *no_values), found)
    if path is not None:
        picture.save(path)
    return picture


def normalised(name: str, return_lse: bool, given: dict[str, Any]) -> tuple[Call, tuple[str, ...]]:
    """The checked call, structs in place of what has no values, and of these the names that decide about tiles.

    Of query, key and value there are always structs. `name` is the function that was called, for its errors.
    """
    validate.flag("return_lse", return_lse)
    for option in given:
        if option not in inspect.signature(arguments.normalise).parameters:
            raise TypeError(f"{name}() got an unexpected keyword argument {option!r}")
    for key in ("query", "key", "value"):
        if isinstance(given[key], (jax.Array, np.ndarray)):
            given = {**given, key: jax.ShapeDtypeStruct(given[key].shape, jnp.result_type(given[key]))}
    leaves, structure = jax.tree.flatten(given)  # mod_operands is a tuple of arrays, a block_mask has one inside
    abstract = {n: x for n, x in enumerate(leaves) if isinstance(x, jax.ShapeDtypeStruct)}
    found = []

    def trace(abstract):
        call = arguments.normalise(**jax.tree.unflatten(structure, [abstract.get(n, x) for n, x in enumerate(leaves)]))
        operands = jax.tree.map(_struct_if_unknown, call.operands)
        found.append(call._replace(q=_struct(call.q), k=_struct(call.k), v=_struct(call.v), operands=operands))

    with jax.ensure_compile_time_eval():  # what has values keeps them, also inside a trace
        jax.eval_shape(trace, abstract)
    (call,) = found
    unknown = (n for n in DECIDING if isinstance(getattr(call.operands, n), jax.ShapeDtypeStruct))
    return call, tuple("block_mask" if n == "block_map" else n for n in unknown)


def _struct(x: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


def _struct_if_unknown(x: jax.Array) -> jax.Array | jax.ShapeDtypeStruct:
    return _struct(x) if isinstance(x, Tracer) or not x.is_fully_addressable else x


def _target(name: str, platform: str, call: Call, misfit: str | None, sharded: str | None) -> Target:
    q, _, v, _, spec = call
    why_not = {n: select.why_not(n, spec, q, v, platform) for n in validate.IMPLEMENTATIONS}
    why_not["triton"] = why_not["triton"] or misfit
    why_not = {n: reason if n == "reference" else reason or sharded for n, reason in why_not.items()}
    picked = select.preferred(spec, q, v, platform)
    return Target(name, why_not, picked if why_not[picked] is None else None)


def _tiles(call: Call) -> tuple[dict[str, Tile], str | None]:
    """Triton's tiles for each pass on an NVIDIA GPU, or none and the reason."""
    q, k, v, operands, spec = call
    reason = select.why_not("triton", spec, q, v, "cuda")
    if reason is not None:
        return {}, reason
    try:
        tiling.check_block_sizes(spec)
        return {name: tiling.tile_for(name, spec, q, k, v, operands) for name in tiling.PASSES}, None
    except ValueError as error:
        return {}, str(error)


def _forward_blocks(call: Call) -> tuple[int, int]:
    """The tile sizes of the forward pass: also those that the user gave and triton does not take."""
    tile, sizes = _tiles(call)[0].get("forward"), call.spec.block_sizes
    if tile is not None:
        return tile.block_q, tile.block_kv
    return (sizes and sizes.block_q) or _FALLBACK, (sizes and sizes.block_kv) or _FALLBACK


def _sharding_reason(given: dict[str, Any]) -> str | None:
    """Why nothing but the reference runs, where sequences are sharded over explicit mesh axes."""
    arrays = {n: given[n] for n in ("query", "key", "value") if isinstance(given[n], jax.Array)}
    try:
        partition.check_explicit(list(arrays), list(arrays.values()))
    except NotImplementedError as error:
        return str(error)
    return None


def _pairs(call: Call, blocks: tuple[int, int], heads: int) -> Pairs:
    """The pairs of tiles of all examples and so many heads; those that cannot differ are surveyed once."""
    lead, lengths = call.q.shape[:-3], (call.q.shape[-3], call.k.shape[-3])
    arrays = {name: np.asarray(x) for name in DECIDING if (x := getattr(call.operands, name)) is not None}
    examples = math.prod(lead)
    differ = any(math.prod(x.shape[: x.ndim - OWN_RANK[name]]) > 1 for name, x in arrays.items())
    total, masked = np.zeros(3, np.int64), call.operands.mask is not None
    with jax.ensure_compile_time_eval():
        for n, head in itertools.product(range(examples if differ else min(examples, 1)), range(heads)):
            one = survey.of_example(Operands(**arrays, mods=()), lead, n, head)
            total += survey.survey(one, call.spec, lengths, blocks, masked).pairs
    return Pairs(*(total * (1 if differ else examples)).tolist())


def _check_index(name: str, value: int, count: int) -> None:
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, (int, np.integer)):
        raise TypeError(f"`{name}` must be an int; got {type(value).__name__}.")
    if not 0 <= value < count:
        raise ValueError(f"`{name}` must be at least 0 and less than {count}, how many there are; got {value}.")
