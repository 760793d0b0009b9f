"""Trains examples/train_gpt.py with the Triton kernels and with the quadratic reference: one loss curve, and how fast.

    python3 -m benchmarks.train_curves           on a GPU: 8 runs of 300 steps of 8 x 1024 tokens, about six minutes

Two runs in bfloat16 do not stay equal bit by bit, and the loss of a run is chaotic: so each implementation trains
several times, once from the example's own parameters and otherwise from parameters of which each was moved by up to one
part in 512, half a unit in the last place of bfloat16. If the implementation makes no difference, all these curves are
draws of one kind, and it is chance which of them are called the kernels'. So the distance between the means of the two
groups (of windows of 20 steps, at the window where it is largest) is compared with that of every other way to part the
curves into two such groups: a permutation test. The kernels fail if no other parting is further apart, which with four
runs each has one chance in 35 where nothing is wrong.

What a chaotic curve hides, gradients show: those of the whole model in bfloat16, before the first step and after step
100, are compared with the same in float32, and the kernels' relative error must be at most 1.25 times the reference's.
"""

import argparse
import functools
import importlib.util
import itertools
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax

EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "train_gpt.py"
FLAGS = ["--batch-size", "8", "--dtype", "bfloat16"]
WINDOW = 20
UNTIMED = 30  # first steps, not counted in tokens/s
LATER = 100  # the step after which gradients are compared once more
WORSE = 1.25  # how many times the reference's error the gradients may have: the rest of the model rounds alike


def load_example() -> Any:
    """The example as a module."""
    spec = importlib.util.spec_from_file_location("train_gpt", EXAMPLE)
    if spec is None or spec.loader is None:
        raise SystemExit(f"cannot load {EXAMPLE}")
    module = importlib.util.module_from_spec(spec)
    sys.modules["train_gpt"] = module
    spec.loader.exec_module(module)
    return module


def moved(state: dict[str, Any], number: int) -> dict[str, Any]:
    """The state with each parameter multiplied by 1 + u / 512, u uniform in [-1, 1]; as it is for number 0."""
    if not number:
        return state
    leaves, tree = jax.tree.flatten(state["params"])
    keys = jax.random.split(jax.random.key(number), len(leaves))
    factors = [
        1 + jax.random.uniform(k, x.shape, x.dtype, -1 / 512, 1 / 512) for k, x in zip(keys, leaves, strict=True)
    ]
    return state | {"params": jax.tree.unflatten(tree, [x * f for x, f in zip(leaves, factors, strict=True)])}


class Trainer:
    """The example's model with one kind of attention, and its program for a step."""

    def __init__(self, example: Any, attention: str, args: Any, text: np.ndarray):
        self.example, self.args, self.text = example, args, text
        self.model = example.GPT(args.layers, args.dim, args.heads, args.dtype, attention)
        self.optimizer = example.make_optimizer(args.learning_rate)
        self.step = jax.jit(
            functools.partial(example.train_step, model=self.model, optimizer=self.optimizer), donate_argnums=0
        )
        self.first = jax.device_get(example.initial_state(self.model, self.optimizer, args.seed))

    def start(self, number: int) -> dict[str, Any]:
        """The state before the first step of a run."""
        return jax.device_put(moved(self.first, number))

    def run(self, number: int) -> tuple[list[float], float, Any]:
        """(loss of each step, tokens/s without the first steps, parameters after step LATER as NumPy arrays)."""
        state, losses, later, begin, first = self.start(number), [], None, 0.0, 0
        for n in range(1, self.args.steps + 1):
            state, loss = self.step(state, self.example.training_batch(self.text, n, self.args))
            losses.append(loss)
            if n == LATER and not number:
                later = jax.device_get(state["params"])
            if n == min(UNTIMED, self.args.steps - 1) or n == LATER:
                jax.block_until_ready(loss)
                begin, first = time.perf_counter(), n
        losses = [float(x) for x in losses]
        tokens = (self.args.steps - first) * self.args.batch_size * self.args.length
        return losses, tokens / (time.perf_counter() - begin), later

    def gradient(self, params: Any, dtype: str) -> Any:
        """The gradient of the mean loss of the first batch, the model computing in `dtype`."""
        loss = functools.partial(self.example.mean_loss, model=self.model.clone(dtype=dtype))
        return jax.device_get(jax.jit(jax.grad(loss))(params, self.example.training_batch(self.text, 1, self.args)))


