"""A mask drawn tile by tile: as text, and with matplotlib."""

import dataclasses
import os
from typing import TYPE_CHECKING

import numpy as np

from flash_jax.tiles.survey import FULL, PARTIAL, SKIPPED, ListedSurvey, Pairs, Survey

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MOST = 64  # characters along either side of the text picture
_MOST_DRAWN = 1024  # tiles along either side of the figure
_LINES = 64  # tiles along either side up to which the figure draws their borders
_CHARACTERS = {SKIPPED: ".", PARTIAL: "/", FULL: "#"}
_NAMES = {SKIPPED: "skipped", PARTIAL: "partial: with a mask", FULL: "full: without a mask"}
_COLOURS = {SKIPPED: "#ececec", PARTIAL: "#f2b366", FULL: "#3b6ea8"}


@dataclasses.dataclass(frozen=True)
class MaskPicture:
    """What one head of one example attends, tile by tile; `str()` is a picture of it.

    In the text each character stands for a tile, `#` full, `/` partial, `.` skipped; queries run down, keys across.
    Where there are more than 64 tiles along a side, a character stands for several: `#` if all are full, `.` if all are
    skipped, else `/`.

    Attributes:
      lengths: (T, S).
      blocks: (block_q, block_kv), the sizes of a tile.
      example: the example drawn, by its row-major index over the leading dims.
      head: the query head drawn.
      allowed: bool [T, S], which entries take part, a dense mask, a mask_mod and a bias of -inf included, a -inf that a
        score_mod gives not. None where T or S exceeds 128, and where it is unknown.
      unknown: names of arrays that have no values here, because they are traced or abstract.
      survey: the tiles that each query tile visits; None where that is unknown.
    """

    lengths: tuple[int, int]
    blocks: tuple[int, int]
    example: int
    head: int
    allowed: np.ndarray | None
    unknown: tuple[str, ...]
    survey: Survey | ListedSurvey | None

    @property
    def pairs(self) -> Pairs | None:
        """How many pairs of tiles are full, partial and skipped; None where that is unknown."""
        return None if self.survey is None else self.survey.pairs

    @property
    def tiles(self) -> np.ndarray | None:
        """int8 [query tiles, key tiles]: 2 full, 1 partial, 0 skipped; None where that is unknown."""
        return None if self.survey is None else self.survey.states(0, self.survey.q_tiles)

    def __str__(self) -> str:
        (T, S), (block_q, block_kv) = self.lengths, self.blocks
        lines = [f"T = {T}, S = {S}, tiles of {block_q} x {block_kv}, example {self.example}, head {self.head}"]
        if self.survey is None:
            return "\n".join([*lines, f"unknown, since these have no values here: {', '.join(self.unknown)}"])
        pairs, factors = self.survey.pairs, _factors(self.survey, _MOST)
        lines.append(f"# {pairs.full} full, / {pairs.partial} partial, . {pairs.skipped} skipped")
        if factors != (1, 1):
            lines.append(f"a character stands for {factors[0]} x {factors[1]} tiles")
        if self.unknown:
            lines.append(f"entries unknown, since these have no values here: {', '.join(self.unknown)}")
        rows = _reduced(self.survey, factors).tolist()
        return "\n".join(lines + ["".join(_CHARACTERS[state] for state in row) for row in rows if row])

    def figure(self) -> "Figure":
        """A matplotlib figure: tiles by colour, queries down, keys across; with `allowed`, a dot for each entry of it.

        Raises:
          ImportError: matplotlib is not installed.
          ValueError: what is drawn is unknown, because arrays that decide it are traced.
        """
        drawn, steps = self._drawn()
        try:
            from matplotlib.colors import ListedColormap
            from matplotlib.figure import Figure
        except ImportError as error:
            raise ImportError(
                "Figures of masks are drawn with matplotlib, which is not installed: `pip install matplotlib`. The "
                "text picture, `print(visualize_mask(...))`, needs nothing."
            ) from error
        (T, S), (block_q, block_kv) = self.lengths, self.blocks
        figure = Figure(figsize=(7, 6), layout="constrained")
        axes = figure.add_subplot()
        if drawn.size:
            edges = (0, drawn.shape[1] * steps[1], drawn.shape[0] * steps[0], 0)
            colours = ListedColormap([_COLOURS[state] for state in (SKIPPED, PARTIAL, FULL)])
            axes.imshow(drawn, cmap=colours, vmin=SKIPPED, vmax=FULL, extent=edges, aspect="auto")
            axes.set_xlim(0, S)
            axes.set_ylim(T, 0)
        if 0 < max(drawn.shape) <= _LINES:
            axes.vlines(np.arange(steps[1], S, steps[1]), 0, T, color="white", linewidth=0.8)
            axes.hlines(np.arange(steps[0], T, steps[0]), 0, S, color="white", linewidth=0.8)
        axes.set_xlabel("keys")
        axes.set_ylabel("queries")
        axes.set_title(f"tiles of {block_q} queries x {block_kv} keys, example {self.example}, head {self.head}")
        self._add_entries_and_legend(axes)
        return figure

    def _add_entries_and_legend(self, axes) -> None:
        from matplotlib.lines import Line2D
        from matplotlib.patches import Patch

        handles: list = [Patch(color=_COLOURS[state], label=_NAMES[state]) for state in (FULL, PARTIAL, SKIPPED)]
        if self.allowed is not None:
            queries, keys = np.nonzero(self.allowed)
            size = min(12.0, 1200.0 / max(*self.lengths, 1))
            axes.scatter(keys + 0.5, queries + 0.5, s=size, color="black", marker=".", linewidths=0)
            handles.append(Line2D([], [], color="black", marker=".", linestyle="", label="allowed entry"))
        axes.figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False)

    def save(self, path: str | os.PathLike) -> None:
        """Writes the figure to `path`, in the format of its suffix, such as `.png`; raises what `figure` does."""
        self.figure().savefig(path, dpi=150)

    def _drawn(self) -> tuple[np.ndarray, tuple[int, int]]:
        """The cells of the figure, and how many queries and keys each stands for."""
        if self.survey is None:
            raise ValueError(
                f"The mask cannot be drawn: {', '.join(self.unknown)} have no values here. Call visualize_mask outside "
                "jit, with concrete arrays."
            )
        rows, cols = _factors(self.survey, _MOST_DRAWN)
        return _reduced(self.survey, (rows, cols)), (rows * self.blocks[0], cols * self.blocks[1])


def _factors(survey: Survey | ListedSurvey, most: int) -> tuple[int, int]:
    """How many tiles go into one cell along each side, so that there are at most `most` cells."""
    return max(1, -(-survey.q_tiles // most)), max(1, -(-survey.kv_tiles // most))


def _reduced(survey: Survey | ListedSurvey, factors: tuple[int, int]) -> np.ndarray:
    """The states of tiles, cell by cell of so many: PARTIAL where those of a cell differ."""
    (rows, cols), tiles = factors, (survey.q_tiles, survey.kv_tiles)
    if 0 in tiles:
        return np.zeros((-(-tiles[0] // rows), -(-tiles[1] // cols)), np.int8)
    starts, cells = np.arange(0, tiles[1], cols), []
    for first in range(0, tiles[0], rows):
        states = survey.states(first, first + rows)
        low, high = (f.reduceat(f.reduce(states, axis=0), starts) for f in (np.minimum, np.maximum))
        cells.append(np.where(low == high, low, np.int8(PARTIAL)))
    return np.stack(cells)
