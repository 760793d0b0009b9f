"""Attention over a sequence that devices share (R24): each holds some of the queries, and some of the keys.

`context_axis` names the mesh axis; what runs here runs on each device, inside a `shard_map`. Three ways, by
`context_strategy`, of a device to meet the keys of the others:

"ring" (Liu et al., "Ring attention", 2023): keys and values go round, and are attended as they pass. Outputs of parts
of a row are joined by their lse (the online softmax once more); in the backward pass the gradients of keys and values
go round with them. Memory stays that of the own part; while one part is attended, the next is under way.

"all_gather": keys and values of all devices are gathered, their gradients summed up and scattered. Fewer and larger
transfers, not hidden behind anything; memory for all keys of the layer that runs.

"heads" (Jacobs et al., "DeepSpeed Ulysses", 2023): queries, keys and values are exchanged so that each device has the
whole sequence of some of the heads, attends as on one device, and exchanges the output back.

What a ring does not change, its tangent and second derivatives, is computed with the keys gathered.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from flash_jax.compat import vary_like
from flash_jax.parts import part_of
from flash_jax.spec import AttentionSpec, Operands

OF_KEYS = ("kv_positions", "kv_segment_ids")
"""Operands of which each device has those of its own keys."""

UNROLLED = 8  # devices up to which the steps of a ring are written one after the other


def devices(axis: str) -> tuple[int, bool]:
    """(devices along a mesh axis, whether this is inside a `shard_map` over it, where arrays are those of a device).

    Raises ValueError where the mesh in force has no such axis, or leaves it to the compiler.
    """
    mesh = jax.sharding.get_abstract_mesh()
    types = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    kind = types.get(axis)
    if kind is None or kind == jax.sharding.AxisType.Auto:
        found = "leaves it to the compiler (AxisType.Auto)" if kind else f"has the axes {list(types)}"
        raise ValueError(
            "`context_axis` must be an axis of the mesh in force, inside a `jax.shard_map` over it or of AxisType."
            f"Explicit; got {axis!r}, and the mesh {found}."
        )
    manual = kind == jax.sharding.AxisType.Manual
    others = [name for name, t in types.items() if t != jax.sharding.AxisType.Manual and mesh.shape[name] > 1]
    if manual and others:
        raise NotImplementedError(
            f"`context_axis` inside a `jax.shard_map` that leaves out the mesh axes {others}: let it be over all axes."
        )
    return mesh.shape[axis], manual


def strategy(name: str | None, count: int, heads: tuple[int, int]) -> str:
    """The strategy for `count` devices and (H, K) heads: the one named, or the best that serves.

    "heads" moves the least, (2 T H D + 2 S K D) / devices numbers in all, and shares the work of a causal mask evenly;
    it needs heads for all devices. A "ring" and "all_gather" move 2 S K D numbers to each device, the ring meanwhile.
    """
    served = all(n % count == 0 for n in heads)
    if name == "heads" and not served:
        raise NotImplementedError(
            f"context_strategy='heads' needs numbers of heads that the {count} devices along `context_axis` divide; "
            f"got {heads[0]} query heads and {heads[1]} key/value heads. Use 'ring' or 'all_gather'."
        )
    return name or ("heads" if served else "ring")


def forward(
    run: Callable, q: jax.Array, k: jax.Array, v: jax.Array, operands: Operands, spec: AttentionSpec
) -> tuple[jax.Array, jax.Array]:
    """(out, lse) of this device's rows; `run` is an implementation's forward pass."""
    if spec.context_strategy != "ring":
        return run(q, *_gathered(q, k, v, operands, spec))

    def attend(carry, part):
        k, v, operands, spec = part
        out, lse = run(q, k, v, operands, spec, wide=True)
        return _Joined.of(out, lse) if carry is None else carry.add(out, lse)

    out, lse = _around(attend, q, k, v, operands, spec).finish()
    return out.astype(q.dtype), lse


def backward(
    run: Callable, primals: tuple, out: jax.Array, lse: jax.Array, cts: tuple, leads: dict, spec: AttentionSpec
) -> dict[str, jax.Array]:
    """This device's gradients; `run` is an implementation's backward pass, `cts` the cotangents of out and lse."""
    q, k, v, operands = primals
    add_up = _ring_sums if spec.context_strategy == "ring" else _gathered_sums
    over_keys = functools.partial(add_up, q, k, v, operands, spec)
    here, of_rows = part_of(q, k, operands, spec, _row(q, spec), 0)
    here = dataclasses.replace(here, bias=operands.bias)
    return run((q, k, v, here), out, lse, *cts, leads, of_rows, over_keys=over_keys)


def tangent(
    run: Callable, primals: tuple, out: jax.Array, lse: jax.Array, dots: dict, spec: AttentionSpec
) -> tuple[jax.Array, jax.Array]:
    """This device's tangents of out and lse; `run` is an implementation's tangent pass."""
    q, k, v, operands = primals
    k, v, here, of_rows = _gathered(q, k, v, operands, spec)
    gather = functools.partial(_gather_keys, spec)
    dots = {name: gather(x, x.ndim - 3) if name in ("key", "value") else x for name, x in dots.items()}
    return run((q, k, v, here), out, lse, dots, of_rows)


def _row(q: jax.Array, spec: AttentionSpec) -> jax.Array:
    """The first row of this device."""
    return lax.axis_index(spec.context_axis) * q.shape[-3]


def _gather_keys(spec: AttentionSpec, x: jax.Array, axis: int) -> jax.Array:
    """The keys of all devices."""
    return lax.all_gather(x, spec.context_axis, axis=axis, tiled=True)


def _gathered(q, k, v, operands: Operands, spec: AttentionSpec) -> tuple[jax.Array, jax.Array, Operands, AttentionSpec]:
    """Key, value, operands and spec of this device's rows and all keys."""
    gather = functools.partial(_gather_keys, spec)
    k, v = gather(k, k.ndim - 3), gather(v, v.ndim - 3)
    operands = operands.map(lambda name, x: gather(x, x.ndim - 1) if name in OF_KEYS else x)
    return k, v, *part_of(q, k, operands, spec, _row(q, spec), 0)


