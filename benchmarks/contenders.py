"""Who computes attention: a registry, each contender used where it is installed and serves the case.

Libraries are imported when a contender is built, and what one raises there, or when it compiles or runs, is its result
(programs.py). `refuses` says beforehand what a library would get wrong without an error, or cannot hold in memory. The
ways of calling tokamax, flash-attn-jax, flash-attn3-jax and transformer-engine follow their documentation.
"""

import dataclasses
import functools
import importlib
import importlib.metadata
import importlib.util
import os
import warnings
from collections.abc import Callable
from typing import Any

import jax

import flash_jax
from benchmarks.cases import BOTH, Case

Attend = Callable[[jax.Array, jax.Array, jax.Array, dict[str, Any]], Any]  # (q, k, v, extras) -> out

MATRIX_GIB = 16  # scores in float32 that a contender with a matrix of scores may have
MASK_GIB = 4


def _serves_all(case: Case) -> str | None:
    return None


@dataclasses.dataclass(frozen=True)
class Contender:
    """A name, how to make attend(query, key, value, extras) for a case, and why it is left out of one (or None)."""

    name: str
    build: Callable[[Case], Attend]
    refuses: Callable[[Case], str | None] = _serves_all
    module: str = "jax"  # the package that has to be there
    distribution: str = "jax"
    only: str | None = None  # the one pass that is of interest

    def left_out(self, case: Case, kind: str) -> str | None:
        """Why it does not run, or None."""
        if importlib.util.find_spec(self.module) is None:
            return NOT_INSTALLED
        if self.only not in (None, kind):
            return f"only {self.only} differs"
        return self.refuses(case)

    def version(self) -> str:
        """The version that is installed."""
        try:
            return importlib.metadata.version(self.distribution)
        except importlib.metadata.PackageNotFoundError:
            return "unknown"


NOT_INSTALLED = "not installed"
SAME_FORWARD = {"jax pallas b32": "jax pallas b64"}  # whose forward pass a contender of one pass has


def flash(implementation: str | None, blocks: flash_jax.BlockSizes | None = None, precision: str | None = None):
    """How to build ours."""

    def build(case: Case) -> Attend:
        options: dict[str, Any] = {"causal": case.causal, "implementation": implementation, "block_sizes": blocks}
        if case.left is not None:
            options["window"] = (case.left, 0)

        def attend(q, k, v, extras):
            return flash_jax.flash_attention(q, k, v, precision=precision, **options, **extras)

        return attend

    return build


def _as_mask(extras: dict[str, Any]) -> jax.Array | None:
    """Segment ids as the mask [B, 1, T, T] that a library without segments is given."""
    ids = extras.get("segment_ids")
    return None if ids is None else (ids[:, :, None] == ids[:, None, :])[:, None]


def _window(case: Case) -> dict[str, Any]:
    return {} if case.left is None else {"local_window_size": (case.left, 0)}


def _jax_nn(implementation: str):
    def build(case: Case) -> Attend:
        more: dict[str, Any] = {"is_causal": case.causal, "implementation": implementation, **_window(case)}

        def attend(q, k, v, extras):
            return jax.nn.dot_product_attention(q, k, v, extras.get("bias"), _as_mask(extras), **more)

        return attend

    return build


def _top_left(case: Case) -> str | None:
    """What a library whose causal mask starts top left, and which takes segments as a mask, cannot do."""
    if case.causal and case.T != case.S:
        return "its causal mask is aligned top left"
    if case.documents and case.B * case.T * case.S > MASK_GIB * 2**30:
        return f"documents as a mask of {case.B * case.T * case.S / 2**30:.0f} GiB"
    return None


def _matrix(case: Case) -> str | None:
    if case.score_bytes() > MATRIX_GIB * 2**30:
        return f"a matrix of scores of {case.score_bytes() / 2**30:.0f} GiB"
    return _top_left(case)


