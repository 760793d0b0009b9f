"""What is measured: each case of attention by name, the suites they make up, their FLOPs and their inputs.

Nothing here imports JAX at the top: the process that times PyTorch reads the same cases.
"""

import dataclasses
import re
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np

TOKENS = 16384  # in all: batch * length, as in the FlashAttention-2 paper
WIDTH = 2048  # heads * head dim, likewise
LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
FORWARD, BACKWARD, BOTH = "forward", "backward", "forward+backward"


@dataclasses.dataclass(frozen=True)
class Case:
    """One call: query [B, T, H, D], key [B, S, K, D], value [B, S, K, Dv], and what masks or biases its scores."""

    name: str
    suite: str
    B: int
    T: int
    S: int
    H: int
    K: int
    D: int
    Dv: int
    dtype: str = "bfloat16"
    causal: bool = False
    left: int | None = None  # keys that a query sees before its own, and none after it: a causal window
    documents: int = 0  # packed one after another, each seeing itself alone
    bias: bool = False  # an array [1, H, T, S], without gradient
    backward: bool = True

    @property
    def passes(self) -> tuple[str, ...]:
        """What is compiled and timed."""
        return (FORWARD, BOTH) if self.backward else (FORWARD,)

    @property
    def group(self) -> int:
        """Query heads that share one key/value head."""
        return self.H // self.K

    def pairs(self) -> float:
        """Pairs of query and key that count, of one head: by the paper's convention half of all where causal."""
        if self.left is not None:
            last = np.arange(self.T) + self.S - self.T
            return float(np.sum(last - np.maximum(last - self.left, 0) + 1))
        if self.documents:
            squares = float(np.sum(np.bincount(packed(self.T, self.documents)[0]).astype(float) ** 2))
            return squares / 2 if self.causal else squares
        return self.T * self.S / 2 if self.causal else float(self.T * self.S)

    def flops(self, kind: str) -> float:
        """Two products of each pair forward, five backward; for D = Dv the paper's 4 B H T T D, and 2.5 times that."""
        forward, backward = self.D + self.Dv, 3 * self.D + 2 * self.Dv
        widths = {FORWARD: forward, BACKWARD: backward, BOTH: forward + backward}[kind]
        return 2.0 * self.B * self.H * self.pairs() * widths

    def traffic(self) -> float:
        """Bytes of query, key, value and output, each once: what a forward pass moves at the least."""
        numbers = self.B * (self.T * self.H * (self.D + self.Dv) + self.S * self.K * (self.D + self.Dv))
        return float(numbers * (4 if self.dtype == "float32" else 2))

    def score_bytes(self) -> float:
        """Bytes of all scores in float32: what attention by a matrix of scores needs at the least."""
        return 4.0 * self.B * self.H * self.T * self.S

    def allowed(self, rows: np.ndarray) -> np.ndarray:
        """Which keys these query rows see, [rows, S]; the last query's own position is the last key's."""
        own, cols = rows[:, None] + self.S - self.T, np.arange(self.S)
        seen = np.ones((len(rows), self.S), bool)
        if self.causal or self.left is not None:
            seen &= cols <= own
        if self.left is not None:
            seen &= cols >= own - self.left
        if self.documents:
            ids = packed(self.T, self.documents)[0]
            seen &= ids[rows][:, None] == ids
        return seen

    def shrunk(self, by: int) -> "Case":
        """The same in small, to try a script on a CPU: lengths divided, two key/value heads, one example."""
        if by == 1:
            return self
        T = self.T if self.T <= 16 else max(16, self.T // by)
        left = None if self.left is None else max(1, self.left // by)
        sizes = {"B": 1, "T": T, "S": max(16, self.S // by), "H": 2 * self.group, "K": 2}
        return dataclasses.replace(self, left=left, documents=min(self.documents, 3), **sizes)

    def to_json(self) -> dict[str, Any]:
        """Its fields, by name."""
        return dataclasses.asdict(self)

    def structs(self) -> tuple[tuple, dict[str, Any]]:
        """Shapes and dtypes of (query, key, value, cotangent) and of the arrays that ride along."""
        import jax

        return jax.eval_shape(self.inputs)

    def inputs(self) -> tuple[tuple, dict[str, Any]]:
        """Standard-normal (query, key, value, cotangent), and the arrays that ride along: bias, segment_ids."""
        import jax
        import jax.numpy as jnp

        keys = jax.random.split(jax.random.key(zlib.crc32(self.name.encode())), 5)
        heads = (
            (self.T, self.H, self.D),
            (self.S, self.K, self.D),
            (self.S, self.K, self.Dv),
            (self.T, self.H, self.Dv),
        )
        arrays = tuple(
            jax.random.normal(key, (self.B, *shape), self.dtype) for key, shape in zip(keys[:4], heads, strict=True)
        )
        extras: dict[str, Any] = {}
        if self.bias:
            extras["bias"] = jax.random.normal(keys[4], (1, self.H, self.T, self.S), self.dtype)
        if self.documents:
            extras["segment_ids"] = jnp.broadcast_to(jnp.asarray(packed(self.T, self.documents)), (self.B, self.T))
        return arrays, extras


def packed(T: int, documents: int = 12) -> np.ndarray:
    """Segment ids [1, T] of documents of unequal lengths."""
    ends = np.cumsum(np.random.default_rng(0).dirichlet(np.full(documents, 4.0)))[:-1] * T
    return np.searchsorted(ends.astype(int), np.arange(T), side="right")[None].astype(np.int32)


def length_name(T: int) -> str:
    """512 or 16k."""
    return str(T) if T < 1024 else f"{T // 1024}k" if T < 2**20 else f"{T // 2**20}M"


def plain(suite: str, D: int, T: int, causal: bool, **more: Any) -> Case:
    """Self-attention of 16384 tokens in all (one sequence at the least), heads times head dim 2048."""
    name = f"d{D}-T{length_name(T)}-{'causal' if causal else 'full'}"
    H = WIDTH // D
    return Case(name, suite, max(1, TOKENS // T), T, T, H, H, D, D, causal=causal, **more)


def renamed(case: Case, name: str, **more: Any) -> Case:
    """The case with another name and other fields."""
    return dataclasses.replace(case, name=name, **more)


def _headline() -> list[Case]:
    shapes = ((64, 2048), (64, 16384), (128, 2048), (128, 16384), (256, 4096))
    return [plain("headline", D, T, causal) for D, T in shapes for causal in (False, True)]


def _grid() -> list[Case]:
    return [plain("grid", D, T, causal) for D in (64, 128) for causal in (False, True) for T in LENGTHS]


def _d256() -> list[Case]:
    return [plain("d256", 256, T, causal) for causal in (False, True) for T in (2048, 4096, 16384)]


def _gqa() -> list[Case]:
    return [
        renamed(plain("gqa", 128, T, True), f"gqa32/8-d128-T{length_name(T)}-causal", H=32, K=8) for T in (2048, 8192)
    ]


def _mla() -> list[Case]:
    more = {"H": 16, "K": 16, "D": 192, "Dv": 128}
    return [
        renamed(plain("mla", 128, 4096, causal), f"mla192/128-T4k-{'causal' if causal else 'full'}", **more)
        for causal in (False, True)
    ]


def _window() -> list[Case]:
    return [
        renamed(plain("window", 128, T, False), f"window{left}-d128-T{length_name(T)}", left=left)
        for T, left in ((16384, 4095), (65536, 1023))
    ]


def _packed() -> list[Case]:
    return [
        renamed(plain("packed", 128, T, True), f"packed12-d128-T{length_name(T)}-causal", documents=12)
        for T in (16384, 32768)
    ]


def _bias() -> list[Case]:
    return [renamed(plain("bias", D, 4096, False), f"bias-d{D}-T4k-full", bias=True) for D in (64, 128)]


def _f32() -> list[Case]:
    return [
        renamed(plain("f32", D, T, True), f"f32-d{D}-T{length_name(T)}-causal", dtype="float32")
        for D in (64, 128)
        for T in (2048, 8192)
    ]


def _decode() -> list[Case]:
    """A few new tokens over a cache of 32k, all of which each of them sees."""
    more: dict[str, Any] = {"S": 32768, "H": 32, "K": 8, "backward": False}
    sizes = [(8, T) for T in (1, 2, 4, 8, 16)] + [(1, 1), (1, 16)]
    return [
        renamed(plain("decode", 128, 16384, False), f"decode-B{B}-T{T}-S32k-gqa32/8-d128", B=B, T=T, **more)
        for B, T in sizes
    ]


def _long() -> list[Case]:
    million = renamed(plain("long", 128, 2**20, True, backward=False), "long-d128-T1M-causal", H=1, K=1)
    return [million]


SUITES: dict[str, Callable[[], list[Case]]] = {
    "headline": _headline,
    "grid": _grid,
    "d256": _d256,
    "gqa": _gqa,
    "mla": _mla,
    "window": _window,
    "packed": _packed,
    "bias": _bias,
    "f32": _f32,
    "decode": _decode,
    "long": _long,
}


def named(shape: str, masks: list[str]) -> list[Case]:
    """The cases called, say, `d128-T16k`, one for each of the masks "full" and "causal"."""
    match = re.fullmatch(r"d(\d+)-T(\d+)(k?)", shape)
    if match is None:
        raise SystemExit(f"{shape!r} is no shape such as d128-T16k")
    T = int(match[2]) * (1024 if match[3] else 1)
    return [plain("shapes", int(match[1]), T, mask == "causal") for mask in masks]