def _gathered_sums(q, k, v, operands: Operands, spec: AttentionSpec, f: Callable) -> dict[str, jax.Array]:
    """f(key, value, operands, spec) of all keys at once; each device gets the gradients of its own."""
    found = f(*_gathered(q, k, v, operands, spec))
    for name in found.keys() & {"key", "value"}:
        x = found[name]
        found[name] = lax.psum_scatter(x, spec.context_axis, scatter_dimension=x.ndim - 3, tiled=True)
    return found


def _ring_sums(q, k, v, operands: Operands, spec: AttentionSpec, f: Callable) -> dict[str, jax.Array]:
    """The sum of f(key, value, operands, spec) over the keys of all devices, which go round with their gradients."""
    pass_on = functools.partial(_pass_on, spec)

    def add(carry, part):
        found = f(*part)
        own = {name: found.pop(name) for name in list(found) if name in ("key", "value")}
        if carry is not None:
            # What came with the keys was sent on by a neighbour before this step, and is only needed after it.
            found, own = jax.tree.map(jnp.add, carry, (found, own))
        return found, pass_on(own)

    found, own = _around(add, q, k, v, operands, spec)
    return found | own


def _pass_on(spec: AttentionSpec, tree: Any) -> Any:
    """The arrays of the device before this one."""
    n = lax.axis_size(spec.context_axis)
    return jax.tree.map(lambda x: lax.ppermute(x, spec.context_axis, [(i, (i + 1) % n) for i in range(n)]), tree)


def _around(step: Callable, q, k, v, operands: Operands, spec: AttentionSpec) -> Any:
    """`carry = step(carry, (key, value, operands, spec))` over the parts of all devices, this one's first (carry None).

    The next part is sent for before the step begins, so that it comes meanwhile. A sink counts once in each row: with
    this device's own keys.
    """
    n, me = lax.axis_size(spec.context_axis), lax.axis_index(spec.context_axis)
    row, S = _row(q, spec), k.shape[-3]
    of_keys = {name: getattr(operands, name) for name in OF_KEYS}

    def attended(carry, keys, number, operands):
        k, v, of_keys = keys
        operands = dataclasses.replace(operands, **of_keys)
        return step(carry, (k, v, *part_of(q, k, operands, spec, row, lax.rem(me - number + n, jnp.int32(n)) * S)))

    keys = k, v, of_keys
    coming = _pass_on(spec, keys) if n > 1 else keys
    carry = attended(None, keys, 0, operands)
    operands = dataclasses.replace(operands, sinks=None)
    if n <= UNROLLED:
        for number in range(1, n):
            keys, coming = coming, _pass_on(spec, coming) if number < n - 1 else coming
            carry = attended(carry, keys, number, operands)
        return carry

    def turn(number, state):
        carry, keys = state
        coming = _pass_on(spec, keys)
        return attended(carry, keys, number, operands), coming

    carry, coming = vary_like((carry, coming), q, k, v, operands)
    return lax.fori_loop(1, n, turn, (carry, coming))[0]


