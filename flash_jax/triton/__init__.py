"""FlashAttention-2 as Pallas-Triton kernels: NVIDIA GPUs from compute capability 8.0, and interpret mode anywhere."""

from flash_jax.triton.backward import backward
from flash_jax.triton.forward import forward
from flash_jax.triton.tangent import tangent
from flash_jax.triton.tiling import check_block_sizes

__all__ = ["backward", "check_block_sizes", "forward", "tangent"]
