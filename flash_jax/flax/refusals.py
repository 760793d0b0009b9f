"""Refusing what an `attention_fn` is given and cannot serve, rather than ignoring it."""

from typing import Any

import numpy as np

_REMEDIES = {
    "input_positions": "Rotate query and key before, or use SelfAttention of this package, which has rotary positions.",
    "einsum_dot_general": "The products run inside the attention kernel; use None.",
    "qk_attn_weights_einsum": "The products run inside the attention kernel; use None.",
    "attn_weights_value_einsum": "The products run inside the attention kernel; use None.",
}


def refuse_given(**arguments: Any) -> None:
    """NotImplementedError for the first of the named arguments that is not None."""
    for name, value in arguments.items():
        if value is not None:
            raise NotImplementedError(f"`{name}` is not supported; got {_described(value)}. {_REMEDIES[name]}")


def _described(value: Any) -> str:
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"{np.dtype(value.dtype).name}{list(value.shape)}"
    return type(value).__name__
