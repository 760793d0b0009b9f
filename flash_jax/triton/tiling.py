"""Tile sizes and launch parameters: the table, the user's overrides, and whether they fit the GPU."""

import dataclasses
import functools
import math
from collections.abc import Callable

import jax

from flash_jax import compat
from flash_jax.spec import AttentionSpec, BlockSizes, Operands
from flash_jax.tiles import ranges
from flash_jax.tiles.reads import reads_of

PASSES = ("forward", "dq", "dkv", "tangent")
_STORED = {"stored": 2, "partial": 4, "paired": 4}  # bytes of an entry of dS, laid out in shared memory to be stored
_MIN_BLOCK = 16  # the smallest dim of a product that Triton takes

# Shared memory that one program may use, in KiB, by compute capability (CUDA programming guide, technical
# specifications).
_SHARED_KIB = {"8.0": 163, "8.6": 99, "8.7": 163, "8.9": 99, "9.0": 227, "10.0": 227, "10.3": 227, "11.0": 227}
_SHARED_KIB_OTHER = 99  # 12.x, what is not known yet, and programs exported for whatever GPU will run them


@dataclasses.dataclass(frozen=True)
class Tile:
    """What one program of a pass works on; see `BlockSizes` for the fields."""

    block_q: int
    block_kv: int
    num_warps: int
    num_stages: int


# (pass, head dim padded to a power of two, bytes per element) -> tile. Chosen from runs on an H200 and from the
# registers and spills that the compile lane prints; benchmarks/NOTES.md has the history. A narrower head dim takes the
# row of 64. The rows of "tangent" are by registers and spills alone: no others have been timed.
_TABLE = {
    ("forward", 64, 2): Tile(128, 64, 4, 3),
    ("forward", 128, 2): Tile(128, 64, 4, 2),
    ("forward", 256, 2): Tile(128, 64, 8, 2),
    ("dq", 64, 2): Tile(64, 64, 4, 2),
    ("dq", 128, 2): Tile(64, 64, 4, 2),
    ("dq", 256, 2): Tile(128, 32, 8, 2),
    ("dkv", 64, 2): Tile(64, 64, 4, 3),
    ("dkv", 128, 2): Tile(64, 64, 4, 2),
    ("dkv", 256, 2): Tile(32, 128, 8, 3),
    ("dbias", 64, 2): Tile(128, 128, 8, 1),
    ("dbias", 128, 2): Tile(128, 128, 8, 1),
    ("partial", 128, 2): Tile(64, 32, 4, 3),  # so that two programs have room on a multiprocessor
    ("paired", 64, 2): Tile(64, 64, 4, 2),
    ("paired", 128, 2): Tile(64, 32, 4, 3),
    ("tangent", 64, 2): Tile(64, 64, 4, 3),
    ("tangent", 128, 2): Tile(128, 64, 8, 2),
    ("tangent", 256, 2): Tile(64, 32, 4, 2),
    ("forward", 64, 4): Tile(64, 32, 4, 2),
    ("forward", 128, 4): Tile(64, 32, 4, 2),
    ("forward", 256, 4): Tile(16, 32, 8, 2),
    ("dq", 64, 4): Tile(64, 32, 4, 2),
    ("dq", 128, 4): Tile(32, 32, 8, 2),
    ("dq", 256, 4): Tile(16, 16, 8, 1),
    ("dkv", 64, 4): Tile(32, 64, 8, 2),
    ("dkv", 128, 4): Tile(32, 32, 8, 2),
    ("dkv", 256, 4): Tile(16, 16, 8, 1),
    ("tangent", 64, 4): Tile(64, 32, 4, 2),
    ("tangent", 128, 4): Tile(16, 32, 8, 2),
    ("tangent", 256, 4): Tile(16, 16, 8, 2),
}