class _Joined(NamedTuple):
    """Parts of rows joined so far: with `base` the largest lse of a part, the sums over parts of out and of 1, each
    times exp(lse - base). (Joining them to an lse each time would round that each time.)
    """

    out: jax.Array
    weight: jax.Array
    base: jax.Array

    @classmethod
    def of(cls, out: jax.Array, lse: jax.Array) -> "_Joined":
        """One part."""
        return cls(out, (lse > -jnp.inf).astype(lse.dtype), lse)

    def add(self, out: jax.Array, lse: jax.Array) -> "_Joined":
        """With one part more."""
        base = jnp.maximum(self.base, lse)
        measured_from = jnp.where(base == -jnp.inf, 0, base)
        mine, other = jnp.exp(self.base - measured_from), jnp.exp(lse - measured_from)
        return _Joined(self.out * _per_row(mine) + out * _per_row(other), self.weight * mine + other, base)

    def finish(self) -> tuple[jax.Array, jax.Array]:
        """(out, lse) of the whole rows."""
        dead = self.weight == 0
        weight = jnp.where(dead, 1, self.weight)
        return self.out / _per_row(weight), self.base + jnp.log(weight)


def _per_row(x: jax.Array) -> jax.Array:
    """[..., H, T] as it multiplies [..., T, H, D]."""
    return jnp.swapaxes(x, -1, -2)[..., None]


# Heads: around the whole op, which JAX differentiates.


def by_heads(attend: Callable, q, k, v, operands: Operands, spec: AttentionSpec) -> tuple[jax.Array, jax.Array]:
    """(out, lse) of this device's rows by `attend(q, k, v, operands, spec)` of some heads and the whole sequence."""
    axis, n = spec.context_axis, lax.axis_size(spec.context_axis)
    T, H = q.shape[-3:-1]
    operands = vary_like(operands, q, k, v, operands)

    def exchange(x, sequence, heads):  # a device's rows of all heads for all rows of its heads
        by_row = x.shape[sequence] > 1 or T == 1
        if by_row and x.shape[heads] > 1:
            return lax.all_to_all(x, axis, heads, sequence, tiled=True)
        return lax.all_gather(x, axis, axis=sequence, tiled=True) if by_row else own_heads(x, heads)

    def own_heads(x, heads):
        if x.shape[heads] == 1 < H:
            return x
        count = x.shape[heads] // n
        return lax.dynamic_slice_in_dim(x, lax.axis_index(axis) * count, count, heads)

    def whole(name, x):
        last = x.ndim - 1
        if name in ("bias", "mask"):
            return exchange(x, last - 1, last - 2)
        if name in ("q_positions", "q_segment_ids", *OF_KEYS):
            return lax.all_gather(x, axis, axis=last, tiled=True)
        if name in ("alibi_slopes", "sinks", "mod_heads"):
            return own_heads(x, last)
        if name in ("dropout_words", "block_map"):
            return own_heads(x, last - (1 if name == "dropout_words" else 2))
        return x

    q, k, v = (lax.all_to_all(x, axis, x.ndim - 2, x.ndim - 3, tiled=True) for x in (q, k, v))
    plain = dataclasses.replace(spec, context_axis=None, context_strategy=None, whole=None)
    out, lse = attend(q, k, v, operands.map(whole), plain)
    out = lax.all_to_all(out, axis, out.ndim - 3, out.ndim - 2, tiled=True)
    return out, lax.all_to_all(lse, axis, lse.ndim - 1, lse.ndim - 2, tiled=True)
