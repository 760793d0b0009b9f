"""The primitives: `forward`, its linear `tangent`, and `backward`, the transpose of `tangent`.

`forward` gives (out, lse). Its jvp binds `tangent`, whose transpose binds `backward`: so grad never runs the tangent
pass, jvp has a fused one, and any nesting of the two works. `tangent` and `backward` take out and lse as independent
inputs, so that their own derivatives are again sums over tiles; those run the differentiable code of xla/.

Conventions. A primitive takes the leaves of (query, key, value, Operands) and then arrays of its own. Every array has
the same number of leading (batch) dims, each of the full size or 1: vmap moves a mapped axis to the front and gives
what is not mapped a size-1 dim, never a copy. Names of differentiable inputs are "query", "key", "value" and fields of
Operands.
"""

import contextlib
import contextvars
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from flash_jax import compat, context_parallel, partition, select, xla
from flash_jax.parts import part_of
from flash_jax.spec import AttentionSpec, Operands
from flash_jax.tiles.reads import wanted_reads
from flash_jax.tiles.sums import sum_to


def attention(
    q: jax.Array, k: jax.Array, v: jax.Array, operands: Operands, spec: AttentionSpec
) -> tuple[jax.Array, jax.Array]:
    """(out, lse) of checked arguments, by whichever implementation `spec` and the platform choose; differentiable."""
    primals = (q, k, v, operands)
    leaves, tree = jax.tree.flatten(primals)
    if spec.context_axis is not None:
        part = functools.partial(_part, tree=tree, spec=spec)
        return partition.on_context_axis(part, _names(tree), leaves, spec)
    out, lse = _bind(_forward_p, _forward_arrays, leaves, {"tree": tree, "spec": spec})
    return out, lse


def _part(*leaves, tree, spec):
    """`attention` of one device, which has a part of the sequences."""
    if spec.context_strategy == "heads":
        q, k, v, operands = tree.unflatten(leaves)
        return context_parallel.by_heads(attention, q, k, v, operands, spec)
    out, lse = _bind(_forward_p, _forward_arrays, leaves, {"tree": tree, "spec": spec})
    return out, lse


def _bind(p: Primitive, arrays, args, params) -> tuple[jax.Array, ...]:
    """Binds a primitive, on each device by itself where the types of `args` say that they are sharded."""

    def run(*args):
        return tuple(p.bind(*compat.vary_like(tuple(args), args), **params))

    # JAX's interpreter of kernels does not say how its values vary over a mesh.
    return partition.on_explicit_axes(run, arrays(**params), args, check_vma=not params["spec"].interpret)


def _names(tree) -> list[str]:
    """Name of each leaf of (query, key, value, Operands)."""
    *_, operands = tree.unflatten(range(tree.num_leaves))
    names = {index: name for name, index in operands.items()}
    return ["query", "key", "value", *(names[i] for i in range(3, tree.num_leaves))]


def _lead(arrays) -> tuple[int, ...]:
    """The leading dims that arrays broadcast to: as many of each as the first, a query, has before its own three."""
    count = arrays[0].ndim - 3
    return np.broadcast_shapes(*(x.shape[:count] for x in arrays))


# The three passes as functions of arrays: abstract evaluation, and what runs on a platform.


def _forward_shapes(*leaves, tree, spec):
    q, _, v = leaves[:3]
    lead = _lead(leaves)
    T, H = q.shape[-3:-1]
    stats = np.promote_types(q.dtype, np.float32)
    return (
        compat.replicated_like(q, (*lead, T, H, v.shape[-1]), q.dtype),
        compat.replicated_like(q, (*lead, H, T), stats),
    )


def _tangent_shapes(*args, tree, names, spec):
    n = tree.num_leaves
    out, lse, *tangents = args[n:]
    lead = _lead([out, lse, *tangents])
    return tuple(x.update(shape=lead + x.shape[x.ndim - rank :]) for x, rank in ((out, 3), (lse, 2)))


def _backward_shapes(*args, tree, wanted, has_lse_ct, spec):
    leaves = dict(zip(_names(tree), args[: tree.num_leaves], strict=True))
    wanted_reads(spec.score_mod, dict(wanted))  # raises for what has no gradient
    leads = _gradient_leads(args, wanted)
    return tuple(leaves[name].update(shape=leads[name] + leaves[name].shape[len(leads[name]) :]) for name, _ in wanted)


def _gradient_leads(args, wanted) -> dict[str, tuple[int, ...]]:
    """Leading dims of each wanted gradient: the full size where it keeps the dim, else 1 (summed over)."""
    lead = _lead(args)
    return {name: tuple(m if keep else 1 for m, keep in zip(lead, keeps, strict=True)) for name, keeps in wanted}