# The rows that differ where a tile of bias or mask is held beside the scores, where ids or positions are, and where
# what a score_mod or mask_mod reads is (those by spills alone: not timed yet).
_TABLE_DENSE = {("forward", 128, 2): Tile(128, 32, 4, 3), ("tangent", 128, 2): Tile(128, 32, 8, 2)}
_TABLE_SCANNED = {("forward", 128, 2): Tile(64, 64, 4, 3)}
_TABLE_MOD = {
    ("forward", 128, 2): Tile(64, 64, 4, 3),
    ("dkv", 64, 2): Tile(32, 64, 4, 2),
    ("dkv", 128, 2): Tile(32, 64, 4, 2),
    ("tangent", 64, 2): Tile(64, 64, 4, 2),
    ("tangent", 128, 2): Tile(64, 32, 4, 2),
}

# The rows that differ where scores are plain, so that a kernel needs the fewest registers: always; with more than
# `_LONG` that stream past, with more than `_FEW` and without any band, and with more than `_LONG` without a band; in
# chunks or a window of at most `_SHORT`; and where there are no more than that of queries and of keys. Not where a last
# tile would take the memory of one more stage, or the GPU has too little.
_LONG, _FEW, _SHORT = 8192, 1024, 512
_TABLE_PLAIN = {("dq", 256, 2): Tile(128, 64, 8, 1)}
_TABLE_LONG = {("dq", 128, 2): Tile(128, 32, 8, 3), ("dkv", 128, 2): Tile(64, 128, 8, 3)}
_TABLE_WHOLE = {("forward", 64, 2): Tile(64, 128, 4, 3), ("dkv", 128, 2): Tile(64, 128, 8, 3)}
_TABLE_LONG_WHOLE = {
    ("forward", 128, 2): Tile(128, 128, 8, 3),
    ("dq", 64, 2): Tile(64, 64, 4, 3),
    ("dkv", 128, 2): Tile(32, 64, 4, 3),
}
_TABLE_BANDED = {("forward", 128, 2): Tile(64, 64, 4, 3)}
_TABLE_SHORT = {("forward", 64, 2): Tile(64, 64, 4, 3), ("dkv", 64, 2): Tile(32, 64, 4, 3)}

# The rows that differ on GPUs of compute capability 8.x, which multiply from registers, so that a tile needs more of
# them, and have less shared memory.
_TABLE_8 = {
    ("forward", 128, 2): Tile(128, 64, 8, 3),
    ("forward", 256, 2): Tile(64, 64, 8, 2),
    ("dkv", 128, 2): Tile(64, 64, 8, 3),
    ("dq", 256, 2): Tile(64, 32, 4, 2),
    ("dkv", 256, 2): Tile(64, 32, 8, 2),
    ("dbias", 64, 2): Tile(64, 64, 4, 2),
    ("dbias", 128, 2): Tile(64, 64, 4, 2),
    ("dkv", 64, 4): Tile(16, 64, 4, 2),
    ("forward", 128, 4): Tile(32, 32, 4, 2),
    ("dq", 64, 4): Tile(32, 32, 4, 2),
    ("tangent", 64, 2): Tile(64, 64, 4, 2),
    ("tangent", 128, 2): Tile(128, 32, 8, 2),
    ("tangent", 256, 2): Tile(64, 16, 8, 2),
    ("tangent", 64, 4): Tile(16, 32, 4, 2),
    ("tangent", 256, 4): Tile(16, 16, 8, 1),
}

# And of these the rows that differ with a softcap, whose two ways to a tanh need still more registers.
_TABLE_8_SOFTCAP = {("dkv", 64, 2): Tile(32, 64, 4, 3)}


