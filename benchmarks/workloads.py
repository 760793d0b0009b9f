"""What is measured: shapes of the FlashAttention-2 paper's grid, their inputs, their FLOPs, and who computes them."""

import dataclasses
import functools
import os
import re
import warnings
from collections.abc import Callable

import jax
import jax.numpy as jnp

import flash_jax
from flash_jax import BlockSizes

TOKENS = 16384  # in all: batch * length
WIDTH = 2048  # heads * head dim
SHAPES = ("d64-T2k", "d64-T16k", "d128-T2k", "d128-T16k", "d256-T4k")


@dataclasses.dataclass(frozen=True)
class Shape:
    """Self-attention of [B, T, H, D] in bfloat16."""

    name: str
    B: int
    T: int
    H: int
    D: int

    @classmethod
    def of(cls, name: str, shrink: int = 1) -> "Shape":
        """The shape called, say, `d128-T16k`; `shrink` divides length and tokens (to try a script on a CPU)."""
        match = re.fullmatch(r"d(\d+)-T(\d+)k", name)
        if match is None:
            raise SystemExit(f"{name!r} is no shape such as d128-T16k")
        D, T = int(match[1]), int(match[2]) * 1024 // shrink
        return cls(name, max(1, TOKENS // shrink // T), T, max(1, WIDTH // D if shrink == 1 else 2), D)

    def inputs(self) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
        """Standard-normal query, key, value and cotangent of the output."""
        keys = jax.random.split(jax.random.key(self.T + self.D), 4)
        q, k, v, dout = (jax.random.normal(key, (self.B, self.T, self.H, self.D), jnp.bfloat16) for key in keys)
        return q, k, v, dout

    def flops(self, causal: bool, backward: bool) -> float:
        """By the paper's convention: two products of 2 T T D a head, half if causal; the backward 2.5 times that."""
        forward = 4.0 * self.B * self.H * self.T * self.T * self.D * (0.5 if causal else 1.0)
        return forward * (3.5 if backward else 1.0)


def ours(implementation: str, blocks: BlockSizes | None, causal: bool) -> Callable:
    """`flash_attention` as attend(query, key, value)."""
    return functools.partial(
        flash_jax.flash_attention, causal=causal, implementation=implementation, block_sizes=blocks
    )


def cudnn(causal: bool) -> Callable:
    """JAX's own attention by cuDNN."""
    return functools.partial(jax.nn.dot_product_attention, is_causal=causal, implementation="cudnn")


def jax_pallas(causal: bool, backward_block: int) -> Callable:
    """The Pallas-Triton attention that JAX ships as an example: forward in 128 x 64 tiles, backward in square ones."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        from jax.experimental.pallas.ops.gpu import attention

    def attend(q, k, v):
        T = q.shape[1]
        backward = min(backward_block, T)
        sizes = attention.BlockSizes(min(128, T), min(64, T), backward, backward, backward, backward)
        interpret = jax.default_backend() == "cpu"
        return attention.mha(
            q, k, v, None, sm_scale=q.shape[-1] ** -0.5, causal=causal, block_sizes=sizes, interpret=interpret
        )

    return attend


def forward_and_backward(attend: Callable) -> Callable:
    """f(query, key, value, dout) -> (out, (dq, dk, dv))."""

    def f(q, k, v, dout):
        out, pull = jax.vjp(attend, q, k, v)
        return out, pull(dout)

    return f


def parse_blocks(text: str | None) -> BlockSizes | None:
    """BlockSizes from, say, `forward=128x64w8s3,dq=64x64w4s2,dkv=64x64w4s3` (query x key rows, warps, stages)."""
    if not text:
        return None
    parts: dict[str, BlockSizes] = {}
    for item in text.split(","):
        match = re.fullmatch(r"(forward|dq|dkv|tangent)=(\d+)x(\d+)w(\d+)s(\d+)", item)
        if match is None:
            raise SystemExit(f"{item!r} is no tile such as forward=128x64w8s3")
        q, kv, warps, stages = map(int, match.groups()[1:])
        parts[match[1]] = BlockSizes(q, kv, warps, stages)
    forward = parts.get("forward", BlockSizes())
    # An empty BlockSizes means the table's own, and keeps the forward pass's numbers out of the other passes.
    return dataclasses.replace(forward, **{name: parts.get(name, BlockSizes()) for name in ("dq", "dkv", "tangent")})


def threads() -> int:
    """Threads that compile at the same time."""
    return max(2, min(14, (os.cpu_count() or 2) - 2))


def quiet() -> None:
    """Keeps deprecation warnings of what is measured out of the tables."""
    warnings.simplefilter("ignore", DeprecationWarning)
