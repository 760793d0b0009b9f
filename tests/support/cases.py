"""Shapes written as test ids, such as `B2-T63-S100-H8-K2-D80-bf16`, and the arrays made from them."""

from __future__ import annotations

import dataclasses
import re
import zlib

import jax.numpy as jnp
import numpy as np

# Two shapes that many tests share: the judges run op by op on these, whose operations are compiled once for all.
FEWER_QUERIES, MORE_QUERIES = "B2-T19-S35-H4-K2-D8-f32", "B2-T35-S19-H4-K1-D8-bf16"

DTYPES = {"bf16": jnp.bfloat16, "f16": jnp.float16, "f32": jnp.float32, "f64": jnp.float64}


@dataclasses.dataclass(frozen=True)
class Case:
    """The shapes and the dtype of one call, made by `case`."""

    name: str
    batch: tuple[int, ...]
    T: int
    S: int
    H: int
    K: int
    D: int
    Dv: int
    dtype: np.dtype

    def arrays(self, seed: int = 0):
        """Query, key and value: standard-normal, different in every slot, head and example."""
        return (
            self.normal((*self.batch, self.T, self.H, self.D), seed, "query"),
            self.normal((*self.batch, self.S, self.K, self.D), seed, "key"),
            self.normal((*self.batch, self.S, self.K, self.Dv), seed, "value"),
        )

    def cotangents(self, seed: int = 0):
        """A cotangent for the output and one, float32, for the log-sum-exp."""
        dlse = self.normal((*self.batch, self.H, self.T), seed, "dlse")
        lse_dtype = jnp.float64 if self.dtype == jnp.float64 else jnp.float32
        return self.normal((*self.batch, self.T, self.H, self.Dv), seed, "dout"), dlse.astype(lse_dtype)

    def tangents(self, seed: int = 0):
        """Tangents of query, key and value."""
        return self.arrays(seed + 1)

    def inputs(self, seed: int = 0, **shapes):
        """Query, key and value, and a dict of arrays of these `shapes` by name: normal, slopes and scales smaller.

        A bias has this case's dtype; slopes, sinks, scales and mod_operands, of which there is a tuple of shapes, are
        float32 beside 16 bits.
        """
        wide = np.promote_types(self.dtype, np.float32)
        tables = {name: shapes.pop(name) for name in ("mod_operands",) if name in shapes}
        riding = {name: self.normal(shape, seed, name) for name, shape in shapes.items()}
        riding = {name: x if name == "bias" else x.astype(wide) for name, x in riding.items()}
        sizes = {"alibi_slopes": 0.1, "scale": 0.3}
        riding = {name: (x * sizes.get(name, 1)).astype(x.dtype) for name, x in riding.items()}
        for name, own in tables.items():
            drawn = (self.normal(shape, seed, f"{name}[{n}]").astype(wide) for n, shape in enumerate(own))
            riding[name] = tuple(drawn)
        return *self.arrays(seed), riding

    def normal(self, shape, seed: int, name: str):
        """Standard-normal numbers of this case's dtype, fixed by the case, the seed and the name."""
        rng = np.random.default_rng([zlib.crc32(f"{self.name} {name}".encode()), seed])
        return rng.standard_normal(shape).astype(self.dtype)


def case(name: str) -> Case:
    """The case that a test id names.

    The parts, joined by `-`: `B2` or `B2x3` (leading dims, none without it), `T`, `S` (default T), `H` (default 2),
    `K` (default H), `D` (default 16), `Dv` (default D), and a dtype `bf16`, `f16`, `f32` or `f64` (default f32).
    """
    sizes: dict[str, tuple[int, ...]] = {"B": ()}
    dtype = "f32"
    for part in name.split("-"):
        if part in DTYPES:
            dtype = part
            continue
        match = re.fullmatch(r"(B|T|S|H|K|Dv|D)(\d+(?:x\d+)*)", part)
        if match is None:
            raise ValueError(f"`{part}` is no part of a case; in {name!r}")
        sizes[match[1]] = tuple(map(int, match[2].split("x")))

    def size(letter: str, default: int) -> int:
        return sizes.get(letter, (default,))[0]

    T, H, D = size("T", 16), size("H", 2), size("D", 16)
    return Case(
        name=name,
        batch=sizes["B"],
        T=T,
        S=size("S", T),
        H=H,
        K=size("K", H),
        D=D,
        Dv=size("Dv", D),
        dtype=np.dtype(DTYPES[dtype]),
    )


def poisoned(array, slots):
    """A copy of `array` with NaN in `slots`, an index or a tuple of indices."""
    copy = np.array(array)
    copy[slots] = np.nan
    return copy