def _run_forward(*leaves, tree, spec, platform):
    q, k, v, operands = tree.unflatten(leaves)
    shapes = _forward_shapes(*map(jax.typeof, leaves), tree=tree, spec=spec)
    if _empty(q, k, shapes[0]):
        lse = -jnp.inf if operands.sinks is None else operands.sinks[..., None]
        nothing = (jnp.broadcast_to(x, s.shape).astype(s.dtype) for s, x in zip(shapes, (0, lse), strict=True))
        return compat.vary_like(tuple(nothing), leaves)
    run = select.choose(spec, q, k, v, platform).forward
    if spec.context_axis is not None:
        return context_parallel.forward(run, q, k, v, operands, spec)
    return run(q, k, v, operands, spec)


def _run_tangent(*args, tree, names, spec, platform):
    n = tree.num_leaves
    primals, (out, lse, *tangents) = tree.unflatten(args[:n]), args[n:]
    shapes = _tangent_shapes(*map(jax.typeof, args), tree=tree, names=names, spec=spec)
    dots = dict(zip(names, tangents, strict=True))
    if _empty(primals[0], primals[1], shapes[0]):
        d_lse = dots["sinks"][..., None] if "sinks" in dots else 0
        nothing = (jnp.broadcast_to(x, s.shape).astype(s.dtype) for s, x in zip(shapes, (0, d_lse), strict=True))
        return compat.vary_like(tuple(nothing), args)
    q, k, v, _ = primals
    implementation = xla if platform is None else select.choose(spec, q, k, v, platform)
    if spec.context_axis is not None:
        return context_parallel.tangent(implementation.tangent, primals, out, lse, dots, spec)
    return implementation.tangent(primals, out, lse, dots, spec)


def _run_backward(*args, tree, wanted, has_lse_ct, spec, platform):
    n = tree.num_leaves
    primals, (out, lse, out_ct, *rest) = tree.unflatten(args[:n]), args[n:]
    shapes = _backward_shapes(*map(jax.typeof, args), tree=tree, wanted=wanted, has_lse_ct=has_lse_ct, spec=spec)
    lse_ct = rest[0] if has_lse_ct else None
    if _empty(primals[0], primals[1], out_ct):
        zeros = {name: jnp.zeros(s.shape, s.dtype) for (name, _), s in zip(wanted, shapes, strict=True)}
        if "sinks" in zeros and lse_ct is not None:  # lse is the sink
            zeros["sinks"] += sum_to(lse_ct.sum(-1), zeros["sinks"].shape)
        return compat.vary_like(tuple(zeros.values()), args)
    q, k, v, _ = primals
    implementation = xla if platform is None else select.choose(spec, q, k, v, platform)
    cts, leads = (out_ct, lse_ct), _gradient_leads(args, wanted)
    if spec.context_axis is not None:
        if platform is None:  # to be differentiated again, which a ring would do with its loop
            spec = dataclasses.replace(spec, context_strategy="all_gather")
        gradients = context_parallel.backward(implementation.backward, primals, out, lse, cts, leads, spec)
    else:
        gradients = implementation.backward(primals, out, lse, *cts, leads, spec)
    return tuple(gradients[name] for name, _ in wanted)


def _empty(q, k, out) -> bool:
    """Nothing to attend, or nothing that attends."""
    return 0 in q.shape or 0 in k.shape or 0 in out.shape


# Each pass as a primitive.

_evaluating = contextvars.ContextVar("flash_jax_evaluating", default=False)


def _primitive(name: str, shapes, run, arrays) -> Primitive:
    """A primitive that lowers to `run(platform="cuda")` for NVIDIA GPUs and to `run(platform="other")` elsewhere.

    `arrays(**params)` names its inputs and outputs for `partition.over_mesh`.
    """
    p = Primitive(name)
    p.multiple_results = True
    p.def_abstract_eval(shapes)

    # Outside jit: one jitted function for each set of parameters, or every call would compile anew.
    @functools.cache
    def jitted(**params):
        return jax.jit(lambda *args: p.bind(*args, **params))

    def impl(*args, **params):
        # Where JAX does not jit (disable_jit, and when debug_nans looks for a culprit), bind would come back here.
        disabled = jax.config.jax_disable_jit  # pyright: ignore[reportAttributeAccessIssue]
        if disabled or _evaluating.get():
            return run(*args, platform=compat.platform_of(args[0]), **params)
        token = _evaluating.set(True)
        try:
            return jitted(**params)(*args)
        finally:
            _evaluating.reset(token)

    p.def_impl(impl)

    # Inside, too: layers that make the same call share one traced and lowered function.
    @functools.cache
    def local(**params):
        def f(*args):
            return run(*args, **params)

        f.__name__ = name
        return jax.jit(f)

    def of_rows(platform, params, sizes, row, *args):
        """The pass for the rows of one device; `args` are its arrays."""
        tree, spec = params["tree"], dataclasses.replace(params["spec"], whole=sizes)
        q, k, v, operands = tree.unflatten(args[: tree.num_leaves])
        operands, spec = part_of(q, k, operands, spec, row, 0)
        leaves, tree_of_part = jax.tree.flatten((q, k, v, operands))
        run = local(platform=platform, **params | {"tree": tree_of_part, "spec": spec})
        return run(*leaves, *args[tree.num_leaves :])

    def lower(ctx, *args, platform, **params):
        f = local(platform=platform, **params)
        if params["spec"].context_axis is None:  # else this is one device's, and speaks to the others itself
            f = partition.over_mesh(f, functools.partial(of_rows, platform, params), *arrays(**params))
        with compat.quiet_triton_lowering(), compat.some_gpu() if platform == "cuda" else contextlib.nullcontext():
            return mlir.lower_fun(f, multiple_results=True)(ctx, *args)

    mlir.register_lowering(p, functools.partial(lower, platform="other"))
    mlir.register_lowering(p, functools.partial(lower, platform="cuda"), platform="cuda")
    batching.primitive_batchers[p] = functools.partial(_batch, p, arrays)
    compat.lower_with_devices(p)
    return p


