"""How a pass is cut over a mesh under plain `jit`: batch, heads and queries stay where they are, keys are whole.

Each pass is wrapped in JAX's `custom_partitioning`, so that the compiler neither gathers batch or heads nor cuts a
kernel in two. A sharding rule lets shardings flow through the call; when they are settled, `_layout` decides from them
how each array lies, and what one device runs on its part: the pass itself, of some rows where queries are cut, with a
key/value head picked where these are fewer than the devices, and sums over the devices for gradients that all of them
share.
"""

import functools
import string
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from flash_jax import compat
from flash_jax.spec import AttentionSpec

# The dims of each array after the leading ones: "t" and "s" are lengths ("c", too, is S, of what belongs to the keys),
# "h" and "k" heads, "d" and "e" head dims. What is not listed has no dim that can be cut.
_DIMS = {
    "query": "thd", "key": "ckd", "value": "cke", "out": "the", "lse": "ht", "bias": "hts", "mask": "hts",
    "alibi_slopes": "h", "sinks": "h", "dropout_words": "hw", "block_map": "hxy", "mod_heads": "h",
    "q_positions": "t", "q_segment_ids": "t", "kv_positions": "c", "kv_segment_ids": "c",
}  # fmt: skip
_CUT = "hkt"  # the dims, besides the leading ones, over which arrays may be sharded

_MANUAL_IN_PART = (
    "flash_attention inside a `jax.shard_map` over some axes of the mesh has inputs that are sharded over its other "
    "axes. Let `shard_map` be over all of the axes that shard the inputs."
)

Axes = tuple[str, ...]


class Array(NamedTuple):
    """One array of a pass: its name (of an input, "out" or "lse") and its shape, with `lead` leading dims."""

    name: str
    shape: tuple[int, ...]
    lead: int

    def letters(self) -> list[str | None]:
        """A letter for each dim, equal in all arrays of the pass; None for what is not cut and flows nowhere."""
        own = self.shape[self.lead :]
        named = _DIMS.get(self.name, "").ljust(len(own))
        lead = [f"lead{d}" if n > 1 else None for d, n in enumerate(self.shape[: self.lead])]
        return lead + [c if c != " " and n > 1 else None for c, n in zip(named, own, strict=True)]


class Layout(NamedTuple):
    """How a pass is cut: over which mesh axes each leading dim, the heads of query and of key, queries, and keys."""

    lead: tuple[Axes, ...]
    heads: Axes
    kv_heads: Axes
    rows: Axes = ()
    keys: Axes = ()

    def spec(self, x: Array) -> P:
        """The partition of one array."""
        return P(*(axes or None for axes in self._axes(x)))

    def _axes(self, x: Array) -> list[Axes]:
        named = {f"lead{d}": a for d, a in enumerate(self.lead)}
        named |= {"h": self.heads, "k": self.kv_heads, "t": self.rows, "c": self.keys}
        return [named.get(c or "", ()) for c in x.letters()]

    def missing(self, x: Array) -> Axes:
        """The axes over which the work is cut and x is not: what devices find of x must be summed up over them."""
        own = {axis for axes in self._axes(x) for axis in axes}
        return tuple(axis for axes in (*self.lead, self.heads, self.rows) for axis in axes if axis not in own)


def over_mesh(run: Callable, of_rows: Callable, inputs: Sequence[str], outputs: Sequence[str], sums: bool) -> Callable:
    """`run(*arrays) -> tuple` as it runs on each device of a mesh.

    Args:
      run: a pass, for whole arrays or for the part of one device.
      of_rows: `of_rows(sizes, row, *arrays)` is the pass for rows from `row` of a call whose (T, S) are `sizes`.
      inputs, outputs: the name of each array. Arrays of out's shape are all called "out", of lse's "lse".
      sums: whether outputs are gradients, which devices that share an input add up.
    """

    def wrapped(*args):
        # Explicit axes have been seen to (`on_explicit_axes`), and what is traced for one device must not name them.
        if jax.sharding.AxisType.Explicit in jax.sharding.get_abstract_mesh().axis_types:
            return run(*args)
        lead = args[0].ndim - 3
        results = jax.eval_shape(run, *args)
        ins = [Array(name, x.shape, lead) for name, x in zip(inputs, args, strict=True)]
        outs = [Array(name, x.shape, lead) for name, x in zip(outputs, results, strict=True)]
        sizes = args[0].shape[lead], args[1].shape[lead]  # here, as JAX keeps the closure, and tracers with it

        def partition(mesh, arg_shapes, result_shapes):
            shardings = [x.sharding for x in arg_shapes]
            if not all(isinstance(x, NamedSharding) for x in shardings):  # inside a shard_map over some of the axes
                if any(x.sharding.shard_shape(x.shape) != x.shape for x in arg_shapes):
                    raise NotImplementedError(_MANUAL_IN_PART)
                return mesh, run, tuple(x.sharding for x in result_shapes), tuple(shardings)
            layout = _layout(mesh, ins, [x.spec for x in shardings])
            placed = [tuple(NamedSharding(mesh, layout.spec(x)) for x in side) for side in (outs, ins)]
            return mesh, _local(run, ins, outs, layout, mesh, sums, functools.partial(of_rows, sizes)), *placed

        partitioned = custom_partitioning(lambda *xs: tuple(run(*xs)))
        rule, whole = _rule(ins, outs)
        partitioned.def_partition(partition=partition, sharding_rule=rule, need_replication_factors=whole)
        return partitioned(*args)

    return wrapped


