"""The public function: what it promises, its checks, and the way from its arguments to a search."""

import dataclasses
import os
import warnings
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from flash_jax import validate
from flash_jax.arguments import Call
from flash_jax.inspect import ArrayOrStruct
from flash_jax.spec import BlockSizes
from flash_jax.triton import tiling
from flash_jax.triton.tiling import Tile
from flash_jax.tuning import checks, search
from flash_jax.tuning.cache import Cache, default_folder, key_of
from flash_jax.tuning.candidates import block_sizes, candidates, name_of, shared_bytes
from flash_jax.tuning.progress import Progress
from flash_jax.tuning.search import Found


def tune(  # noqa: PLR0913
    query: ArrayOrStruct,
    key: ArrayOrStruct,
    value: ArrayOrStruct,
    bias: ArrayOrStruct | None = None,
    mask: ArrayOrStruct | None = None,
    *,
    passes: tuple[str, ...] = ("forward", "dq", "dkv"),
    seconds: float = 60.0,
    cache: str | os.PathLike | None = "auto",
    progress: bool = True,
    return_lse: bool = False,
    **options: Any,
) -> BlockSizes:
    """Block sizes for calls like this one, found by timing candidates on the GPU that is there.

    Call it once, outside `jit`, with the arguments of a representative call, and give what it returns to
    `flash_attention` as `block_sizes`: it changes nothing else, so that what a call computes remains a function of the
    call. Candidates are tiles around the table's own that fit the GPU; each must give the results of the table's but
    for rounding before it is timed, and the table's is kept unless another is faster by more than the noise.

    Args:
      query: [..., T, H, D], an array, or a `jax.ShapeDtypeStruct`, for which random data are made.
      key: [..., S, K, D], likewise.
      value: [..., S, K, Dv], likewise.
      bias: broadcastable to [..., H, T, S], likewise. A bias with entries for each query and key is timed with its
        gradient, for which sizes of "dq" hold, too.
      mask: broadcastable to [..., H, T, S], bool, likewise.
      passes: which kernels to tune, of "forward", "dq" and "dkv" (the two of the backward pass) and "tangent" (that of
        `jax.jvp`). Others keep the table's sizes.
      seconds: about how long to search, in all. Compiling the table's own tiles is not cut short.
      cache: a folder in which what was found is kept, and looked for before a search; "auto" is `flash_jax` in the
        user's cache folder (`$XDG_CACHE_HOME` or `~/.cache`, on macOS `~/Library/Caches`, on Windows `%LOCALAPPDATA%`);
        None for none. What was found in fewer `seconds` is searched for again, unless all candidates were tried.
      progress: shows a bar on stderr, where tqdm is installed, and what was found for each pass.
      return_lse: makes no difference.
      options: the other arguments of `flash_attention`, by name, but for `block_sizes` and `context_axis`, and
        `implementation` None or "triton". Floating-point and bool ones may be a `jax.ShapeDtypeStruct`; the values of
        lengths, positions and ids decide what is computed, and are needed.

    Returns:
      A `BlockSizes` with the sizes of each pass; those of a pass for which the table's are best, or which is not among
      `passes`, are left at None, which means the table's.

    Raises:
      TypeError, ValueError, NotImplementedError: as `flash_attention` for arguments that are wrong.
      TypeError: inside `jit` or another transformation.
      ValueError: `passes`, `seconds`, `implementation` or `block_sizes` other than above; arrays that lie on several
        devices; nothing to compute; a `jax.ShapeDtypeStruct` in place of what must have values.
      NotImplementedError: the arrays, or those made for structs, do not lie on an NVIDIA GPU that "triton" serves.
      RuntimeError: a candidate has left the GPU unusable.

    What of the table's own sizes fails to compile or run is raised as `flash_attention` would.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from flash_jax import flash_attention, tune
      >>> x = jax.ShapeDtypeStruct((2, 1024, 8, 64), jnp.bfloat16)
      >>> sizes = None  # the table's, where there is no GPU
      >>> if jax.default_backend() == "gpu":
      ...     sizes = tune(x, x, x, causal=True, progress=False)
      >>> q = jnp.ones((2, 1024, 8, 64), jnp.bfloat16)
      >>> flash_attention(q, q, q, causal=True, block_sizes=sizes).shape
      (2, 1024, 8, 64)
    """
    given = {"query": query, "key": key, "value": value, "bias": bias, "mask": mask, **options}
    checks.own_arguments(passes, seconds, cache)
    shown, seconds = Progress(validate.flag("progress", progress)), float(seconds)
    call = checks.call(given, return_lse)
    gpu = checks.gpu(call, query)
    store, keys = Cache(_folder(cache)), {name: key_of(name, call, gpu) for name in passes}
    limit = tiling.shared_limit(gpu.capability)
    kept = {name: store.load(found, seconds) for name, found in keys.items()}
    tiles = {name: x[0] for name, x in kept.items() if x is not None and _fits(name, call, x[0], limit)}
    for name, tile in tiles.items():
        shown.line(f"{name}: {'the table' if tile is None else name_of(tile)}, from the cache")
    left = {name: _to_try(name, call, limit) for name in passes if name not in tiles}
    if left:
        try:
            found = search.search(_with_values(call, given), left, seconds, shown)
        finally:
            shown.close()
        for name, one in found.items():
            shown.line(_line(name, one))
            _warn_of_differing(name, one)
            store.store(keys[name], one, seconds)
            tiles[name] = one.tile
    return block_sizes(tiles)


