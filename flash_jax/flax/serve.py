"""What both `attention_fn` do once they have read Flax's arguments."""

from collections.abc import Callable
from typing import Any

import jax

from flash_jax.flax.attend import as_bool, attend
from flash_jax.flax.shared_dropout import attend_alike
from flash_jax.flax.weights import attention_weights


def serve(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    bias: jax.Array | None,
    mask: jax.Array | None,
    *,
    dropout: dict[str, Any],
    broadcast_dropout: bool,
    sow: Callable[[jax.Array], Any] | None,
    **options: Any,
) -> jax.Array:
    """Attention as Flax asks for it.

    dropout: from `dropout_options`; with `broadcast_dropout` every example and head drops the same.
    sow: takes the attention weights, where somebody wants them.
    options: of `flash_attention`.
    """
    T, S = query.shape[-3], key.shape[-3]
    if mask is not None and options["window"] is not None and T != S:
        raise NotImplementedError(
            f"`window` with a `mask` and {T} queries for {S} keys is not supported: in a cache that Flax decodes from, "
            "the mask says which keys are there but not where the query stands. Put the window into the mask, or "
            "decode with SelfAttention of this package."
        )
    mask = as_bool(mask)
    if sow is not None:
        sow(attention_weights(query, key, bias=bias, mask=mask, **_but_for_where_it_runs(options)))
    run = attend_alike if dropout and broadcast_dropout else attend
    return run(query, key, value, bias=bias, mask=mask, **dropout, **options)


def _but_for_where_it_runs(options: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if name not in ("implementation", "block_sizes")}