def _pallas(block: int):
    """The Pallas-Triton attention that JAX ships: forward in 128 x 64 tiles, backward in square ones."""

    def build(case: Case) -> Attend:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            attention: Any = importlib.import_module("jax.experimental.pallas.ops.gpu.attention")
        back = min(block, case.T)
        sizes = attention.BlockSizes(min(128, case.T), min(64, case.T), back, back, back, back)
        more = {"causal": case.causal, "block_sizes": sizes, "interpret": jax.default_backend() == "cpu"}

        def attend(q, k, v, extras):
            return attention.mha(q, k, v, extras.get("segment_ids"), case.D**-0.5, **more)

        return attend

    return build


def _pallas_refuses(case: Case) -> str | None:
    if case.H != case.K or case.T != case.S or case.D != case.Dv:
        return "no grouped heads, no T != S, one head dim"
    return "no window" if case.left is not None else "no bias" if case.bias else None


def _tokamax(implementation: str):
    def build(case: Case) -> Attend:
        tokamax: Any = importlib.import_module("tokamax")
        more = {"is_causal": case.causal, "implementation": implementation, **_window(case)}

        def attend(q, k, v, extras):
            return tokamax.dot_product_attention(q, k, v, extras.get("bias"), _as_mask(extras), **more)

        return attend

    return build


def _flash_mha(module: str):
    """flash-attn-jax and flash-attn3-jax, which have one signature."""

    def build(case: Case) -> Attend:
        library: Any = importlib.import_module(module)
        window = (-1, -1) if case.left is None else (case.left, 0)

        def attend(q, k, v, extras):
            return library.flash_mha(q, k, v, is_causal=case.causal, window_size=window)

        return attend

    return build


def _flash_mha_refuses(case: Case) -> str | None:
    if case.dtype == "float32" or case.D != case.Dv:
        return "16 bits and one head dim only"
    return "no bias" if case.bias else "no segments but as ragged arrays" if case.documents else None


def _transformer_engine(case: Case) -> Attend:
    os.environ.setdefault("NVTE_FUSED_ATTN", "1")
    library: Any = importlib.import_module("transformer_engine.jax.flax")
    module = library.DotProductAttention(
        head_dim=case.D,
        num_attention_heads=case.H,
        num_gqa_groups=case.K,
        attention_dropout=0.0,
        attn_mask_type="causal" if case.causal or case.left is not None else "no_mask",
        attn_bias_type="no_bias",
        qkv_layout="bshd_bshd_bshd",
        scale_factor=case.D**-0.5,
        transpose_batch_sequence=False,
        window_size=None if case.left is None else (case.left, 0),
    )

    def attend(q, k, v, extras):
        return module.apply({}, q, k, v, deterministic=True)

    return attend


def _transformer_engine_refuses(case: Case) -> str | None:
    if case.bias or case.documents:
        return "called without bias and segments"
    return _top_left(case)


def registry(implementation: str = "triton", blocks: flash_jax.BlockSizes | None = None) -> list[Contender]:
    """All contenders, ours first."""
    mha = functools.partial(Contender, refuses=_flash_mha_refuses)
    only_f32 = "float32 alone has another precision"
    return [
        Contender("flash_jax", flash(implementation, blocks), distribution="flash-jax"),
        Contender(
            "flash_jax tf32",
            flash(implementation, blocks, "tensorfloat32"),
            lambda case: None if case.dtype == "float32" else only_f32,
            distribution="flash-jax",
        ),
        Contender("jax.nn cudnn", _jax_nn("cudnn"), _top_left),
        Contender("jax.nn xla", _jax_nn("xla"), _matrix),
        Contender("jax pallas b64", _pallas(64), _pallas_refuses),
        Contender("jax pallas b32", _pallas(32), _pallas_refuses, only=BOTH),
        Contender("tokamax mosaic", _tokamax("mosaic"), _top_left, "tokamax", "tokamax"),
        Contender("tokamax triton", _tokamax("triton"), _top_left, "tokamax", "tokamax"),
        mha("flash-attn-jax", _flash_mha("flash_attn_jax"), module="flash_attn_jax", distribution="flash-attn-jax"),
        mha("flash-attn3-jax", _flash_mha("flash_attn3_jax"), module="flash_attn3_jax", distribution="flash-attn3-jax"),
        Contender(
            "transformer-engine",
            _transformer_engine,
            _transformer_engine_refuses,
            "transformer_engine",
            "transformer-engine-jax",
        ),
    ]
