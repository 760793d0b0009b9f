"""PyTorch's attention by its flash backend (FlashAttention-2), timed by CUDA events in a process of its own.

JAX takes most of a GPU's memory when it starts, so this process runs before that, and its numbers are not interleaved
with the others'. It reads cases as JSON from its input and writes their results to its output; it does not import JAX.
Without a GPU it runs on the CPU, on the host's clock, so that the script can be tried.
"""

import dataclasses
import importlib.util
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

from benchmarks import judge
from benchmarks.cases import BACKWARD, BOTH, FORWARD, Case

NAME = "torch flash"
NOTE = f"{NAME} ran in a process of its own before the others, not interleaved with them"
NOT_INSTALLED = "not installed"
WHOLE = 2**26  # pairs of a head that is judged whole: here nothing is compiled meanwhile


def refuses(case: Case) -> str | None:
    """Why the flash backend does not serve a case, or None."""
    if case.left is not None or case.documents or case.bias or case.dtype == "float32" or case.D != case.Dv:
        return "no window, segments, bias, float32, one head dim"
    return "its causal mask is aligned top left" if case.causal and case.T != case.S else None


def run(cases: list[Case], samples: int, sample_ms: float, seconds: float) -> dict[str, Any]:
    """{"cells": {case: {pass: result}}, "torch": version, "product_tflops": ...}, or {"left_out": why}."""
    if importlib.util.find_spec("torch") is None:
        return {"left_out": NOT_INSTALLED}
    request = {"cases": [dataclasses.asdict(c) for c in cases], "samples": samples, "sample_ms": sample_ms}
    command = [sys.executable, "-m", "benchmarks.torch_sdpa"]
    try:
        done = subprocess.run(
            command, input=json.dumps(request), capture_output=True, text=True, timeout=seconds, check=False
        )
    except subprocess.TimeoutExpired:
        return {"left_out": f"not done within {seconds:.0f} s"}
    if done.returncode:
        return {"left_out": (done.stderr.strip().splitlines() or ["failed"])[-1][:160]}
    return json.loads(done.stdout.splitlines()[-1])


class Timer:
    """Times calls by CUDA events: samples of as many back-to-back calls as fill some milliseconds."""

    def __init__(self, torch: Any, samples: int, sample_ms: float):
        self.torch, self.samples, self.sample_ms = torch, samples, sample_ms
        self.device = "cuda" if torch.cuda.is_available() else "cpu"

    def sample(self, call: Callable, repeats: int) -> float:
        """Milliseconds of a call."""
        if self.device == "cpu":
            begin = time.perf_counter()
            for _ in range(repeats):
                call()
            return (time.perf_counter() - begin) / repeats * 1e3
        start, end = (self.torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(repeats):
            call()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / repeats

    def forget_memory(self) -> None:
        """Begins to note anew how much memory is taken."""
        if self.device == "cuda":
            self.torch.cuda.empty_cache()
            self.torch.cuda.reset_peak_memory_stats()

    def memory(self) -> dict[str, float]:
        """The most that was taken, the arguments among it; nothing is known of it on a CPU."""
        return {"peak_mib": self.torch.cuda.max_memory_allocated() / 2**20} if self.device == "cuda" else {}

    def __call__(self, call: Callable) -> dict[str, float]:
        """The median, least and greatest of the samples."""
        self.sample(call, 1)
        ms = self.sample(call, 1)
        repeats = max(1, min(2000, round(self.sample_ms / max(ms, 1e-3))))
        taken = [self.sample(call, repeats) for _ in range(self.samples if ms < 1000 else min(3, self.samples))]
        return {"ms": statistics.median(taken), "low_ms": min(taken), "high_ms": max(taken)}


def calls_of(torch: Any, case: Case, arrays: list[Any]) -> dict[str, Callable]:
    """{pass: call} on (query, key, value, cotangent), each [B, length, heads, width]."""
    q, k, v, dout = (x.transpose(1, 2).requires_grad_(case.backward) for x in arrays)
    more = {"is_causal": case.causal, "enable_gqa": case.H != case.K}

    def attend():
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, **more).transpose(1, 2)

    def gradients(out, **keep):
        return tuple(x.transpose(1, 2) for x in torch.autograd.grad(out, (q, k, v), dout.transpose(1, 2), **keep))

    def forward():
        with torch.no_grad():
            return attend()

    def both():
        out = attend()
        return out, gradients(out)

    if not case.backward:
        return {FORWARD: forward}
    kept = attend()
    return {FORWARD: forward, BOTH: both, BACKWARD: lambda: gradients(kept, retain_graph=True)}


def results(torch: Any, case: Case, timer: Timer) -> dict[str, dict[str, Any]]:
    """{pass: result} of one case; the backward pass is judged as part of forward+backward."""
    shapes = [(case.T, case.H, case.D), (case.S, case.K, case.D), (case.S, case.K, case.Dv), (case.T, case.H, case.Dv)]
    arrays = [torch.randn(case.B, *shape, device=timer.device, dtype=getattr(torch, case.dtype)) for shape in shapes]

    def on_host(x: Any) -> Any:
        return x.detach()[-1:].float().cpu().numpy()

    exact = judge.truth(case, judge.head_of(case, tuple(map(on_host, arrays)), {}), WHOLE)
    found: dict[str, dict[str, Any]] = {}
    for kind, call in calls_of(torch, case, arrays).items():
        timer.forget_memory()
        result = call()
        if kind == BACKWARD:
            cell = {"wrong": found[BOTH]["wrong"]}
        else:
            seen = on_host(result) if kind == FORWARD else (on_host(result[0]), tuple(map(on_host, result[1])))
            error = judge.errors(case, seen, exact)
            cell = {"errors": error, "wrong": judge.wrong(case, error), **timer.memory()}
        found[kind] = cell | timer(call)
        found[kind]["tflops"] = case.flops(kind) / found[kind]["ms"] / 1e9
    found[FORWARD]["gb_per_s"] = case.traffic() / found[FORWARD]["ms"] / 1e6
    return found


def main() -> None:
    """Times the cases that are asked for."""
    import torch  # pyright: ignore[reportMissingImports]
    from torch.nn.attention import SDPBackend, sdpa_kernel  # pyright: ignore[reportMissingImports]

    request = json.load(sys.stdin)
    timer = Timer(torch, request["samples"], request["sample_ms"])
    cells: dict[str, Any] = {}
    for fields in request["cases"]:
        case = Case(**fields)
        passes = (*case.passes, *([BACKWARD] if case.backward else []))
        try:
            reason = refuses(case)
            with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
                cells[case.name] = (
                    dict.fromkeys(passes, {"left_out": reason}) if reason else results(torch, case, timer)
                )
        except Exception as error:  # noqa: BLE001  (its result)
            text = (str(error).strip().splitlines() or [""])[0][:160]
            cells[case.name] = dict.fromkeys(passes, {"failed": f"{type(error).__name__}: {text}"})
    side = 8192 if timer.device == "cuda" else 128
    a, b = (torch.randn(side, side, device=timer.device, dtype=torch.bfloat16) for _ in range(2))
    product = 2.0 * side**3 / timer(lambda: a @ b)["ms"] / 1e9
    clock = "CUDA events" if timer.device == "cuda" else "the host's clock"
    about = {"torch": torch.__version__, "product_tflops": product, "product_side": side, "clock": clock, "note": NOTE}
    print(json.dumps({"cells": cells, **about}))


if __name__ == "__main__":
    main()
