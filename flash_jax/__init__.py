"""Exact, IO-aware attention for JAX on NVIDIA GPUs: FlashAttention-2 as Pallas kernels, differentiable."""

from flash_jax.attention import flash_attention
from flash_jax.block_mask import block_mask
from flash_jax.dropout import dropout_mask
from flash_jax.inspect import explain, visualize_mask
from flash_jax.jax_nn import dot_product_attention
from flash_jax.spec import BlockMask, BlockSizes, interpret_mode
from flash_jax.tuning import tune
from flash_jax.varlen import flash_attention_varlen, segment_ids_from_lengths
from flash_jax.zigzag import unzigzag, zigzag

__version__ = "0.1.0"

__all__ = [
    "BlockMask",
    "BlockSizes",
    "__version__",
    "block_mask",
    "dot_product_attention",
    "dropout_mask",
    "explain",
    "flash_attention",
    "flash_attention_varlen",
    "interpret_mode",
    "segment_ids_from_lengths",
    "tune",
    "unzigzag",
    "visualize_mask",
    "zigzag",
]