def tile_for(name: str, spec: AttentionSpec, q: jax.Array, k: jax.Array, v: jax.Array, operands: Operands) -> Tile:
    """The tile of pass `name`: the user's sizes where given, else the table's, cut to fit.

    Besides `PASSES` there are "dbias", and "stored", "partial" and "paired", which are dq with dS stored (see
    `_STORED`), the last of two examples.
    A pure function of shapes, dtype, options and device, so results are the same on every run. Raises ValueError where
    sizes that the user gave for this pass do not fit the GPU's shared memory.
    """
    widths = padded(q.shape[-1]), padded(v.shape[-1])
    itemsize = q.dtype.itemsize
    device, capability = ("interpret mode", None) if spec.interpret else compat.gpu_description()
    chosen = _overrides(spec.block_sizes, name)
    key = name, max(64, *widths), itemsize
    row, (T, S) = _row(capability, key, operands), (q.shape[-3], k.shape[-3])
    if spec.softcap is not None and _is_ampere(capability):
        row = _TABLE_8_SOFTCAP.get(key, row)
    plain = not _is_ampere(capability) and _is_plain(spec, operands)

    def cut(row: Tile) -> Tile:
        blocks = {"block_q": min(row.block_q, padded(T)), "block_kv": min(row.block_kv, padded(S))}
        return dataclasses.replace(row, **(blocks | chosen))

    tiles = [cut(x) for x in (*(_rows_for_plain(key, spec, q, k) if plain else ()), row)]
    if spec.interpret:
        return tiles[0]
    limit = shared_limit(capability)
    size = sizer(name, spec, q, k, v, operands)
    tile = next((tile for tile in tiles if size(tile) <= limit), tiles[-1])
    needed = size(tile)
    inherited = name == "tangent" and spec.block_sizes is not None and spec.block_sizes.tangent is None
    if needed > limit and chosen and not inherited:
        smaller = _shrink(tile, size, limit)
        raise ValueError(
            f"`block_sizes` for the {name} pass needs about {needed / 1024:.0f} KiB of shared memory, and {device} has "
            f"{limit // 1024} KiB; try block_q={smaller.block_q}, block_kv={smaller.block_kv}, "
            f"num_stages={smaller.num_stages}."
        )
    return _shrink(tile, size, limit)


def pairs_fit(spec: AttentionSpec, q: jax.Array, k: jax.Array, v: jax.Array, operands: Operands) -> bool:
    """Whether a program of dq may have the queries of two examples: where the table has a tile for it, and room.

    Not where the user gave sizes, which are meant for one example.
    """
    capability = None if spec.interpret else compat.gpu_description()[1]
    tile = _TABLE.get(("paired", max(64, padded(q.shape[-1]), padded(v.shape[-1])), q.dtype.itemsize))
    if tile is None or _is_ampere(capability) or _overrides(spec.block_sizes, "dq"):
        return False
    return spec.interpret or sizer("paired", spec, q, k, v, operands)(tile) <= shared_limit(capability)


def _is_plain(spec: AttentionSpec, operands: Operands) -> bool:
    """Whether a kernel has next to nothing but products and exponentials to compute."""
    mods, bent = operands.mod_heads is not None, spec.softcap is not None or spec.dropout_rate > 0
    return not (mods or bent or _dense(operands) or ranges.is_scanned(operands))


def _rows_for_plain(key: tuple[str, int, int], spec: AttentionSpec, q: jax.Array, k: jax.Array) -> list[Tile]:
    """The rows for plain scores, the one to prefer first."""
    name, (T, S), (left, right) = key[0], (q.shape[-3], k.shape[-3]), spec.band
    open_left = left is None and spec.chunk_size is None
    whole = open_left and right is None
    streamed = T if name == "dkv" else S
    long = open_left and streamed > _LONG
    narrow = spec.chunk_size is not None or (left is not None and right is not None and left + right < _SHORT)
    tables = (
        (long and whole, _TABLE_LONG_WHOLE),
        (long, _TABLE_LONG),
        (whole and streamed > _FEW, _TABLE_WHOLE),
        (narrow, _TABLE_BANDED),
        (max(T, S) <= _SHORT, _TABLE_SHORT),
        (T > 64, _TABLE_PLAIN),
    )
    rows = [table[key] for applies, table in tables if applies and key in table]
    length = _ragged(name, spec, q, k)
    return [x for x in rows if length is None or length % (x.block_q if name == "dkv" else x.block_kv) == 0]


