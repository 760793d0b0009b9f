"""What is shipped: a wheel with the package alone, typed and licensed; an import that touches no device."""

import email
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

import flash_jax

ROOT = Path(__file__).resolve().parent.parent


def python(program: str, **environment: str) -> str:
    """What a program prints in a fresh interpreter where warnings are errors."""
    command = [sys.executable, "-W", "error", "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel, built from the checkout without network."""
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    (path,) = folder.glob("*.whl")
    with zipfile.ZipFile(path) as opened:
        yield opened


def test_wheel_holds_the_package_and_nothing_else(wheel):
    shipped = {name for name in wheel.namelist() if ".dist-info/" not in name}
    sources = {
        str(f.relative_to(ROOT)) for f in (ROOT / "flash_jax").rglob("*") if f.suffix in (".py", ".json", ".typed")
    }
    assert shipped == sources
    assert "flash_jax/py.typed" in shipped


def test_wheel_says_what_it_is(wheel):
    (name,) = [name for name in wheel.namelist() if name.endswith(".dist-info/METADATA")]
    metadata = email.message_from_bytes(wheel.read(name))
    assert (metadata["Name"], metadata["Version"]) == ("flash-jax", flash_jax.__version__)
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Requires-Python"] == ">=3.11"
    needed = [r for r in metadata.get_all("Requires-Dist", []) if "extra ==" not in r]
    assert needed == ["jax>=0.10.2"]
    assert {"flax", "examples", "test", "cuda12", "cuda13", "bench"} <= set(metadata.get_all("Provides-Extra", []))
    assert any(name.endswith("/licenses/LICENSE") for name in wheel.namelist())


def test_cuda_extras_bring_the_plugin_and_its_libraries():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for cuda in ("cuda12", "cuda13"):
        assert extras[cuda] == [f"jax[{cuda}]>=0.10.2"]  # jax's own extra pins the plugin, with-cuda, to jax's version


def test_import_asks_for_no_device_and_no_flax():
    # A platform that does not exist: whatever looked for a device would raise.
    program = "import sys, flash_jax; print(sorted({'flax', 'optax'} & set(sys.modules)))"
    assert python(program, JAX_PLATFORMS="nowhere") == "[]"


def test_modules_for_flax_name_the_extra_where_flax_is_missing():
    program = (
        "import sys; sys.modules['flax'] = None\n"
        "try:\n import flash_jax.flax.linen\n"
        "except ImportError as error:\n print(error)"
    )
    assert "pip install 'flash-jax[flax]'" in python(program, JAX_PLATFORMS="cpu")


def test_hooks_run_the_same_ruff_as_the_checks():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    (pinned,) = [requirement for requirement in extras["dev"] if requirement.startswith("ruff==")]
    hooks = (ROOT / ".pre-commit-config.yaml").read_text()
    assert hooks.count(f'"{pinned}"') == hooks.count("additional_dependencies") == 2
