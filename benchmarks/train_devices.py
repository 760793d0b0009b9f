"""Trains examples/train_gpt.py on one GPU and, with --mesh data=N, on all: tokens per second of each, and the losses.

    python3 -m benchmarks.train_devices           on two H200s about four minutes

Each run is the example's own command, with its defaults for a GPU (124M parameters, bfloat16, 32 sequences of 1024
tokens a step): on one GPU; on all with as many sequences for each GPU; and on all with the same 32 in total. Tokens per
second are the median over the steps of the example's own log, without the first ones.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import jax

EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "train_gpt.py"
UNTIMED = 30  # first steps, while queues fill and clocks settle
BATCH = 32
ENVIRONMENT = dict(os.environ)  # of the runs, which take the memory that this process does not


def train(devices: int, batch: int, flags: list[str], steps: int) -> list[dict[str, float]]:
    """The log of one run: a record for each step."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        command = [sys.executable, str(EXAMPLE), "--out", str(out), "--steps", str(steps), *flags]
        command += ["--batch-size", str(batch), *(["--mesh", f"data={devices}"] if devices > 1 else [])]
        run = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, check=False)
        if run.returncode:
            raise SystemExit(f"{' '.join(command)}\n{run.stdout[-1000:]}\n{run.stderr[-3000:]}")
        return [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]


def main() -> None:
    """Prints the table and writes it as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--batch", type=int, default=BATCH, help=f"sequences of a step on one GPU; default: {BATCH}")
    parser.add_argument("--flags", default="", help='more flags of the example, such as "--layers 2"')
    parser.add_argument("--json", type=Path, default=Path("out/train_devices.json"))
    args = parser.parse_args()
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    n, kind = jax.device_count(), jax.devices()[0].device_kind
    runs = {
        "one GPU": (1, args.batch),
        f"{n} GPUs, {args.batch} sequences each": (n, args.batch * n),
        f"{n} GPUs, {args.batch} sequences in all": (n, args.batch),
    }
    report: dict[str, Any] = {"device": f"{n} x {kind}", "jax": jax.__version__}
    print(f"{n} x {kind}, jax {jax.__version__}: {EXAMPLE.name} {args.flags}".rstrip())
    base = None
    for name, (devices, batch) in runs.items():
        records = train(devices, batch, args.flags.split(), args.steps)
        speeds = [r["tokens_per_second"] for r in records[UNTIMED:] if "val_loss" not in r]
        middle = statistics.median(speeds)
        base = base or middle
        last = statistics.mean(r["loss"] for r in records[-10:])
        low, high = min(speeds), max(speeds)
        print(
            f"{name:32} {middle:11,.0f} tokens/s ({low:,.0f} to {high:,.0f})   {middle / base:5.2f}x"
            f"   loss {records[0]['loss']:.4f} at first, {last:.4f} over the last ten steps",
            flush=True,
        )
        report[name] = {"tokens_per_second": middle, "low": low, "high": high, "speed_up": middle / base, "loss": last}
    args.json.parent.mkdir(parents=True, exist_ok=True)
    args.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
