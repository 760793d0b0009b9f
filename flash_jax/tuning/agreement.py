"""Whether two tiles give the same results but for rounding: only then is the time of one trusted."""

import math

import jax
import jax.numpy as jnp
import numpy as np

from flash_jax.arguments import Call
from flash_jax.tuning.passes import Arrays

# The largest difference, relative to the largest result, by the dtype that a result or its operands are rounded to:
# four times its eps; of float32 more, as it is what sums and exponentials are computed in.
_RELATIVE = {"bfloat16": 2.0**-5, "float16": 2.0**-8, "float32": 2.0**-16}
_RELATIVE_TF32 = 2.0**-8

# What sums of float32 lose where what is summed cancels, relative to the summands: four times the eps of float32.
_CANCELLED = 2.0**-21


def disagreement(call: Call, given: Arrays, found: dict[str, jax.Array], own: dict[str, jax.Array]) -> str | None:
    """What of `found` differs from `own`, two results of one pass, by more than rounding; None where nothing does."""
    sizes = _summands(call, given, own)
    scores = sizes["lse"] + float(_compared(given.lse, given.lse)[2])
    for name, x in found.items():
        spoiled, error, largest = (float(n) for n in _compared(x, own[name]))
        bound = _relative(name, x, call, scores) * largest + _CANCELLED * sizes.get(name, 0.0)
        if spoiled:
            return f"{name}: {spoiled:.0f} entries are NaN or infinite, or are not, unlike those of the table's tile"
        if not error <= bound:
            return f"{name}: differs by {error:.3g} from the table's tile, and rounding explains {bound:.3g}"
    return None


def _relative(name: str, x: jax.Array, call: Call, scores: float) -> float:
    """The largest difference of a result relative to its largest entry, where scores are of that size."""
    if call.q.dtype == jnp.float32 and call.spec.precision == "tf32":
        return _RELATIVE_TF32
    if name == "lse":  # of exact products, or of float32 ones, in whatever dtype the output is
        return _RELATIVE["float32"]
    exponentials = _RELATIVE["float32"] * max(1.0, scores / 8)  # the error of a score is relative in exp(score)
    return max(exponentials, *(_RELATIVE[dtype] for dtype in (call.q.dtype.name, x.dtype.name)))


@jax.jit
def _compared(x: jax.Array, own: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(entries that are not finite where `own` is or the other way round, largest difference, largest of `own`).

    Where `own` is NaN anything will do.
    """
    x, own = x.astype(jnp.float32), own.astype(jnp.float32)
    finite = jnp.isfinite(x) & jnp.isfinite(own)
    spoiled = ~finite & ~jnp.isnan(own) & (x != own)
    error, largest = (jnp.where(finite, jnp.abs(n), 0).max() for n in (x - own, own))
    return spoiled.sum(dtype=jnp.float32), error, largest


def _summands(call: Call, given: Arrays, own: dict[str, jax.Array]) -> dict[str, float]:
    """How large what is added up to a result may be, where most of it may cancel: by norms of rows.

    ds = p (dp - delta) is all rounding where a query attends one key alone, say, and so are then dq and dk.
    """
    q, k, v, out_ct = (float(_norm(x)) for x in (given.q, given.k, given.v, given.out_ct))
    scale = call.spec.scale if call.operands.scale is None else float(jnp.abs(call.operands.scale).max())
    scale = abs(1.0 if scale is None else scale)
    sizes = {"lse": 1 + scale * q * k, "out": v, "query": scale * out_ct * v * k}
    if "value" in own:  # how much of the queries' weight a key has, dv tells
        sizes["key"] = scale * q * v * float(_norm(own["value"]))
    if "bias" in own:
        sizes["bias"] = out_ct * v * math.sqrt(np.prod(call.q.shape[:-3], dtype=float) * call.q.shape[-2])
    if given.dots:
        q_dot, k_dot = (float(_norm(given.dots[name])) for name in ("query", "key"))
        sizes["lse_dot"] = scale * (q_dot * k + q * k_dot)
        sizes["out_dot"] = sizes["lse_dot"] * v + float(_norm(given.dots["value"]))
    return sizes


@jax.jit
def _norm(x: jax.Array) -> jax.Array:
    """The largest norm of a row of x [..., D]; rows that are not finite do not count."""
    norms = jnp.sqrt((x.astype(jnp.float32) ** 2).sum(-1))
    return jnp.where(jnp.isfinite(norms), norms, 0).max()
