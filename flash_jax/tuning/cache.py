"""Sizes that were found, kept on disk: a folder with a JSON file for each pass of each kind of call.

A file is written beside its place and then moved there, so that readers see all of it or nothing, and processes that
tune at once do not undo each other's work. One that cannot be read is a warning, and is written anew.
"""

import contextlib
import functools
import hashlib
import json
import math
import os
import re
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

from flash_jax import compat, tiles, triton
from flash_jax.arguments import Call
from flash_jax.spec import AttentionSpec, Mod
from flash_jax.triton.tiling import Tile, padded
from flash_jax.tuning.search import Found

_MULTIPLE = 128  # of which lengths are, or are not: the largest block
Key = dict[str, Any]


def default_folder() -> Path:
    """Where caches lie on this platform, by its convention."""
    if sys.platform == "win32":
        base = os.environ.get("LOCALAPPDATA")
        return (Path(base) if base else Path.home() / "AppData" / "Local") / "flash_jax"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "flash_jax"
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (base if base.is_absolute() else Path.home() / ".cache") / "flash_jax"


def key_of(name: str, call: Call, gpu: tuple[str, str]) -> Key:
    """What the best sizes of a pass may depend on: the GPU, the software, dtype and dims, sizes in powers of two,
    and which options there are, but not the values that these have.
    """
    q, k, v, operands, spec = call
    T, H, D = q.shape[-3:]
    S, K, Dv = v.shape[-3:]
    examples = q.size // (T * H * D)
    return {
        "pass": name,
        "gpu": list(gpu),
        "jax": compat.jax_version(),
        "kernels": _generation(),
        "dtype": q.dtype.name,
        "head_dims": [D, Dv],
        "queries_of_a_key_head": H // K,
        "lengths": [padded(T), padded(S)],
        "whole_tiles": [T % _MULTIPLE == 0, S % _MULTIPLE == 0],
        "batch_times_heads": padded(examples * H),
        "options": _options(spec),
        "arrays": {name: _kind(name, x, (examples, H, T, S)) for name, x in sorted(operands.items())},
    }


@functools.cache
def _generation() -> str:
    """A hash of the source of the kernels, so that what was found for others is not taken."""
    found = hashlib.sha256()
    for module in (triton, tiles):
        for folder in module.__path__:
            for file in sorted(Path(folder).glob("*.py")):
                found.update(file.read_bytes())
    return found.hexdigest()[:16]


def _options(spec: AttentionSpec) -> dict[str, Any]:
    """The static options that are on; of those that are lengths, too, the power of two."""
    lengths = {"chunk_size": spec.chunk_size}
    lengths |= dict(zip(("left", "right"), spec.window or (None, None), strict=True))
    on = {
        "causal": spec.causal,
        "softcap": spec.softcap is not None,
        "dropout": spec.dropout_rate > 0,
        "prefix_length": spec.prefix_length is not None,
        "q_offset": spec.q_offset is not None,
        "q_length": spec.q_length is not None,
        "kv_length": spec.kv_length is not None,
        **{name: padded(n) for name, n in lengths.items() if n is not None},
        **{name: _of_mod(getattr(spec, name)) for name in ("score_mod", "mask_mod")},
        "precision": spec.precision if spec.precision != "x3" else None,
    }
    return {name: value for name, value in sorted(on.items()) if value}


def _of_mod(mod: Mod | None) -> str | None:
    """A hash of what a function does: each is a kernel of its own. Addresses in its text are another each time."""
    if mod is None:
        return None
    return hashlib.sha256(re.sub("0x[0-9a-f]+", "", str(mod.jaxpr)).encode()).hexdigest()[:16]


def _kind(name: str, x: Any, sizes: tuple[int, int, int, int]) -> str:
    """The dtype of an operand, and for bias and mask along which of examples, heads, queries and keys it has entries.

    Also whether a bias is shared by an even number of examples, of which two may be in one program then.
    """
    if name not in ("bias", "mask"):
        return x.dtype.name
    own = math.prod(x.shape[:-3]), *x.shape[-3:]
    along = "".join(letter for letter, n, full in zip("BHTS", own, sizes, strict=True) if n == full)
    pairs = " in pairs" if name == "bias" and own[0] < sizes[0] and sizes[0] // own[0] % 2 == 0 else ""
    return f"{x.dtype.name} {along}{pairs}"


class Cache:
    """The folder of files; none where `folder` is None."""

    def __init__(self, folder: Path | None):
        self.folder = folder

    def load(self, key: Key, seconds: float) -> tuple[Tile | None] | None:
        """(the tile, None for the table's), or None where none is kept, or was searched for in less than `seconds`."""
        if self.folder is None:
            return None
        path = self.folder / _file(key)
        try:
            kept = json.loads(path.read_text(encoding="utf-8"))
            same, enough = kept["key"] == key, kept["complete"] or kept["seconds"] >= seconds
            tile = None if kept["tile"] is None else _tile(kept["tile"])
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
            _warn(f"{path} cannot be read, and the search is made again ({type(error).__name__}: {error})")
            return None
        return (tile,) if same and enough else None

    def store(self, key: Key, found: Found, seconds: float) -> None:
        """Keeps what was found in that many seconds."""
        if self.folder is None:
            return
        kept = {
            "key": key,
            "tile": None if found.tile is None else list(vars(found.tile).values()),
            "table": list(vars(found.own).values()),
            "ms": found.ms,
            "table_ms": found.own_ms,
            "tried": found.tried,
            "complete": found.complete,
            "seconds": seconds,
        }
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            _write(self.folder / _file(key), json.dumps(kept, indent=1) + "\n")
        except OSError as error:
            _warn(f"what was found cannot be kept in {self.folder} ({type(error).__name__}: {error})")


def _file(key: Key) -> str:
    text = json.dumps(key, sort_keys=True)
    return f"{key['pass']}-{hashlib.sha256(text.encode()).hexdigest()[:24]}.json"


def _tile(numbers: Any) -> Tile:
    """The tile of a file; ValueError where that holds something else."""
    if not isinstance(numbers, list) or len(numbers) != 4 or any(type(n) is not int or n < 1 for n in numbers):
        raise ValueError(f"{numbers!r} is no tile")
    return Tile(*numbers)


def _write(path: Path, text: str) -> None:
    """All of the text at once, or nothing."""
    handle, name = tempfile.mkstemp(prefix=f".{path.stem}-", suffix=".tmp", dir=path.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise


def _warn(text: str) -> None:
    warnings.warn(f"flash_jax.tune: {text}.", stacklevel=4)