def _batch(p, arrays, args, dims, **params):
    """The mapped axis becomes one more leading dim; what is not mapped gets size 1 there."""
    args = [x[None] if d is None else jnp.moveaxis(x, d, 0) for x, d in zip(args, dims, strict=True)]
    if "wanted" in params:  # each example's own gradient, also of an input that is not mapped; only a transpose sums
        params["wanted"] = tuple((name, (True, *keeps)) for name, keeps in params["wanted"])
    outs = _bind(p, arrays, args, params)
    return outs, (0,) * len(outs)


def _forward_arrays(tree, spec):
    return _names(tree), ("out", "lse"), False


def _tangent_arrays(tree, names, spec):
    return (*_names(tree), "out", "lse", *names), ("out", "lse"), False


def _backward_arrays(tree, wanted, has_lse_ct, spec):
    rest = ("out", "lse", "out", *(("lse",) if has_lse_ct else ()))
    return (*_names(tree), *rest), tuple(name for name, _ in wanted), True


_forward_p = _primitive("flash_attention_forward", _forward_shapes, _run_forward, _forward_arrays)
_tangent_p = _primitive("flash_attention_tangent", _tangent_shapes, _run_tangent, _tangent_arrays)
_backward_p = _primitive("flash_attention_backward", _backward_shapes, _run_backward, _backward_arrays)


# Derivatives.


def _forward_jvp(primals, tangents, *, tree, spec):
    # Named here, on the values that both the caller and the tangent (so the backward pass) use: a checkpoint policy
    # that saves the names then saves running forward again.
    out, lse = _forward_p.bind(*primals, tree=tree, spec=spec)
    out, lse = checkpoint_name(out, "flash_attention_out"), checkpoint_name(lse, "flash_attention_lse")
    live = [(name, t) for name, t in zip(_names(tree), tangents, strict=True) if type(t) is not ad.Zero]
    if not live:
        zero = ad.Zero.from_primal_value  # pyright: ignore[reportAttributeAccessIssue]
        return (out, lse), (zero(out), zero(lse))
    names, values = zip(*live, strict=True)
    return (out, lse), _tangent_p.bind(*primals, out, lse, *values, tree=tree, names=names, spec=spec)


def _tangent_transpose(cts, *args, tree, names, spec):
    n = tree.num_leaves
    out_ct, lse_ct = cts
    primals, (out, lse, *linear) = args[:n], args[n:]
    avals = [x.aval if ad.is_undefined_primal(x) else None for x in linear]
    lead = _lead([out, out_ct if type(out_ct) is not ad.Zero else out_ct.aval])
    wanted = tuple(
        (name, tuple(m == full for m, full in zip(aval.shape[: len(lead)], lead, strict=True)))
        for name, aval in zip(names, avals, strict=True)
        if aval is not None
    )
    has_lse_ct = type(lse_ct) is not ad.Zero
    more = (lse_ct,) if has_lse_ct else ()
    gradients = iter(
        _backward_p.bind(
            *primals, out, lse, ad.instantiate_zeros(out_ct), *more,
            tree=tree, wanted=wanted, has_lse_ct=has_lse_ct, spec=spec,
        )
    )  # fmt: skip
    return (None,) * (n + 2) + tuple(None if aval is None else next(gradients) for aval in avals)


def _jvp_through_xla(p, run):
    """A jvp rule that takes the value from `p` and differentiates `run` of xla/ for the tangent."""

    def rule(primals, tangents, **params):
        active = [i for i, t in enumerate(tangents) if type(t) is not ad.Zero]

        def f(*values):
            args = list(primals)
            for i, value in zip(active, values, strict=True):
                args[i] = value
            return run(*args, platform=None, **params)

        _, outs_dot = jax.jvp(f, tuple(primals[i] for i in active), tuple(tangents[i] for i in active))
        return p.bind(*primals, **params), outs_dot

    return rule


ad.primitive_jvps[_forward_p] = _forward_jvp
ad.primitive_transposes[_tangent_p] = _tangent_transpose
ad.primitive_jvps[_tangent_p] = _jvp_through_xla(_tangent_p, _run_tangent)
ad.primitive_jvps[_backward_p] = _jvp_through_xla(_backward_p, _run_backward)
