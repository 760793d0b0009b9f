"""The search: candidates compile in threads; each is checked and timed in short; the fastest meet the table's tile."""

import functools
import os
import time
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any, NamedTuple

import jax

from flash_jax import compat
from flash_jax.arguments import Call
from flash_jax.triton.tiling import Tile
from flash_jax.tuning import agreement, passes, timing
from flash_jax.tuning.candidates import block_sizes
from flash_jax.tuning.passes import Arrays
from flash_jax.tuning.progress import Progress
from flash_jax.tuning.timing import Timing

_FINALISTS = 5  # of each pass, besides the table's tile
_FINAL_SECONDS = 3.0  # kept for them, for each pass, but not more than this part of all:
_FINAL_PART = 0.25
_NOISE = 0.01  # of the table's time: what is faster by less is not called faster
_DEVIATIONS = 3.0  # and neither is what is faster by less than so many of both timings' deviations
_THREADS = 8


class Found(NamedTuple):
    """What a search for one pass came to."""

    tile: Tile | None  # None: no other is faster than the table's
    own: Tile  # the table's
    ms: float
    own_ms: float
    tried: int  # compiled, or failed to
    failed: dict[Tile, str]  # the first lines of errors
    differing: dict[Tile, str]  # and how
    complete: bool  # whether there was time for all candidates


class Race:
    """The candidates of one pass, and what is known of them so far."""

    def __init__(self, name: str, own: Tile, others: list[Tile], call: Call, given: Arrays):
        self.name, self.own, self.others, self.call, self.given = name, own, others, call, given
        self.compiled: dict[Tile, Any] = {}
        self.ms: dict[Tile, float] = {}
        self.failed: dict[Tile, str] = {}
        self.differing: dict[Tile, str] = {}
        self.result: Any = None  # of the table's tile

    @property
    def arguments(self) -> tuple:
        """What the pass takes."""
        return tuple(self.given)[:4] if self.name == "forward" else tuple(self.given)

    def build(self, tile: Tile) -> Any:
        """The pass with a tile, compiled."""
        if tile in self.compiled:
            return self.compiled[tile]
        sizes = None if tile == self.own else block_sizes({self.name: tile})
        return jax.jit(passes.of_call(self.name, self.call, sizes)).lower(*self.arguments).compile()

    def run_own(self, built: Future) -> None:
        """The results that all others must have. What fails here would fail in flash_attention, and is raised."""
        try:
            self.compiled[self.own] = built.result()
            self.result = jax.block_until_ready(self.timed(self.own)())
        except Exception as error:
            error.add_note(f"This was the {self.name} pass with the table's own sizes, by `flash_jax.tune`.")
            raise

    def try_out(self, tile: Tile, built: Future) -> None:
        """Checks a candidate's results, and times it by few samples."""
        try:
            self.compiled[tile] = built.result()
            result = jax.block_until_ready(self.timed(tile)())
        except Exception as error:  # noqa: BLE001  (what does not compile or launch is no candidate)
            self._drop(tile, self.failed, timing.first_line(error))
            return
        reason = agreement.disagreement(self.call, self.given, result, self.result)
        if reason is not None:
            self._drop(tile, self.differing, reason)
            return
        taken = timing.measure({tile: self.timed(tile)}, samples=3, sample_ms=10.0)[tile]
        if isinstance(taken, str):
            self._drop(tile, self.failed, taken)
        else:
            self.ms[tile] = taken.low

    def _drop(self, tile: Tile, reasons: dict[Tile, str], reason: str) -> None:
        reasons[tile] = reason
        self.compiled.pop(tile, None)

    def timed(self, tile: Tile):
        """The compiled pass with its arguments."""
        return functools.partial(self.compiled[tile], *self.arguments)

    def finish(self, until: float) -> Found:
        """The fastest candidates against the table's tile, interleaved."""
        fastest = sorted(self.ms, key=self.ms.__getitem__)[:_FINALISTS]
        times = timing.measure({x: self.timed(x) for x in (self.own, *fastest)}, 9, 20.0, until)
        won = winner(times, self.own)
        own, best = times[self.own], times[won]
        if not isinstance(own, Timing) or not isinstance(best, Timing):
            raise RuntimeError(
                f"`tune`: the {self.name} pass with the table's own sizes ran before others were tried, and fails now: "
                f"{own}. One of the others may have left the GPU unusable to this process."
            )
        tried = len(self.ms) + len(self.failed) + len(self.differing)
        return Found(
            tile=None if won == self.own else won,
            own=self.own,
            ms=best.median,
            own_ms=own.median,
            tried=tried,
            failed=self.failed,
            differing=self.differing,
            complete=tried == len(self.others),
        )


def winner(times: dict[Tile, Timing | str], own: Tile) -> Tile:
    """The fastest, but the table's `own` tile unless another is faster by more than the noise."""
    theirs = times[own]
    ours = {tile: t for tile, t in times.items() if isinstance(t, Timing)}
    if not isinstance(theirs, Timing):
        return own
    best = min(ours, key=lambda tile: ours[tile].median)
    noise = max(_NOISE * theirs.median, _DEVIATIONS * (theirs.deviation + ours[best].deviation))
    return best if theirs.median - ours[best].median > noise else own


def search(call: Call, tiles: dict[str, tuple[Tile, list[Tile]]], seconds: float, shown: Progress) -> dict[str, Found]:
    """The best tile of each pass in `tiles`, which has the table's own and the candidates, within about `seconds`."""
    start = time.perf_counter()
    reserve = min(_FINAL_PART * seconds, _FINAL_SECONDS * len(tiles))
    with compat.quiet_triton_lowering():  # around all threads: it is not a thread's own affair
        forward = jax.jit(passes.of_call("forward", call, None)).lower(*call[:4]).compile()
        given = passes.arrays(call, forward, tuple(tiles))
        races = [Race(name, own, others, call, given) for name, (own, others) in tiles.items()]
        for race in races:
            if race.name == "forward":
                race.compiled[race.own] = forward
        pool = ThreadPoolExecutor(max(1, min(_THREADS, (os.cpu_count() or 2) - 1)))
        shown.start(sum(len(race.others) for race in races), seconds)
        try:
            unfinished = _screen(races, pool, start + seconds - reserve, shown)
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
        # Best if nothing else runs while the last are timed; but a tile that spills may take minutes to compile.
        wait([built for built in unfinished if not built.cancelled()], timeout=1 + reserve)
    return {race.name: race.finish(time.perf_counter() + reserve / len(races)) for race in races}


def _screen(races: list[Race], pool: ThreadPoolExecutor, deadline: float, shown: Progress) -> list[Future]:
    """Tries the candidates as they are compiled, the likeliest of each pass first, until the deadline.

    Gives the builds that are left.
    """
    own = [(race, pool.submit(race.build, race.own)) for race in races]
    left: dict[Future, tuple[Race, Tile]] = {}
    for rank in range(max(len(race.others) for race in races)):
        for race in races:
            if rank < len(race.others):
                left[pool.submit(race.build, race.others[rank])] = race, race.others[rank]
    for race, built in own:
        race.run_own(built)
    while left and (rest := deadline - time.perf_counter()) > 0:
        ready = wait(left, timeout=rest, return_when=FIRST_COMPLETED).done
        for built in [x for x in left if x in ready]:  # in the order in which they were submitted
            race, tile = left.pop(built)
            race.try_out(tile, built)
            shown.step()
            if time.perf_counter() > deadline:
                break
    return list(left)
