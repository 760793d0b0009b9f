"""Refusing what an `attention_fn` is given and cannot serve, rather than ignoring it."""

from typing import Any

import numpy as np

_REMEDIES = {
    "bias": "Add it to no score here: use Flax's own dot_product_attention for a model with a bias.",
    "mask": (
        "For a causal mask or a sliding window use functools.partial(attention_fn, causal=True, window=(left, right)); "
        "to decode with a cache use SelfAttention of this package."
    ),
    "dropout_rate": "Use dropout_rate=0.0, or deterministic=True where it is not applied.",
    "module": "Use sow_weights=False: the attention weights are never formed, so none can be recorded.",
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


def refuse_dropout(dropout_rate: float, deterministic: bool) -> None:
    """NotImplementedError where attention dropout would be applied."""
    if dropout_rate > 0 and not deterministic:
        raise NotImplementedError(
            f"`dropout_rate` above 0 is not supported; got {dropout_rate} with deterministic={deterministic}. "
            f"{_REMEDIES['dropout_rate']}"
        )


def _described(value: Any) -> str:
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"{np.dtype(value.dtype).name}{list(value.shape)}"
    return type(value).__name__
