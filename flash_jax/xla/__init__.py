"""Blockwise attention in plain JAX: linear memory, any platform, and the code that higher derivatives run."""

from flash_jax.xla.backward import backward
from flash_jax.xla.forward import forward
from flash_jax.xla.tangent import tangent

__all__ = ["backward", "forward", "tangent"]