def check_explicit(inputs: Sequence[str], args: Sequence[jax.Array], context: str | None = None) -> None:
    """Raises NotImplementedError for an input whose type says that more than batch and heads is sharded.

    With a `context` axis, lengths may be sharded over that.
    """
    for name, x in zip(inputs, args, strict=True):
        letters = Array(name, x.shape, args[0].ndim - 3).letters()
        for dim, (letter, axes) in enumerate(zip(letters, compat.explicit_part(jax.typeof(x)), strict=False)):
            of_sequence = letter in ("t", "c")
            if axes and (not _is_cut(letter) or of_sequence) and not (of_sequence and axes == (context,)):
                raise NotImplementedError(
                    f"Dim {dim - x.ndim} of `{_said(name)}` is sharded over the explicit mesh axes {list(axes)}; "
                    "flash_attention keeps batch dims and heads sharded, and needs the others whole. Call "
                    "`jax.sharding.reshard` on it first, or name the axis of a sharded sequence as `context_axis`."
                )


def _said(name: str) -> str:
    """What the user calls an input."""
    return f"mod_operands[{name[5:]}]" if name.startswith("mods.") else name


def _is_cut(letter: str | None) -> bool:
    return letter is not None and (letter.startswith("lead") or letter in _CUT)


def on_explicit_axes(
    run: Callable, names: tuple[Sequence[str], Sequence[str], bool], args: Sequence[jax.Array], check_vma: bool
) -> tuple[jax.Array, ...]:
    """`run(*args)`, in a `shard_map` where types say that inputs are sharded; `names`: (inputs, outputs, sums)."""
    if not any(compat.explicit_axes(jax.typeof(x)) for x in args):
        return run(*args)
    inputs, outputs, sums = names
    check_explicit(inputs, args)
    mesh, lead = jax.sharding.get_abstract_mesh(), args[0].ndim - 3
    ins = [Array(name, x.shape, lead) for name, x in zip(inputs, args, strict=True)]
    outs = [Array(name, x.shape, lead) for name, x in zip(outputs, jax.eval_shape(run, *args), strict=True)]
    layout = _layout(mesh, ins, [P(*compat.explicit_part(jax.typeof(x))) for x in args])
    in_specs, out_specs = (tuple(layout.spec(x) for x in side) for side in (ins, outs))
    args = [jax.sharding.reshard(x, s) for x, s in zip(args, in_specs, strict=True)]
    # Over the automatic axes of a mixed mesh, too, whose shardings are not known here: inputs are whole along these.
    axes = compat.own_axes(mesh)
    local = _local(run, ins, outs, layout, mesh, sums)
    return jax.shard_map(local, in_specs=in_specs, out_specs=out_specs, axis_names=axes, check_vma=check_vma)(*args)


def on_context_axis(
    run: Callable, names: Sequence[str], args: Sequence[jax.Array], spec: AttentionSpec
) -> tuple[jax.Array, jax.Array]:
    """`run(*args) -> (out, lse)` of each device's part of the sequences, in a `shard_map` if this is not one."""
    mesh, axis = jax.sharding.get_abstract_mesh(), spec.context_axis
    types = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    if types[axis] == jax.sharding.AxisType.Manual:
        return run(*args)
    check_explicit(names, args, axis)
    q, _, v = args[:3]
    lead = q.ndim - 3
    ins = [Array(name, x.shape, lead) for name, x in zip(names, args, strict=True)]
    out, lse = Array("out", (*q.shape[:-1], v.shape[-1]), lead), Array("lse", (*q.shape[:-3], *q.shape[-2:-4:-1]), lead)
    layout = _layout(mesh, ins, [P(*compat.explicit_part(jax.typeof(x))) for x in args], without=axis)
    layout = layout._replace(rows=(axis,), keys=(axis,))
    in_specs, out_specs = tuple(layout.spec(x) for x in ins), (layout.spec(out), layout.spec(lse))
    args = [jax.sharding.reshard(x, s) for x, s in zip(args, in_specs, strict=True)]
    axes = compat.own_axes(mesh)
    local = _local(run, ins, [out, lse], layout, mesh, False)
    checked = not spec.interpret
    return jax.shard_map(local, in_specs=in_specs, out_specs=out_specs, axis_names=axes, check_vma=checked)(*args)


