"""Builds the wheel and uses it as a stranger would: no extras, an empty environment, outside the checkout.

    python3 scripts/check_wheel.py

`flash_jax` must import and give the right numbers there, and `flash_jax.flax` must say which extra it lacks.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

from run import ROOT, install, make_environment

PROGRAM = """
import importlib.metadata, importlib.util, pathlib, sys
import jax, jax.numpy as jnp
import flash_jax

def must(condition, what):
    if not condition:
        sys.exit(f"check_wheel.py: {what}")

package = pathlib.Path(flash_jax.__file__).parent
must(pathlib.Path(sys.prefix) in package.parents, f"imported from {package}, not from the wheel")
must(importlib.util.find_spec("flax") is None, "flax is there, so this says nothing about its absence")
must(importlib.metadata.version("flash-jax") == flash_jax.__version__, "the wheel and the package differ in version")
must((package / "py.typed").exists(), "py.typed is missing")

q, k, v = jax.random.normal(jax.random.key(0), (3, 2, 33, 4, 16))
allowed = jnp.tril(jnp.ones((33, 33), bool))
dense = lambda q, k, v: jnp.einsum(
    "bhts,bshd->bthd",
    jax.nn.softmax(jnp.where(allowed, jnp.einsum("bthd,bshd->bhts", q, k) / 4, -jnp.inf)), v)
flash = lambda q, k, v: flash_jax.flash_attention(q, k, v, causal=True)
for ours, theirs in zip(*(jax.vjp(f, q, k, v)[1](v) for f in (flash, dense))):
    must(jnp.allclose(ours, theirs, atol=1e-4), "a gradient differs from dense attention's")
must(jnp.allclose(flash(q, k, v), dense(q, k, v), atol=1e-5), "the output differs from dense attention's")

try:
    import flash_jax.flax.linen
except ModuleNotFoundError as error:
    must("flash-jax[flax]" in str(error), f"the message does not name the extra: {error}")
else:
    must(False, "flash_jax.flax.linen imports without flax")
print(f"flash_jax {flash_jax.__version__} from its wheel, jax {jax.__version__}, no flax: agrees with dense attention")
"""


def main() -> None:
    """Builds, installs and runs `PROGRAM`; the exit status is that program's."""
    with tempfile.TemporaryDirectory() as folder:
        wheels = Path(folder, "wheels")
        build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", wheels, ROOT]
        subprocess.run(build, check=True)
        (wheel,) = wheels.glob("flash_jax-*.whl")
        environment = Path(folder, "environment")
        make_environment(environment)
        python = environment / "bin" / "python"
        install(python, str(wheel))
        sys.exit(subprocess.run([python, "-c", PROGRAM], cwd=folder, check=False).returncode)


if __name__ == "__main__":
    main()
