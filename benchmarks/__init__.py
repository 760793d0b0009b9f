"""Measurements: `speed` beside other implementations, `sweep` over tile sizes; `NOTES.md` holds what they gave."""