def heads_of_device(q: jax.Array, k: jax.Array, context: str) -> tuple[int, int]:
    """Heads of query and of key that each device has, by what types say of axes other than `context`."""
    mesh = jax.sharding.get_abstract_mesh()
    ins = [Array(name, x.shape, q.ndim - 3) for name, x in (("query", q), ("key", k))]
    layout = _layout(mesh, ins, [P(*compat.explicit_part(jax.typeof(x))) for x in (q, k)], without=context)
    count = _count(mesh, layout.heads)
    return q.shape[-2] // count, max(1, k.shape[-2] // count) if layout.heads else k.shape[-2]


def _rule(ins: list[Array], outs: list[Array]) -> tuple[str, tuple[str, ...]]:
    """The sharding rule in the notation of `custom_partitioning`, and its factors that must not be cut, in order."""
    factors: dict[str, str] = {}
    whole: list[str] = []

    def factor(letter):
        name = f"u{len(factors)}" if letter is None else letter
        if name not in factors:
            factors[name] = string.ascii_lowercase[len(factors)] if len(factors) < 26 else f"z{len(factors)}"
            if letter is None or letter in string.ascii_lowercase and letter not in _CUT:
                whole.append(factors[name])
        return factors[name]

    sides = [", ".join(" ".join(factor(c) for c in x.letters()) for x in side) for side in (ins, outs)]
    return " -> ".join(sides), tuple(whole)


def _layout(mesh: Any, ins: list[Array], specs: list[P], without: str | None = None) -> Layout:
    """The layout that follows from how the inputs lie: the first that is cut along a dim decides.

    Batch and heads are not cut over the axis `without`.
    """
    free = set(mesh.axis_names) - {without}
    found: dict[str, Axes] = {}
    for x, spec in zip(ins, specs, strict=True):
        padded = (*spec, *(None,) * (len(x.shape) - len(spec)))
        for letter, size, axes in zip(x.letters(), x.shape, padded, strict=True):
            axes = axes if isinstance(axes, tuple) else () if axes is None else (axes,)
            fits = axes and free.issuperset(axes) and size % _count(mesh, axes) == 0
            if not letter or not _is_cut(letter) or not fits or letter in found or letter == "k" and "h" in found:
                continue
            found[letter] = axes
            free -= set(axes)
    query, key = ins[0], ins[1]
    H, K = query.shape[-2], key.shape[-2]
    heads = found.get("h", found.get("k", ()))
    count = _count(mesh, heads)
    if K % count == 0:
        kv_heads = heads
    elif H % count == 0 and (H // K) % (H // count) == 0:
        kv_heads = ()  # the query heads of a device share one key/value head, which it picks
    else:
        heads = kv_heads = ()
    return Layout(tuple(found.get(f"lead{d}", ()) for d in range(query.lead)), heads, kv_heads, found.get("t", ()))


def _count(mesh: Any, axes: Axes) -> int:
    """Devices along axes."""
    n = 1
    for axis in axes:
        n *= mesh.shape[axis]
    return n


def _local(
    run: Callable,
    ins: list[Array],
    outs: list[Array],
    layout: Layout,
    mesh: Any,
    sums: bool,
    of_rows: Callable | None = None,
) -> Callable:
    """What one device runs on its part: `of_rows(row, *arrays)` where rows are cut, else `run(*arrays)`."""
    picks = bool(layout.heads) and not layout.kv_heads
    kv_heads = ins[1].shape[-2]

    def local(*args):
        mine = 0
        if picks:
            mine = lax.axis_index(layout.heads) * kv_heads // _count(mesh, layout.heads)
            args = [_pick(x, a, mine) for x, a in zip(args, ins, strict=True)]
        if of_rows and layout.rows:
            results = list(of_rows(lax.axis_index(layout.rows) * args[0].shape[ins[0].lead], *args))
        else:
            results = list(run(*args))
        for n, x in enumerate(outs if sums else ()):
            if picks and x.name in ("key", "value"):
                whole = jnp.zeros((*results[n].shape[:-2], kv_heads, results[n].shape[-1]), results[n].dtype)
                results[n] = lax.dynamic_update_slice_in_dim(whole, results[n], mine, whole.ndim - 2)
            if missing := layout.missing(x):
                wide = results[n].astype(np.promote_types(results[n].dtype, np.float32))
                results[n] = lax.psum(wide, missing).astype(results[n].dtype)
        return tuple(results)

    return local


def _pick(x: jax.Array, array: Array, mine) -> jax.Array:
    """The one key/value head that a device needs."""
    if array.name not in ("key", "value"):
        return x
    return lax.dynamic_slice_in_dim(x, mine, 1, axis=x.ndim - 2)