def _is_ampere(capability: str | None) -> bool:
    return (capability or "").startswith("8.")


def apart(widths: tuple[int, int], itemsize: int) -> bool:
    """Whether dk and dv are the work of a kernel each, whose tiles can be larger than those of one for both.

    `widths` are the padded head dims.
    """
    return max(widths) > 128 and itemsize == 2


def shared_limit(capability: str | None) -> int:
    """Bytes of shared memory that one program may use, by compute capability (None: not known)."""
    return _SHARED_KIB.get(capability or "unknown", _SHARED_KIB_OTHER) * 1024


def sizer(
    name: str, spec: AttentionSpec, q: jax.Array, k: jax.Array, v: jax.Array, operands: Operands
) -> Callable[[Tile], int]:
    """`shared_bytes` of pass `name` of this call, as a function of the tile."""
    widths = padded(q.shape[-1]), padded(v.shape[-1])
    moving = name == "tangent"
    length, dense = _ragged(name, spec, q, k), _dense(operands, twice=moving) + _gathered(spec, twice=moving)
    in_closed_form = operands.mask is None and spec.mask_mod is None and not ranges.is_scanned(operands)
    return functools.partial(
        shared_bytes,
        name,
        widths=widths,
        itemsize=q.dtype.itemsize,
        length=length,
        dense=dense,
        over_heads=q.shape[-2] > k.shape[-2] and in_closed_form,
        capability=None if spec.interpret else compat.gpu_description()[1],
    )


def _ragged(name: str, spec: AttentionSpec, q: jax.Array, k: jax.Array) -> int | None:
    """The length along which a pass streams, where its last tile may be a loop of its own, of one step known now."""
    if spec.band != (None, None):
        return None
    given, whole = (spec.q_length, q.shape[-3]) if name == "dkv" else (spec.kv_length, k.shape[-3])
    return whole if given is None else given


def _dense(operands: Operands, twice: bool = False) -> int:
    """Bytes that bias (its tangent too, if `twice`) and mask have for each entry of a tile."""
    arrays = (operands.bias, operands.bias if twice else None, operands.mask)
    return sum(x.dtype.itemsize for x in arrays if x is not None and 1 not in x.shape[-2:])


def _gathered(spec: AttentionSpec, twice: bool = False) -> int:
    """Bytes that mods, by reads with an index for each entry of a tile, load for it (tangents too, if `twice`)."""
    reads = [read for mod in (spec.score_mod, spec.mask_mod) if mod is not None for read in reads_of(mod)]
    return (8 if twice else 4) * sum(read.kind not in ("rows", "columns") for read in reads)


def _row(capability: str | None, key: tuple[str, int, int], operands: Operands) -> Tile:
    """The table's row for a GPU; passes beside the three have that of dq where they have none of their own."""
    ampere = _is_ampere(capability)
    if operands.mod_heads is not None:
        own = _TABLE_MOD
    elif ampere:
        own = {}
    elif _dense(operands):
        own = _TABLE_DENSE
    else:
        own = _TABLE_SCANNED if ranges.is_scanned(operands) else {}
    tables = [own, *([_TABLE_8] if ampere else []), _TABLE]
    found = next((table[key] for table in tables if key in table), None)
    return _row(capability, ("dq", *key[1:]), operands) if found is None else found


def padded(n: int) -> int:
    """n as Triton holds it: a power of two, at least 16."""
    return max(_MIN_BLOCK, 1 << math.ceil(math.log2(n))) if n > 1 else _MIN_BLOCK


