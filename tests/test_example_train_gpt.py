"""The training example: it learns, resumes bit for bit, stops when asked, and says in one line what is wrong.

On a mesh of devices it does the same, and its compiled step moves what it must and nothing else.
"""

import functools
import importlib.util
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache

from tests.support.tiers import every

SCRIPT = Path(__file__).parents[1] / "examples" / "train_gpt.py"
TINY = ["--layers", "1", "--dim", "16", "--heads", "2", "--length", "16", "--batch-size", "4", "--seed", "3"]
FAST = ["--learning-rate", "0.02", "--eval-every", "20"]
ALL_AXES = ["--mesh", "seq=2,data=2,tensor=2"]
COLLECTIVE = re.compile(r"= (.*) (all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)(?:-start)?\(")


@pytest.fixture(scope="module", autouse=True)
def settings_of_jax(tmp_path_factory):
    """Usual dtype promotion, as Optax needs it, and a cache, as the runs compile much the same."""
    settings = {
        "jax_numpy_dtype_promotion": "standard",
        "jax_compilation_cache_dir": str(tmp_path_factory.mktemp("compiled")),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
    }
    before = {name: getattr(jax.config, name) for name in settings}
    for name, value in settings.items():
        jax.config.update(name, value)
    yield
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


@pytest.fixture(scope="module")
def example():
    """The script as a module."""
    spec = importlib.util.spec_from_file_location("train_gpt", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """A file of 4000 bytes that can be learnt: the numbers from 0, one a line."""
    path = tmp_path_factory.mktemp("data") / "numbers.txt"
    path.write_text("".join(f"{i}\n" for i in range(1000))[:4000])
    return path


@pytest.fixture(scope="module")
def whole_run(example, text, tmp_path_factory):
    """The folder of a run of 40 steps, with checkpoints at 20 and 40."""
    out = tmp_path_factory.mktemp("whole") / "run"
    assert example.main([*TINY, *FAST, "--data", str(text), "--steps", "40", "--out", str(out)]) == 0
    return out


@pytest.fixture(scope="module")
def run_on_a_mesh(example, text, tmp_path_factory):
    """The folder of a run of 10 steps on eight devices, with checkpoints at 5 and 10."""
    out = tmp_path_factory.mktemp("mesh") / "run"
    flags = [*TINY, *FAST, "--eval-every", "5", "--steps", "10", *ALL_AXES]
    assert example.main([*flags, "--data", str(text), "--out", str(out)]) == 0
    return out


@functools.cache
def trained(example, text, axes):
    """(losses of the first 10 steps, state after them, train step, arguments) on a mesh with these axes."""
    args = example.parse([*TINY, *FAST, "--mesh", axes])
    mesh = example.make_mesh(args.mesh)
    model = example.GPT(args.layers, args.dim, args.heads, args.dtype, None)
    optimizer = example.make_optimizer(args.learning_rate)
    state = example.initial_state(model, optimizer, args.seed, mesh)
    step, _ = example.compiled(model, optimizer, state, args, mesh)
    training, found = example.read_text(str(text))[0], []
    for number in range(1, 11):
        state, loss = step(state, example.training_batch(training, number, args))
        found.append(float(loss))
    return found, state, step, args


def collectives(program):
    """(kind, number of elements of each array) of every collective of a compiled program."""
    shapes = re.compile(r"\w+\[([\d,]*)\]")
    return [
        (kind, [math.prod(map(int, filter(None, dims.split(",")))) for dims in shapes.findall(result)])
        for result, kind in COLLECTIVE.findall(program.as_text())
    ]


def records(out):
    return [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]


def losses(out):
    return [(r["step"], r["loss"], r.get("val_loss")) for r in records(out)]


def parameters(out, step):
    """Every array of a checkpoint, in the order of its tree."""
    import orbax.checkpoint as ocp

    with ocp.CheckpointManager(out / "checkpoints") as manager:
        state = manager.restore(step, args=ocp.args.StandardRestore())
    return [np.asarray(x) for x in jax.tree.leaves(state)]


def fails(example, capsys, *flags):
    """The one line that the program prints on stderr while it ends with status 2."""
    try:
        status = example.main([*TINY, *map(str, flags)])
    except SystemExit as ended:  # so argparse ends a program
        status = ended.code
    assert status == 2
    error = capsys.readouterr().err
    assert error.startswith("train_gpt: error: ") and error.count("\n") == 1, error
    return error


def test_a_run_leaves_its_log_curve_sample_and_checkpoints(whole_run):
    assert [r["step"] for r in records(whole_run)] == list(range(1, 41))
    assert all(r["tokens_per_second"] > 0 for r in records(whole_run))
    assert [r["step"] for r in records(whole_run) if "val_loss" in r] == [20, 40]
    assert (whole_run / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert len((whole_run / "sample.txt").read_bytes()) == 16
    assert sorted(p.name for p in (whole_run / "checkpoints").iterdir()) == ["20", "40"]


def test_resuming_continues_bit_for_bit(example, text, whole_run, tmp_path):
    flags = [*TINY, *FAST, "--data", str(text), "--out", str(tmp_path / "half")]
    assert example.main([*flags, "--steps", "20"]) == 0
    assert example.main([*flags, "--steps", "40", "--resume"]) == 0
    assert losses(tmp_path / "half") == losses(whole_run)
    for resumed, whole in zip(parameters(tmp_path / "half", 40), parameters(whole_run, 40), strict=True):
        np.testing.assert_array_equal(resumed, whole)


def test_resuming_from_an_earlier_checkpoint_cuts_the_log_back(example, text, whole_run, tmp_path):
    out = tmp_path / "copy"
    shutil.copytree(whole_run, out)
    shutil.rmtree(out / "checkpoints" / "40")
    (out / "log.jsonl").write_text(
        (out / "log.jsonl").read_text().replace('"step": 40, "loss": ', '"step": 40, "loss": 9')
    )
    assert losses(out) != losses(whole_run)
    flags = [*TINY, *FAST, "--data", str(text), "--steps", "40", "--out", str(out), "--resume"]
    assert example.main(flags) == 0
    assert losses(out) == losses(whole_run)
    for resumed, whole in zip(parameters(out, 40), parameters(whole_run, 40), strict=True):
        np.testing.assert_array_equal(resumed, whole)


def test_it_learns(whole_run):
    first, last = records(whole_run)[0], records(whole_run)[-1]
    assert first["loss"] > 5.0  # near log(256), as nothing is known yet
    assert last["val_loss"] < 3.2  # below log(11) + 1: that the text is digits and ends of lines has been found


def test_attention_changes_nothing_but_rounding(example, text, whole_run, tmp_path):
    flags = [*TINY, *FAST, "--data", str(text), "--out", str(tmp_path / "run"), "--attention", "reference"]
    assert example.main([*flags, "--steps", "10"]) == 0
    found, expected = ([r["loss"] for r in records(out)][:10] for out in (tmp_path / "run", whole_run))
    np.testing.assert_allclose(found, expected, rtol=1e-4)


@pytest.mark.thorough
@pytest.mark.multi_device
@pytest.mark.parametrize("axes", ["data=2", "tensor=2", "seq=2", "data=4,seq=2"])
def test_on_a_mesh_losses_are_those_of_one_device(example, text, whole_run, axes):
    found = trained(example, text, axes)[0]
    np.testing.assert_allclose(found, [r["loss"] for r in records(whole_run)][:10], atol=1e-4, rtol=0)
    assert found[-1] < found[0] - 0.5


@pytest.mark.multi_device
def test_a_run_on_a_mesh_is_that_of_one_device(whole_run, run_on_a_mesh):
    found, expected = ([r["loss"] for r in records(out)] for out in (run_on_a_mesh, whole_run))
    np.testing.assert_allclose(found, expected[:10], atol=1e-4, rtol=0)
    assert [r["step"] for r in records(run_on_a_mesh) if "val_loss" in r] == [5, 10]
    assert len((run_on_a_mesh / "sample.txt").read_bytes()) == 16


@pytest.mark.thorough
@pytest.mark.multi_device
@pytest.mark.parametrize("flags", [ALL_AXES, []], ids=["same-mesh", "one-device"])
def test_resuming_what_a_mesh_began(example, text, run_on_a_mesh, tmp_path, flags):
    out = tmp_path / "copy"
    shutil.copytree(run_on_a_mesh, out)
    shutil.rmtree(out / "checkpoints" / "10")
    flags = [*TINY, *FAST, "--eval-every", "5", "--steps", "10", *flags]
    assert example.main([*flags, "--data", str(text), "--out", str(out), "--resume"]) == 0
    tolerance = {"rtol": 1e-4, "atol": 1e-4} if "--mesh" not in flags else {"rtol": 0, "atol": 0}
    for resumed, whole in zip(losses(out)[4::5], losses(run_on_a_mesh)[4::5], strict=True):
        np.testing.assert_allclose(resumed, whole, **tolerance)
    for resumed, whole in zip(parameters(out, 10), parameters(run_on_a_mesh, 10), strict=True):
        np.testing.assert_allclose(resumed, whole, **tolerance)


@pytest.mark.multi_device
def test_over_data_only_gradients_travel(example, text):
    _, state, step, _ = trained(example, text, "data=2")
    weights = sum(x.size for x in jax.tree.leaves(state["params"]))
    found = collectives(step)
    assert {kind for kind, _ in found} == {"all-reduce"}
    assert sum(sum(sizes) for _, sizes in found) == weights + 1  # and the loss


@pytest.mark.multi_device
def test_over_tensor_weights_stay_where_they_are(example, text):
    _, state, step, args = trained(example, text, "tensor=2")
    for tree in (state["params"], state["opt_state"][1][0].mu, state["opt_state"][1][0].nu):
        layers = [tree["SelfAttention_0"][name]["kernel"] for name in ("query", "key", "value", "out")]
        for x in [*layers, tree["Dense_0"]["kernel"], tree["Dense_1"]["kernel"]]:
            assert x.addressable_shards[0].data.size == x.size // 2  # also after ten steps
    found = collectives(step)
    assert {kind for kind, _ in found} == {"all-reduce"}
    activations = args.batch_size * args.length * args.dim
    assert {size for _, sizes in found for size in sizes} == {1, activations}  # 1: the norm of the gradients


@pytest.mark.multi_device
def test_over_seq_keys_and_values_are_gathered_and_nothing_else(example, text):
    _, state, step, args = trained(example, text, "seq=2")
    weights = [x.size for x in jax.tree.leaves(state["params"])]
    activations = args.batch_size * args.length * args.dim
    found = collectives(step)
    assert [sizes for kind, sizes in found if kind == "all-gather"] == [[activations]] * 2 * args.layers
    summed = [size for kind, sizes in found if kind == "all-reduce" for size in sizes]
    # Gradients of the weights, of keys and values, and the loss.
    assert sorted(summed) == sorted([*weights, activations, activations, 1])
    # The byte after a device's last, which the loss compares its last logits with.
    others = [(kind, sizes) for kind, sizes in found if kind not in ("all-gather", "all-reduce")]
    assert others == [("collective-permute", [args.batch_size])]


def test_mfu_is_of_all_devices(example, monkeypatch):
    monkeypatch.setattr(example, "PEAK_TFLOPS", {jax.devices()[0].device_kind: 100})
    monkeypatch.setattr(example, "optional", lambda *_: None)
    peaks = [example.Progress(0, 10, example.parse(["--dtype", "bfloat16", *mesh])).peak for mesh in ([], ALL_AXES)]
    assert peaks == [1e14, 8e14]


def test_a_sample_by_the_cache_is_what_the_whole_forward_pass_gives(example):
    model = example.GPT(layers=1, dim=16, heads=2, dtype="float32", attention=None)
    state = example.initial_state(model, example.make_optimizer(1e-3), seed=0)
    prompt = np.frombuffer(b"def f", np.uint8)
    text = example.sample(state["params"], model, prompt, 12, seed=0, temperature=1e-6)  # the likeliest byte each time
    assert text[:5] == b"def f" and len(text) == 12
    tokens = np.frombuffer(text, np.uint8).astype(np.int32)[None]
    logits = jax.jit(model.apply)({"params": state["params"]}, tokens)
    assert bytes(np.argmax(logits[0, 4:-1], axis=-1).astype(np.uint8)) == text[5:]


def test_a_folder_gives_every_twentieth_file_to_validation(example, tmp_path):
    for i in range(40):
        (tmp_path / f"{i:02}.txt").write_bytes(bytes([i]) * 3)
    (tmp_path / ".hidden").write_bytes(b"x")
    training, validation = example.read_text(str(tmp_path))
    assert validation.tolist() == [19] * 3 + [39] * 3
    assert training.tolist() == [i for i in range(40) if i not in (19, 39) for _ in range(3)]


def test_the_standard_library_is_the_default_text(example):
    training, validation = example.read_text(None)
    assert len(training) > 2_000_000 and len(validation) > 50_000
    again, _ = example.read_text(None)
    np.testing.assert_array_equal(training, again)


@pytest.mark.parametrize(
    ("flags", "text_of_error"),
    [
        (["--data", "no/such/file"], "--data: no/such/file does not exist"),
        (["--dim", "17"], "--dim must be an even multiple of --heads; got 17 and 2"),
        (["--heads", "0"], "--heads must be above 0; got 0"),
        (["--steps", "-1"], "--steps must be above 0; got -1"),
        (["--layers", "two"], "--layers: invalid int value"),
        (["--attention", "magic"], "invalid choice: 'magic'"),
        (["--resume"], "--resume needs --out"),
        (["--seed", "-1"], "--seed must not be negative; got -1"),
        (["--mesh", "data=2,model=2"], "--mesh: the axes are data, seq, tensor; got 'model'"),
        (["--mesh", "data=two"], "--mesh: data must be a positive number of devices; got 'two'"),
        (["--mesh", "seq=0"], "--mesh: seq must be a positive number of devices; got '0'"),
        (["--mesh", "data=2,data=2"], "--mesh: data is given twice"),
        (["--mesh", "data=100"], "--mesh asks for 100 devices; there are "),
        (["--mesh", "data=4", "--batch-size", "6"], "--batch-size must be divisible by data of --mesh; got 6 and 4"),
        (["--mesh", "seq=2", "--length", "15"], "--length must be divisible by seq of --mesh; got 15 and 2"),
        (["--mesh", "tensor=4"], "--heads must be divisible by tensor of --mesh; got 2 and 4"),
    ],
)
def test_wrong_flags_are_one_line(example, capsys, flags, text_of_error):
    assert text_of_error in fails(example, capsys, *flags)


def test_text_that_cannot_be_used_is_one_line(example, capsys, tmp_path, monkeypatch):
    short = tmp_path / "short.txt"
    short.write_bytes(b"too short")
    assert "too few for --length 16" in fails(example, capsys, "--data", short, "--out", tmp_path / "run")
    (tmp_path / "empty").mkdir()
    assert "too few for --length 16" in fails(example, capsys, "--data", tmp_path / "empty", "--out", tmp_path / "run")

    def unreadable(path):
        raise PermissionError(13, "Permission denied", str(path))  # whoever runs the tests may be allowed everything

    monkeypatch.setattr(Path, "read_bytes", unreadable)
    assert f"Permission denied: '{short}'" in fails(example, capsys, "--data", short, "--out", tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_folder_of_another_run_is_one_line(example, capsys, text, whole_run, tmp_path):
    flags = ["--data", text, *FAST, "--steps", "50", "--out"]
    assert "holds a run already" in fails(example, capsys, *flags, whole_run)
    assert "no run to resume" in fails(example, capsys, *flags, tmp_path / "none", "--resume")
    assert "another dim" in fails(example, capsys, *flags, whole_run, "--resume", "--dim", "32")
    assert "has taken 40 steps already" in fails(example, capsys, *flags, whole_run, "--resume", "--steps", "40")
    assert losses(whole_run)[-1][0] == 40


def test_a_broken_checkpoint_is_one_line(example, capsys, text, whole_run, tmp_path):
    flags = ["--data", text, *FAST, "--steps", "50", "--resume", "--out"]
    shutil.copytree(whole_run, tmp_path / "cut")
    for file in (tmp_path / "cut" / "checkpoints" / "40").rglob("*"):
        if file.is_file():
            file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    assert "cannot read" in fails(example, capsys, *flags, tmp_path / "cut")
    shutil.copytree(whole_run, tmp_path / "settings")
    (tmp_path / "settings" / "settings.json").write_text("{")
    assert "cannot read" in fails(example, capsys, *flags, tmp_path / "settings")


def test_attention_that_cannot_run_here_is_one_line(example, capsys, text, tmp_path):
    error = fails(example, capsys, "--data", text, "--out", tmp_path / "run", "--attention", "triton")
    assert "triton" in error and "GPU" in error


def test_without_the_optional_packages_it_trains_and_says_so_once(example, capsys, text, tmp_path, monkeypatch):
    for name in ("tqdm", "orbax.checkpoint", "matplotlib.figure"):
        monkeypatch.setitem(sys.modules, name, None)
    out = tmp_path / "run"
    assert example.main([*TINY, "--data", str(text), "--steps", "2", "--out", str(out)]) == 0
    said = capsys.readouterr().out
    for name in ("tqdm", "orbax", "matplotlib"):
        assert said.count(f"{name} is not installed") == 1
    assert len(records(out)) == 2
    assert not (out / "checkpoints").exists() and not (out / "loss.png").exists()
    assert "there is no checkpoint" in fails(example, capsys, "--data", text, "--out", out, "--resume")


@pytest.mark.parametrize("mesh", every(2, [[], ["--mesh", "data=2"]]), ids=["one-device", "mesh"])
def test_interrupting_saves_and_stops(text, tmp_path, mesh):
    out = tmp_path / "run"
    command = [sys.executable, str(SCRIPT), *TINY, *mesh, "--data", str(text), "--out", str(out)]
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(SCRIPT.parents[1])}
    environment |= {"JAX_NUM_CPU_DEVICES": "2"} if mesh else {}
    process = subprocess.Popen(
        [*command, "--steps", "1000000", "--eval-every", "1000000"],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    while process.poll() is None and not (out / "log.jsonl").exists():
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    said, error = process.communicate(timeout=60)
    assert (process.returncode, error) == (0, "")
    steps = len(records(out))
    assert f"stopped after step {steps}" in said
    assert [p.name for p in (out / "checkpoints").iterdir()] == [str(steps)]
