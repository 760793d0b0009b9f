"""What `tune` tells of its progress: a bar where tqdm is installed, else lines on stderr."""

import importlib
import sys
import time

_SECONDS = 10.0  # between two lines, where there is no bar


class Progress:
    """Counts tiles, and says what was found; nothing of it where it is not `shown`."""

    def __init__(self, shown: bool):
        self.shown, self.bar = shown, None
        self.count, self.total, self.said = 0, 0, 0.0

    def start(self, total: int, seconds: float) -> None:
        """Says that so many tiles follow."""
        if not self.shown:
            return
        self.total, self.said = total, time.perf_counter()
        try:
            tqdm = importlib.import_module("tqdm")
        except ImportError:
            self.line(f"{total} tiles to try, for at most about {seconds:g} s")
        else:
            self.bar = tqdm.tqdm(total=total, desc="tune", unit="tile", file=sys.stderr, leave=False)

    def step(self) -> None:
        """One more was tried."""
        self.count += 1
        if self.bar is not None:
            self.bar.update(1)
        elif time.perf_counter() - self.said > _SECONDS:
            self.said = time.perf_counter()
            self.line(f"{self.count} of {self.total} tiles")

    def line(self, text: str) -> None:
        """A line that stays."""
        if self.bar is not None:
            self.bar.clear()
        if self.shown:
            print(f"tune: {text}", file=sys.stderr, flush=True)

    def close(self) -> None:
        """Takes the bar away."""
        if self.bar is not None:
            self.bar.close()
            self.bar = None
