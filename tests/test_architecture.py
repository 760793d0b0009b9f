"""The house keeps its shape: who imports whom, JAX's internals stay in compat.py, no assert in the package."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "flash_jax"
FILES = {str(file.relative_to(PACKAGE)): ast.parse(file.read_text()) for file in sorted(PACKAGE.rglob("*.py"))}

# Imports run downward. A room is a file or a folder of the package; it may import itself and these.
MAY_IMPORT = {
    "__init__": ["attention", "varlen", "jax_nn", "dropout", "block_mask", "inspect", "tuning", "spec", "zigzag"],
    "zigzag": [],
    "varlen": ["attention", "validate", "spec"],
    "jax_nn": ["attention", "spec"],
    "dropout": ["validate", "tiles.dropout"],
    "inspect": [
        "arguments",
        "validate",
        "select",
        "partition",
        "explanation",
        "picture",
        "triton.tiling",
        "tiles",
        "spec",
        "compat",
    ],
    "tuning": ["arguments", "validate", "select", "inspect", "triton", "tiles", "spec", "compat"],
    "explanation": ["tiles.survey", "triton.tiling"],
    "picture": ["tiles.survey"],
    "attention": ["arguments", "validate", "spec", "op", "select", "reference", "eager"],
    "eager": ["spec"],
    "arguments": ["validate", "context_parallel", "partition", "mods", "spec", "tiles.dropout"],
    "mods": ["spec", "tiles.mods", "tiles.reads", "compat"],
    "block_mask": ["mods", "spec", "tiles.mods"],
    "validate": ["spec"],
    "op": [
        "select",
        "partition",
        "context_parallel",
        "parts",
        "xla",
        "tiles.sums",
        "tiles.reads.wanted_reads",
        "spec",
        "compat",
    ],  # higher orders differentiate the code of xla
    "partition": ["spec", "compat"],
    "context_parallel": ["parts", "spec", "compat"],
    "parts": ["spec", "tiles.masks", "compat"],
    "select": ["xla", "triton", "mosaic_gpu", "spec", "compat"],
    "xla": ["tiles", "spec", "compat"],
    "triton": ["tiles", "spec", "compat"],
    "mosaic_gpu": ["tiles", "spec", "compat"],
    "tiles": ["spec", "compat.vary_like"],
    "reference": ["spec", "tiles.dropout"],  # shares no code with what it judges but the random bits
    "spec": [],
    "compat": [],
    "flax": ["flash_attention", "BlockSizes"],  # the public names alone
}


def imports(tree: ast.Module) -> set[str]:
    """Whatever a file imports, by its full name: {"jax", "flash_jax.spec.BlockSizes", ...}."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {f"{'.' * node.level}{node.module or ''}.{alias.name}" for alias in node.names}
    return found


def is_in(name: str, parents: list[str]) -> bool:
    """Whether a dotted name is one of `parents` or inside one of them."""
    return any(f"{name}.".startswith(f"{parent}.") for parent in parents)


@pytest.mark.parametrize("file", FILES)
def test_imports_run_downward(file):
    room = Path(file).with_suffix("").parts[0]
    permitted = [f"flash_jax.{other}" for other in [room, *MAY_IMPORT[room]]]
    ours = {name for name in imports(FILES[file]) if name.startswith(".") or is_in(name, ["flash_jax"])}
    assert [name for name in sorted(ours) if not is_in(name, permitted)] == []


@pytest.mark.parametrize("file", [file for file in FILES if file.startswith("tiles/")])
def test_tiles_know_no_backend(file):
    assert [name for name in imports(FILES[file]) if "pallas" in name] == []


@pytest.mark.parametrize("file", [file for file in FILES if file != "compat.py"])
def test_only_compat_knows_what_jax_does_not_promise(file):
    attributes = {ast.unparse(node) for node in ast.walk(FILES[file]) if isinstance(node, ast.Attribute)}
    private = ["jax._src", "jax.__version__", "jax.__version_info__", "jax.version", "jaxlib"]
    assert [name for name in sorted(attributes | imports(FILES[file])) if is_in(name, private)] == []


@pytest.mark.parametrize("file", FILES)
def test_errors_are_raised_not_asserted(file):
    assert [node.lineno for node in ast.walk(FILES[file]) if isinstance(node, ast.Assert)] == []
