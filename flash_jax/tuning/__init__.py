"""`tune`: block sizes for one kind of call, found by timing candidates on the GPU that is there."""

from flash_jax.tuning.api import tune

__all__ = ["tune"]