def _folder(cache: str | os.PathLike | None) -> Path | None:
    """The folder that `cache` names."""
    if cache != "auto":
        return None if cache is None else Path(cache).expanduser()
    try:
        return default_folder()
    except RuntimeError as error:  # there is no home
        warnings.warn(f"flash_jax.tune: nothing is kept, as there is no cache folder: {error}.", stacklevel=3)
        return None


def _fits(name: str, call: Call, tile: Tile | None, limit: int) -> bool:
    """Whether a tile of the cache is one that this very call takes."""
    if tile is None:
        return True
    try:
        tiling.check_block_sizes(dataclasses.replace(call.spec, block_sizes=block_sizes({name: tile})))
    except ValueError:
        return False
    return shared_bytes(name, call, tile) <= limit


def _to_try(name: str, call: Call, limit: int) -> tuple[Tile, list[Tile]]:
    """(the table's tile, the others)."""
    q, k, v, operands, spec = call
    own = tiling.tile_for(name, spec, q, k, v, operands)
    return own, candidates(name, call, own, limit)


def _with_values(call: Call, given: dict[str, Any]) -> Call:
    """The call with arrays: those given, and random ones for structs, all on the device of the query."""
    keys = iter(jax.random.split(jax.random.key(11), 3 + len(call.operands.items())))

    def filled(_, x):
        key = next(keys)
        if not isinstance(x, jax.ShapeDtypeStruct):
            return x
        if x.dtype == jnp.bool_:
            return jax.random.bernoulli(key, 0.9, x.shape)
        return jax.random.normal(key, x.shape, x.dtype) if x.dtype != jnp.uint32 else jax.random.bits(key, x.shape)

    names = ("query", "key", "value")
    structs = [given[name] if isinstance(given[name], jax.ShapeDtypeStruct) else None for name in names]
    q, k, v = (jnp.asarray(given[n]) if x is None else filled(n, x) for n, x in zip(names, structs, strict=True))
    (device,) = q.devices()
    q, k, v, operands = jax.device_put((q, k, v, call.operands.map(filled)), device)
    return Call(q, k, v, operands, call.spec)


def _line(name: str, found: Found) -> str:
    """What a search came to, in words."""
    others = f"{found.tried} others tried" if found.complete else f"{found.tried} others tried before time was up"
    counts = f"{others}, {len(found.failed)} failed, {len(found.differing)} with other results"
    own = f"the table's {name_of(found.own)}"
    if found.tile is None:
        return f"{name}: {own}, {found.own_ms:.4g} ms ({counts})"
    return f"{name}: {name_of(found.tile)}, {found.ms:.4g} ms, {own} {found.own_ms:.4g} ms ({counts})"


def _warn_of_differing(name: str, found: Found) -> None:
    for tile, reason in found.differing.items():
        warnings.warn(
            f"flash_jax.tune: the {name} pass with the tile {name_of(tile)} gives other results, and is not used "
            f"({reason}). This is a fault of a kernel or of its compiler; please report it.",
            stacklevel=3,
        )
