"""The tests of flash_jax: one file per promise, `support` for what they share."""
