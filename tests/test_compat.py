"""Each entry of `flash_jax.compat`, on whatever version of JAX runs the tests."""

import re
import subprocess
import sys
import warnings

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec

import flash_jax
from flash_jax import compat
from tests.support import gpu_compile


def test_an_older_jax_is_refused_by_name():
    code = "import jax; jax.__version_info__ = (0, 9, 9); jax.__version__ = '0.9.9'; import flash_jax"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stderr.strip().endswith(
        "ImportError: flash_jax needs jax >= 0.10.2; found jax 0.9.9. Run `pip install -U jax`."
    )


def test_only_the_one_warning_is_silenced():
    with pytest.warns(DeprecationWarning, match="something else"), compat.quiet_triton_lowering():
        warnings.warn("The Pallas Triton backend is deprecated and will be removed", DeprecationWarning, stacklevel=1)
        warnings.warn("something else", DeprecationWarning, stacklevel=1)


@pytest.mark.parametrize(
    ("name", "capability"),
    [
        ("NVIDIA A100-SXM4-80GB", "8.0"),
        ("NVIDIA A10G", "8.6"),
        ("NVIDIA RTX A6000", "8.6"),
        ("NVIDIA L4", "8.9"),
        ("NVIDIA H100 80GB HBM3", "9.0"),
        ("NVIDIA H200", "9.0"),
        ("NVIDIA B200", "10.0"),
        ("Tesla T4", "7.5"),
        ("Tesla V100-SXM2-16GB", "7.0"),
        ("NVIDIA of tomorrow", None),
    ],
)
def test_the_gpu_that_is_lowered_for(name, capability):
    with gpu_compile.lowering_for(name):
        assert compat.gpu_description() == (name, capability)


def test_the_version_of_jax():
    assert tuple(map(int, re.findall(r"\d+", compat.jax_version())[:3])) == jax.__version_info__[:3]


def test_without_a_gpu_the_capability_is_not_known():
    assert compat.gpu_description()[1] is None


def test_arrays_vary_alike_inside_shard_map():
    """An array that does not vary over the mesh joins one that does, and outputs can be described like either."""
    mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    seen = []

    def body(x):
        (zero,) = compat.vary_like((jnp.zeros(3),), x)
        seen.extend([compat.manual_axis_type(zero), compat.manual_axis_type(x), compat.shape_like((1,), "float32", x)])
        return x + zero

    out = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=PartitionSpec("x"), out_specs=PartitionSpec("x")))(
        jnp.ones(6)
    )
    assert out.shape == (6,)
    assert seen[0] == seen[1] == seen[2].manual_axis_type
    assert seen[0].varying == {"x"}


def test_constants_stay_in_place():
    """The remainder is a jitted function of JAX's own, of which eager folding would make a part an array."""
    x = jnp.ones((1, 9, 1, 8))
    with jax.ensure_compile_time_eval():
        found = flash_jax.flash_attention(x, x, x, mask_mod=lambda b, h, i, j: (i - j) % 3 == 0)
        with compat.constants_in_place():
            jaxpr = jax.make_jaxpr(lambda i: (i % 5) // 3)(1)
    assert found.shape == x.shape and not jaxpr.consts
    assert all(not eqn.params["jaxpr"].consts for eqn in jaxpr.jaxpr.eqns if "jaxpr" in eqn.params)


def test_explicit_mesh_axes_and_shard_map_over_them():
    mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Explicit,))
    with jax.set_mesh(mesh):
        q = jax.device_put(jnp.ones((2, 5, 2, 8)), jax.NamedSharding(mesh, PartitionSpec("x")))
        assert compat.explicit_axes(jax.typeof(q)) == ["x"] and compat.explicit_part(jax.typeof(q))[0] == ("x",)
        assert jax.jit(flash_jax.flash_attention)(q, q, q).sharding.spec[0] == "x"
        spec = PartitionSpec("x")
        inside = jax.shard_map(flash_jax.flash_attention, in_specs=(spec, spec, spec), out_specs=spec)
        assert jax.jit(inside)(q, q, q).shape == q.shape
