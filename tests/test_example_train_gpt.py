"""The training example: it learns, resumes bit for bit, stops when asked, and says in one line what is wrong."""

import importlib.util
import json
import os
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

SCRIPT = Path(__file__).parents[1] / "examples" / "train_gpt.py"
TINY = ["--layers", "1", "--dim", "16", "--heads", "2", "--length", "16", "--batch-size", "4", "--seed", "3"]
FAST = ["--learning-rate", "0.02", "--eval-every", "20"]


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


def test_interrupting_saves_and_stops(text, tmp_path):
    out = tmp_path / "run"
    command = [sys.executable, str(SCRIPT), *TINY, "--data", str(text), "--out", str(out)]
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(SCRIPT.parents[1])}
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
