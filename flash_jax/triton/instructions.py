"""Single instructions of NVIDIA GPUs for which the compiler would emit several, and a tanh made of them."""

import functools
import struct

import jax
import jax.numpy as jnp
from jax.experimental.pallas import triton as plgpu

from flash_jax.spec import AttentionSpec
from flash_jax.tiles import tanh
from flash_jax.tiles.scores import PLAIN_ARITHMETIC, Arithmetic, Number
from flash_jax.triton.tiling import Tile

_BENT_AT_ONCE = 16  # numbers of a thread for which one branch decides
_SHRUNK_AT_ONCE = 32  # likewise


def arithmetic(spec: AttentionSpec) -> Arithmetic:
    """What a kernel of `spec` computes with; in interpret mode JAX's own functions, or what means the same.

    The compiler's exp2 scales arguments that would give a denormal number, before and after: three more instructions
    for each entry of a tile. Here such results are 0, as probabilities under 1e-38 may well be. And it fuses no
    multiplication with an addition of its own accord.
    """
    if spec.interpret:
        return PLAIN_ARITHMETIC._replace(fma=_fma_interpreted, fms=lambda a, b, c: _fma_interpreted(a, b, -c))
    return Arithmetic(_exp2, _fma, _fms, _shrunk, _bent, _tanh_slope)


def _exp2(x: jax.Array) -> jax.Array:
    return _elementwise("ex2.approx.ftz.f32 $0, $1;", x)


def _fma(a: Number, b: Number, c: Number) -> jax.Array:
    return _elementwise("fma.rn.f32 $0, $1, $2, $3;", a, b, c)


def _fms(a: Number, b: Number, c: Number) -> jax.Array:
    return _elementwise("{ .reg .f32 n; neg.f32 n, $3; fma.rn.f32 $0, $1, $2, n; }", a, b, c)


def _fma_interpreted(a: Number, b: Number, c: Number) -> jax.Array:
    """a * b + c without the rounding of the product, whose error is found by splitting the factors (Dekker, 1971)."""
    a, b = jnp.asarray(a, jnp.float32), jnp.asarray(b, jnp.float32)
    product, (a_high, a_low), (b_high, b_low) = a * b, _halves(a), _halves(b)
    error = ((a_high * b_high - product) + a_high * b_low + a_low * b_high) + a_low * b_low
    return product + c + jnp.where(jnp.isfinite(error), error, 0)


def _halves(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Two numbers of 12 bits that add up to x."""
    scaled = x * 4097.0
    high = scaled - (scaled - x)
    return high, x - high


def _shrunk(x: jax.Array, factor: jax.Array) -> jax.Array:
    instructions = _shrunk_assembly(_SHRUNK_AT_ONCE)
    return _elementwise(instructions, x, factor, pack=_SHRUNK_AT_ONCE, in_place=True)


def can_shrink(tile: Tile, columns: int) -> bool:
    """Whether each thread has as many numbers of [block_q, columns] as `Arithmetic.shrunk` takes at once."""
    return tile.block_q * columns >= _SHRUNK_AT_ONCE * 32 * tile.num_warps


@functools.cache
def _shrunk_assembly(count: int) -> str:
    """`count` numbers times factors in (0, 1], which are left alone if all of the factors are 1.

    No smaller number has all the bits of 1, so the factors are all 1 if, and only if, 1 is their conjunction. That of
    equal ones costs nothing, and where a factor is that of a row there are few others.
    """
    code, level = ["{", f".reg .b32 b<{2 * count}>;", ".reg .pred same;"], []
    for n in range(count):
        code.append(f"mov.b32 b{n}, ${2 * count + n};")
        level.append(f"b{n}")
    free = count
    while len(level) > 1:  # in pairs: x & x is x, and what was computed once is not computed again
        joined = []
        for x, y in zip(level[::2], level[1::2], strict=True):
            code.append(f"and.b32 b{free}, {x}, {y};")
            joined.append(f"b{free}")
            free += 1
        level = joined
    code += [f"setp.eq.b32 same, {level[0]}, 0x3F800000;", "@same bra DONE;"]
    code += [f"mul.f32 ${n}, ${n}, ${2 * count + n};" for n in range(count)]
    return "\n".join([*code, "DONE:", "}"])


def _tanh_slope(t: jax.Array) -> jax.Array:
    return _elementwise("{ .reg .f32 n; neg.f32 n, $1; fma.rn.f32 $0, n, $1, 0f3F800000; }", t)


def _bent(x: jax.Array, bend: tanh.Bend) -> jax.Array:
    return _elementwise(_bent_assembly(bend, _BENT_AT_ONCE), x, pack=_BENT_AT_ONCE)


def _bent_assembly(bend: tanh.Bend, count: int) -> str:
    """`tanh.bent` of `count` numbers; what is for those that are far from 0 is left out if there are none.

    The sign of w is that of a number near 0, so the signs of three at a time are joined. A NaN's is not.
    """
    xs, results = [f"${count + n}" for n in range(count)], [f"${n}" for n in range(count)]
    highest, *rest = map(_immediate, reversed(bend.polynomial))
    code = ["{", f".reg .f32 w<{count}>, y;", f".reg .b32 s, b<{count}>;", ".reg .pred far;"]
    for n, (x, result) in enumerate(zip(xs, results, strict=True)):
        code += [f"fma.rn.f32 w{n}, {x}, {x}, {_immediate(-bend.near)};", f"mov.b32 b{n}, w{n};"]
        totals = [highest, *[result] * (len(rest) - 1)]
        code += [f"fma.rn.f32 {result}, {total}, w{n}, {c};" for total, c in zip(totals, rest, strict=True)]
        code.append(f"fma.rn.f32 {result}, {result}, {x}, {_immediate(bend.offset)};")
    code.append("mov.b32 s, b0;")
    for n in range(1, count, 2):
        code.append(f"lop3.b32 s, s, b{n}, b{min(n + 1, count - 1)}, 0x80;")  # and
    code += ["setp.ge.s32 far, s, 0;", "@!far bra DONE;"]
    for n, (x, result) in enumerate(zip(xs, results, strict=True)):
        code += [f"mul.f32 y, {x}, {_immediate(bend.exponent)};", "ex2.approx.ftz.f32 y, y;"]
        code += [f"add.f32 y, y, {_immediate(1)};", "rcp.approx.ftz.f32 y, y;", f"setp.ge.s32 far, b{n}, 0;"]
        factor, one = _immediate(-2 * bend.outer), _immediate(bend.outer + bend.offset)
        code.append(f"@far fma.rn.f32 {result}, y, {factor}, {one};")
    return "\n".join([*code, "DONE:", "}"])


def _immediate(x: float) -> str:
    return f"0f{struct.pack('>f', x).hex().upper()}"


def _elementwise(instructions: str, *args: Number, pack: int = 1, in_place: bool = False) -> jax.Array:
    """`instructions`, in PTX, for each number of float32 arrays, or `pack` of them, broadcast to one shape.

    in_place: the results are where the first argument is.
    """
    shape = jnp.broadcast_shapes(*(jnp.shape(x) for x in args))
    results = ["=f"] if pack == 1 else ["=&f"] * pack  # some are written while others are still to be read
    inputs = ["f"] * (len(args) * pack)
    if in_place:
        inputs[:pack] = map(str, range(pack))
    return plgpu.elementwise_inline_asm(
        instructions,
        args=[jnp.broadcast_to(jnp.asarray(x, jnp.float32), shape) for x in args],
        constraints=",".join(results + inputs),
        pack=pack,
        result_shape_dtypes=[jax.ShapeDtypeStruct(shape, jnp.float32)],
    )[0]
