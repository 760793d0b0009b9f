"""What `explain` answers: which implementations run a call, with which tiles, and what is kept; prints as a table."""

import dataclasses

from flash_jax.tiles.survey import Pairs
from flash_jax.triton.tiling import Tile

_PRODUCTS = {
    "ieee": "IEEE float32",
    "x3": "float32 accuracy (on GPUs three TF32 products)",
    "tf32": "one TF32 product on GPUs",
}


@dataclasses.dataclass(frozen=True)
class Target:
    """What runs on one kind of device.

    Attributes:
      name: "cpu", or the name of a GPU.
      why_not: for each implementation, None if it runs the call when it is named, else the reason why not.
      picked: the implementation that `implementation=None` takes; None where that raises an error.
    """

    name: str
    why_not: dict[str, str | None]
    picked: str | None


@dataclasses.dataclass(frozen=True)
class Explanation:
    """What `explain` has found; `str()` is a table.

    Attributes:
      call: the inputs in words.
      named: the implementation that the call names, or None.
      here: what runs on this machine's default device.
      gpu: what runs on an NVIDIA GPU: this machine's, the one that is lowered for, or an unknown one.
      tiles: the `block_q`, `block_kv`, `num_warps` and `num_stages` of triton's passes "forward", "dq", "dkv" and
        "tangent" on that GPU; empty where it does not run there.
      shared_bytes: an estimate of the shared memory that a program of each of these passes asks for.
      pairs: how many pairs of tiles of triton's forward pass are `full` (no mask is evaluated in them), `partial` and
        `skipped`, in all examples and `heads` query heads; None where that is unknown, or `tiles` is empty.
      heads: 1; all of them where a block map has an entry for each.
      unknown: names of the arrays without which `pairs` is unknown: they are traced or abstract.
      precision: how float32 inputs are multiplied: "ieee", "x3" (three TF32 products, float32 accuracy) or "tf32".
      residual_bytes: memory of "out" and "lse", all that the backward pass keeps besides the inputs.
    """

    call: str
    named: str | None
    here: Target
    gpu: Target
    tiles: dict[str, Tile]
    shared_bytes: dict[str, int]
    pairs: Pairs | None
    heads: int
    unknown: tuple[str, ...]
    precision: str
    residual_bytes: dict[str, int]

    def __str__(self) -> str:
        targets = [self.here] if self.here is self.gpu else [self.here, self.gpu]
        reasons: list[str] = []

        def verdict(target, name):
            reason = target.why_not[name]
            if reason is None:
                return "picked" if name == target.picked else "yes"
            if reason not in reasons:
                reasons.append(reason)
            return f"no [{reasons.index(reason) + 1}]"

        heads = [f"this machine ({self.here.name})", self.gpu.name][: len(targets)]
        rows = [["implementation", *heads]]
        rows += [[name, *(verdict(target, name) for target in targets)] for name in self.here.why_not]
        lines = [self.call, "", *_columns(rows)]
        lines += [f"[{n}] {reason}" for n, reason in enumerate(reasons, 1)]
        if self.named is not None:
            runs = ["runs" if t.why_not[self.named] is None else "raises an error" for t in targets]
            on = ", ".join(f"{run} on {head}" for run, head in zip(runs, heads, strict=True))
            lines.append(f"implementation={self.named!r} is named: it {on}")
        return "\n".join([*lines, "", *self._of_tiles(), *self._of_numbers()])

    def _of_tiles(self) -> list[str]:
        if not self.tiles:
            return []
        fields = [field.name for field in dataclasses.fields(Tile)]
        rows = [["triton's tiles", *fields, "shared memory"]]
        for name, tile in self.tiles.items():
            sizes = [str(getattr(tile, field)) for field in fields]
            rows.append([name, *sizes, f"{self.shared_bytes[name] / 1024:.0f} KiB"])
        if self.pairs is None:
            counts = f"unknown, since these have no values here: {', '.join(self.unknown)}"
        else:
            names = zip(Pairs._fields, self.pairs, strict=True)
            parts = [f"{n} {name} ({100 * n / max(self.pairs.total, 1):.1f}%)" for name, n in names]
            of = "one head" if self.heads == 1 else f"all {self.heads} heads"
            counts = f"{', '.join(parts)}; of {of}, all examples"
        return [*_columns(rows), "", f"forward, pairs of tiles: {counts}"]

    def _of_numbers(self) -> list[str]:
        kept = ", ".join(f"{name} {n:,} bytes" for name, n in self.residual_bytes.items())
        return [f"products of float32 inputs: {_PRODUCTS[self.precision]}", f"kept for the backward pass: {kept}"]


def _columns(rows: list[list[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows]