def shared_bytes(  # noqa: PLR0913
    name: str,
    tile: Tile,
    widths: tuple[int, int],
    itemsize: int,
    length: int | None = None,
    dense: int = 0,
    over_heads: bool = False,
    capability: str | None = None,
) -> int:
    """Bytes of shared memory that a pass asks for, at most: tiles that stay, and `num_stages` of those that stream.

    `length` is that along which they stream, where it is not cut by a mask: if it is no multiple of the tile, the last
    one is loaded beside the loop's. `dense` are the bytes of bias, mask and mods that each entry reads. `over_heads` is
    whether dkv has a loop over heads around that over tiles, of which the compiler may know that it has one step. The
    compile lane holds this against what the compiler asks for.
    """
    D, Dv = widths
    stay, stream = (tile.block_kv, tile.block_q) if name == "dkv" else (tile.block_q, tile.block_kv)
    staying = stay * {"forward": D, "tangent": 2 * D, "paired": 2 * (D + Dv)}.get(name, D + Dv) * itemsize
    whole, rest = (0, 0) if length is None else divmod(length, stream)
    stages = tile.num_stages + (rest > 0)
    if name == "dkv" and over_heads and whole == 1 and rest > 0 and tile.num_stages > 1:
        # The loop over heads is pipelined in its place, with both tiles, and P has a place of its own.
        stages = max(stages, 2 * (tile.num_stages - _is_ampere(capability)))
        staying += tile.block_q * tile.block_kv * itemsize
    arrays = 2 if name in ("tangent", "paired") else 1  # keys and values, and their tangents or another example's ...
    if tile.num_stages == 1 and (itemsize == 2 or tile.block_q < 64):
        arrays = 1  # ... which without a pipeline are not all there at once, but for warp groups' three TF32 products
    streaming = stages * (stream * arrays * (D + Dv) * itemsize + tile.block_q * tile.block_kv * dense)
    if itemsize == 4:  # a product of three TF32 ones has what stays in two parts
        staying *= 2
    if name == "dkv":
        streaming += (stages + 1) * stream * 8  # lse and delta
        if itemsize == 2 and tile.num_stages == 1:  # without a pipeline one of the two is kept in a second layout
            streaming += stream * max(D, Dv) * itemsize
    return staying + streaming + tile.block_q * tile.block_kv * _STORED.get(name, 0)


def _shrink(tile: Tile, size: Callable[[Tile], int], limit: int) -> Tile:
    """The tile with fewer stages, then with smaller blocks, until its `size` is within the limit."""
    while size(tile) > limit:
        if tile.num_stages > 1:
            tile = dataclasses.replace(tile, num_stages=tile.num_stages - 1)
        elif tile.block_kv >= tile.block_q and tile.block_kv > _MIN_BLOCK:
            tile = dataclasses.replace(tile, block_kv=tile.block_kv // 2)
        elif tile.block_q > _MIN_BLOCK:
            tile = dataclasses.replace(tile, block_q=tile.block_q // 2)
        else:
            return tile
    return tile


def _overrides(sizes: BlockSizes | None, name: str) -> dict[str, int]:
    """The fields that the user gave for pass `name`."""
    if sizes is not None and name != "forward":
        sizes = getattr(sizes, name if name in PASSES else "dq") or sizes
    if sizes is None:
        return {}
    return {f.name: value for f in dataclasses.fields(Tile) if (value := getattr(sizes, f.name)) is not None}


def check_block_sizes(spec: AttentionSpec) -> None:
    """Raises ValueError for sizes that no GPU takes: not a power of two, blocks under 16, more than 16 warps."""
    for name in PASSES:
        for field, value in _overrides(spec.block_sizes, name).items():
            if field == "num_stages":
                continue
            low, high = (1, 16) if field == "num_warps" else (_MIN_BLOCK, math.inf)
            if value & (value - 1) or not low <= value <= high:
                bounds = "from 1 to 16" if field == "num_warps" else f"of at least {_MIN_BLOCK}"
                raise ValueError(
                    f"`block_sizes`: {field} of the {name} pass must be a power of two {bounds} for 'triton'; "
                    f"got {value}."
                )
