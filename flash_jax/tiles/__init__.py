"""The mathematics of one tile, shared by every blockwise implementation; plain jax.numpy, no Pallas."""
