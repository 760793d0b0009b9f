"""Exact, IO-aware attention for JAX on NVIDIA GPUs: FlashAttention-2 as Pallas kernels, differentiable."""

from flash_jax.attention import flash_attention
from flash_jax.spec import BlockSizes, interpret_mode

__version__ = "0.1.0"

__all__ = ["BlockSizes", "__version__", "flash_attention", "interpret_mode"]
