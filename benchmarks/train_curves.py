"""Trains examples/train_gpt.py with the Triton kernels and with the quadratic reference: one loss curve, and how fast.

    python3 -m benchmarks.train_curves                   on a GPU: 300 steps of 16 x 1024 tokens, about three minutes

Two runs in bfloat16 never stay equal bit by bit, so what counts as noise is measured: a third run, with the reference,
starts from parameters of which each was moved by up to one part in 512, half a unit in the last place of bfloat16. With
the mean loss of each window of 20 steps, the kernels pass if their largest distance from the reference is at most
twice that run's, and if the very first loss, before any update, agrees to one part in 256.
"""

import argparse
import importlib.util
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import jax

EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "train_gpt.py"
WINDOW = 20
UNTIMED = 30  # first steps, not counted in tokens/s


def load_example() -> Any:
    """The example as a module."""
    spec = importlib.util.spec_from_file_location("train_gpt", EXAMPLE)
    if spec is None or spec.loader is None:
        raise SystemExit(f"cannot load {EXAMPLE}")
    module = importlib.util.module_from_spec(spec)
    sys.modules["train_gpt"] = module
    spec.loader.exec_module(module)
    return module


def moved(state: dict[str, Any]) -> dict[str, Any]:
    """The state with each parameter multiplied by 1 + u / 512, u uniform in [-1, 1]."""
    leaves, tree = jax.tree.flatten(state["params"])
    keys = jax.random.split(jax.random.key(12345), len(leaves))
    factors = [
        1 + jax.random.uniform(k, x.shape, x.dtype, -1 / 512, 1 / 512) for k, x in zip(keys, leaves, strict=True)
    ]
    return state | {"params": jax.tree.unflatten(tree, [x * f for x, f in zip(leaves, factors, strict=True)])}


def train(example: Any, attention: str, steps: int, more: list[str], noisy: bool = False) -> list[dict[str, Any]]:
    """The records of one run's log."""
    original = example.initial_state
    if noisy:
        example.initial_state = lambda *args: moved(original(*args))
    try:
        with tempfile.TemporaryDirectory() as folder:
            run = Path(folder) / "run"
            flags = ["--attention", attention, "--steps", str(steps), "--eval-every", str(steps), "--out", str(run)]
            status = example.main([*flags, *more])
            if status:
                raise SystemExit(f"train_gpt ended with status {status}")
            return [json.loads(line) for line in (run / "log.jsonl").open()]
    finally:
        example.initial_state = original


def windows(records: list[dict[str, Any]]) -> list[float]:
    """Mean loss of each window of steps."""
    losses = [record["loss"] for record in records]
    return [statistics.fmean(losses[i : i + WINDOW]) for i in range(0, len(losses) - WINDOW + 1, WINDOW)]


def distance(one: list[float], other: list[float]) -> float:
    """The largest difference of two curves."""
    return max(abs(x - y) for x, y in zip(one, other, strict=True))


def speed(records: list[dict[str, Any]]) -> float:
    """Median tokens/s, the first steps left out."""
    timed = records[UNTIMED:] or records
    return statistics.median(record["tokens_per_second"] for record in timed)


def main() -> None:
    """Runs the three, compares them, and ends with status 1 where the kernels' curve is another."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--kernels", default="triton", help="the implementation that is compared with the reference")
    parser.add_argument("--json", type=Path, default=Path("out/train.json"))
    parser.add_argument("more", nargs="*", help="flags for the example, after --; default: --batch-size 16 on a GPU")
    options = parser.parse_args()
    more = options.more or (["--batch-size", "16"] if jax.default_backend() == "gpu" else [])
    example = load_example()
    runs = {}
    with tempfile.TemporaryDirectory() as cache:
        jax.config.update("jax_compilation_cache_dir", cache)  # two runs share one program
        runs["kernels"] = train(example, options.kernels, options.steps, more)
        runs["reference"] = train(example, "reference", options.steps, more)
        runs["reference, moved"] = train(example, "reference", options.steps, more, noisy=True)
        jax.config.update("jax_compilation_cache_dir", None)
    curves = {name: windows(records) for name, records in runs.items()}
    first = {name: records[0]["loss"] for name, records in runs.items()}
    found = distance(curves["kernels"], curves["reference"])
    noise = distance(curves["reference, moved"], curves["reference"])
    same = found <= 2 * noise and abs(first["kernels"] - first["reference"]) <= first["reference"] / 256
    speeds = {name: speed(records) for name, records in runs.items()}
    report = {"device": jax.devices()[0].device_kind, "flags": more, "curves": curves, "first": first}
    report |= {"distance": found, "noise": noise, "same": same, "tokens_per_second": speeds}
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(report, indent=1) + "\n")
    for name, curve in curves.items():
        label = options.kernels if name == "kernels" else name
        print(f"{label:17} {speeds[name]:12,.0f} tokens/s   loss " + " ".join(f"{x:.3f}" for x in curve[::2]))
    verdict = "the same curve" if same else "ANOTHER CURVE"
    print(f"{verdict}: {found:.4f} from the reference; moved parameters: {noise:.4f}; first losses {first}")
    sys.exit(0 if same else 1)


if __name__ == "__main__":
    main()