def windows(losses: list[float]) -> np.ndarray:
    """Mean loss of each window of steps."""
    return np.array([statistics.fmean(losses[i : i + WINDOW]) for i in range(0, len(losses) - WINDOW + 1, WINDOW)])


def distance(one: list[np.ndarray], other: list[np.ndarray]) -> float:
    """Between the mean curves of two groups, where they are furthest apart."""
    return float(np.abs(np.mean(one, 0) - np.mean(other, 0)).max())


def other_distances(one: list[np.ndarray], other: list[np.ndarray]) -> list[float]:
    """The distances of all other ways to part the curves into groups of these sizes, each counted once."""
    curves, own = one + other, tuple(range(len(one)))
    found = []
    for group in itertools.combinations(range(len(curves)), len(one)):
        rest = tuple(i for i in range(len(curves)) if i not in group)
        if group != own and (len(group) != len(rest) or group < rest):
            found.append(distance([curves[i] for i in group], [curves[i] for i in rest]))
    return found


def relative(one: Any, exact: Any) -> float:
    """||one - exact|| / ||exact|| of two trees."""
    difference = jax.tree.map(lambda a, b: a - b, one, exact)
    return float(optax.tree.norm(difference) / optax.tree.norm(exact))


def gradient_errors(trainers: dict[str, Trainer], params: Any) -> dict[str, float]:
    """The relative error of each implementation's gradients in the example's own dtype."""
    with jax.default_matmul_precision("highest"):
        exact = trainers["reference"].gradient(params, "float32")
    return {name: relative(t.gradient(params, t.args.dtype), exact) for name, t in trainers.items()}


def show(name: str, speed: float, losses: list[float]) -> None:
    """Prints one run."""
    curve = " ".join(f"{x:.3f}" for x in windows(losses)[::2])
    print(f"{name:10} {speed:10,.0f} tokens/s   loss {curve}", flush=True)


def main() -> None:
    """Trains, compares, and ends with status 1 where the kernels' curve or gradients are others."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--runs", type=int, default=4, help="of each implementation; default: 4")
    parser.add_argument("--kernels", default="triton", help="the implementation that is compared with the reference")
    parser.add_argument("--json", type=Path, default=Path("out/train.json"))
    parser.add_argument("more", nargs="*", help=f"flags for the example, after --; default: {' '.join(FLAGS)}")
    options = parser.parse_args()
    more = options.more or FLAGS
    example = load_example()
    args = example.parse(["--steps", str(options.steps), *more])
    text = example.read_text(args.data)[0]
    trainers = {name: Trainer(example, name, args, text) for name in (options.kernels, "reference")}

    losses, speeds, later = {}, {}, None
    for name, trainer in trainers.items():
        losses[name], speeds[name] = [], []
        for number in range(options.runs):
            loss, speed, params = trainer.run(number)
            show(name, speed, loss)
            losses[name].append(loss)
            speeds[name].append(speed)
            later = params or later
    curves = {name: [windows(x) for x in runs] for name, runs in losses.items()}
    found, others = distance(*curves.values()), other_distances(*curves.values())
    further = sum(d >= found for d in others)
    errors = {"before step 1": gradient_errors(trainers, trainers["reference"].start(0)["params"])}
    if later is not None:
        errors[f"after step {LATER}"] = gradient_errors(trainers, later)

    same = further > 0 and all(e[options.kernels] <= WORSE * e["reference"] for e in errors.values())
    report = {"device": jax.devices()[0].device_kind, "flags": more, "losses": losses, "tokens_per_second": speeds}
    report |= {"distance": found, "other_distances": others, "gradient_errors": errors, "same": same}
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(report, indent=1) + "\n")
    for when, error in errors.items():
        print(f"gradient {when}, relative error: " + ", ".join(f"{name} {x:.3e}" for name, x in error.items()))
    print(
        f"{'one kind of curve' if same else 'ANOTHER CURVE'}: {found:.4f} apart; of {len(others)} other partings "
        f"{further} are as far or further (median {statistics.median(others):.4f}, most {max(others):.4f})"
    )
    sys.exit(0 if same else 1)


if __name__ == "__main__":
    main()
