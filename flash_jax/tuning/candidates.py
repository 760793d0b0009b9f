"""Which tiles are worth a try: those around the table's that fit a GPU's shared memory and a thread's registers."""

import dataclasses
import itertools

from flash_jax.arguments import Call
from flash_jax.spec import BlockSizes
from flash_jax.triton import tiling
from flash_jax.triton.tiling import Tile

_BLOCKS = (16, 32, 64, 128)
_WARPS = (4, 8)
_STAGES = (1, 2, 3, 4)
_FAR = 4.0  # by `distance`: further from the table's tile, none is tried
_REGISTERS = 255  # that a thread may have
_PARTS = {2: 1, 4: 3}  # registers for each accumulator by bytes of an operand: products of float32 take them in parts


def candidates(name: str, call: Call, own: Tile, limit: int) -> list[Tile]:
    """Tiles for pass `name` besides the table's `own`, likeliest first, that fit `limit` bytes of shared memory.

    Blocks are not longer than the sequences. Nothing is compiled to find out.
    """
    widths = tiling.padded(call.q.shape[-1]), tiling.padded(call.v.shape[-1])
    rows = [n for n in _BLOCKS if n <= tiling.padded(call.q.shape[-3])]
    keys = [n for n in _BLOCKS if n <= tiling.padded(call.k.shape[-3])]
    found = [Tile(*numbers) for numbers in itertools.product(rows, keys, _WARPS, _STAGES)]
    near = [
        tile
        for tile in found
        if tile != own
        and distance(tile, own) <= _FAR
        and registers(name, tile, widths, call.q.dtype.itemsize) < _REGISTERS
        and shared_bytes(name, call, tile) <= limit
    ]
    return sorted(near, key=lambda tile: distance(tile, own))


def registers(name: str, tile: Tile, widths: tuple[int, int], itemsize: int) -> float:
    """Accumulators a thread holds, in 32-bit registers: what decides whether a kernel spills. `widths` are D and Dv."""
    q, kv, (D, Dv) = tile.block_q, tile.block_kv, widths
    keys = max(D, Dv) if tiling.apart(widths, itemsize) else D + Dv
    held = {
        "forward": q * Dv + q * kv,
        "dq": q * D + 2 * q * kv,
        "dkv": kv * keys + 2 * q * kv,
        "tangent": q * Dv + 2 * q * kv,
        "dbias": 3 * q * kv,
    }[name]
    return held / (32 * tile.num_warps) * _PARTS[itemsize]


def shared_bytes(name: str, call: Call, tile: Tile) -> int:
    """Shared memory of the kernels for which sizes of pass `name` hold in this call, at most."""
    q, k, v, operands, spec = call
    return max(tiling.sizer(kernel, spec, q, k, v, operands)(tile) for kernel in _kernels(name, call))


def _kernels(name: str, call: Call) -> tuple[str, ...]:
    """The names by which `tile_for` is asked for sizes of a pass: the gradient of a bias or of a mod has dq's."""
    if name != "dq":
        return (name,)
    if has_dense_bias(call):
        return "dq", "stored", "partial", "dbias"
    return ("dq", "dbias") if call.spec.score_mod is not None and call.operands.mods else ("dq",)


def has_dense_bias(call: Call) -> bool:
    """Whether there is a bias with an entry for each query and key, whose gradient is found by dq's sizes."""
    return call.operands.bias is not None and 1 not in call.operands.bias.shape[-2:]


def distance(x: Tile, y: Tile) -> float:
    """How far two tiles are apart, in halvings and doublings; a stage counts half."""
    powers = ("block_q", "block_kv", "num_warps")
    steps = sum(abs(getattr(x, n).bit_length() - getattr(y, n).bit_length()) for n in powers)
    return steps + 0.5 * abs(x.num_stages - y.num_stages)


def name_of(tile: Tile) -> str:
    """128x64w8s3: 128 query rows, 64 keys, 8 warps, 3 stages."""
    return f"{tile.block_q}x{tile.block_kv}w{tile.num_warps}s{tile.num_stages}"


def block_sizes(tiles: dict[str, Tile | None]) -> BlockSizes:
    """The sizes that give each pass its tile, and the table's to a pass that has None or is not there.

    An empty `BlockSizes` in the place of one for a pass keeps the forward pass's numbers out of it.
    """
    found = {name: BlockSizes() for name in tiling.PASSES}
    found |= {name: BlockSizes(**dataclasses.asdict(tile)) for name, tile in tiles.items() if tile is not None}
    return dataclasses.replace(found.pop("forward"), **found)
