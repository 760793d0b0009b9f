"""Does all the set-up that a task needs, then runs the task; what follows the task's name is passed on to it.

    python3 scripts/run.py train      examples/train_gpt.py, on the GPU where there is one
    python3 scripts/run.py test       pytest, on every core
    python3 scripts/run.py compile    pytest -m compile: the kernels through a GPU compiler, no GPU needed
    python3 scripts/run.py check      ruff, pyright and the documentation's build

Needs Python 3.11 or newer and pip, nothing else. The packages go into an environment inside the checkout
(.venvs/, ignored by git), made at the first run and reused, without network, until pyproject.toml changes.
`python3 scripts/run.py --no-venv TASK` runs the task on the calling Python and whatever is installed there.
"""

from __future__ import annotations  # lets an older Python read the file, and so say what it lacks

import argparse
import hashlib
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ENVIRONMENTS = ROOT / ".venvs"
CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
# A worker holds JAX, eight virtual devices and what they compiled, so many cores do not mean as many workers.
WORKERS = str(min(CORES, 8))

# task: (the extra of pyproject.toml that it needs, its commands; the last one gets the user's arguments)
TASKS = {
    "train": ("examples", [[str(ROOT / "examples" / "train_gpt.py")]]),
    "test": ("test", [["-m", "pytest", "-n", WORKERS]]),
    "compile": ("compile", [["-m", "pytest", "-n", WORKERS, "-m", "compile"]]),
    "check": (
        "dev",
        [
            ["-m", "ruff", "check", "."],
            ["-m", "ruff", "format", "--check", "."],
            ["-m", "mkdocs", "--quiet", "build", "--strict"],
            ["-m", "pyright"],
        ],
    ),
}


def cuda_extra() -> str | None:
    """The extra that fits this machine's NVIDIA driver; None without one, or where JAX has no CUDA build."""
    if sys.platform != "linux" or platform.machine() not in ("x86_64", "aarch64"):
        return None
    driver = driver_version()
    if driver is None:
        return None
    if driver >= 580:
        return "cuda13"
    if driver >= 525:
        return "cuda12"
    print(f"run.py: JAX needs NVIDIA driver 525 or newer; this is {driver}, so the CPU is used.", file=sys.stderr)
    return None


def driver_version() -> int | None:
    """The NVIDIA driver's major version, None where there is no GPU with a driver."""
    if shutil.which("nvidia-smi"):
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        found = re.match(r"\d+", subprocess.run(query, capture_output=True, text=True, check=False).stdout)
        if found:
            return int(found[0])
    proc = Path("/proc/driver/nvidia/version")
    found = re.search(r"Kernel Module\D*(\d+)\.", proc.read_text()) if proc.exists() else None
    return int(found[1]) if found else None


def environment_python(extra: str) -> Path:
    """The interpreter of an environment that has `extra` and the package itself, made or brought up to date as needed.

    One environment for each Python version; the compile lane has one of its own, because JAX's CUDA plugin makes every
    program beside it look for a GPU first.
    """
    name = f"py{sys.version_info.major}.{sys.version_info.minor}" + ("-compile" if extra == "compile" else "")
    folder = ENVIRONMENTS / name
    python = folder / "bin" / "python"
    stamp = folder / "installed.txt"
    project = hashlib.sha256((ROOT / "pyproject.toml").read_bytes()).hexdigest()
    base = f"{project} {sys.version.split()[0]} {ROOT}"

    made_from, *installed = stamp.read_text().splitlines() if stamp.exists() and python.exists() else [""]
    if made_from != base:
        installed = []
    wanted = {extra} | ({cuda_extra() or "cpu"} if extra != "compile" else set())
    if wanted <= set(installed):
        return python

    extras = sorted(wanted.union(installed) - {"cpu"})
    print(f"run.py: installing flash-jax[{','.join(extras)}] into {folder}; a minute or more ...", flush=True)
    if made_from != base or not python.exists():
        make_environment(folder)
    stamp.unlink(missing_ok=True)
    install(python, "--editable", f"{ROOT}[{','.join(extras)}]")
    stamp.write_text("\n".join([base, *sorted(wanted.union(installed))]) + "\n")
    return python


def make_environment(folder: Path) -> None:
    """An empty environment; where `ensurepip` is missing (Debian packs it apart) the calling Python's pip installs."""
    venv.create(folder, clear=True, symlinks=True, with_pip=importlib.util.find_spec("ensurepip") is not None)


def install(python: Path, *what: str) -> None:
    """Runs `pip install` for the environment of `python`; ends the program with pip's own message where that fails."""
    has_pip = subprocess.run([python, "-c", "import pip"], capture_output=True, check=False).returncode == 0
    pip = [python, "-m", "pip"] if has_pip else [sys.executable, "-m", "pip", "--python", python]
    done = subprocess.run([*pip, "install", "--quiet", "--disable-pip-version-check", *what], check=False)
    if done.returncode:
        sys.exit(
            f"run.py: pip could not install {' '.join(what)} (see above). "
            "Where the packages are installed already, `python3 scripts/run.py --no-venv TASK` needs no network."
        )


def main() -> None:
    """Reads the command line, makes the environment and becomes the task's last command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--no-venv", action="store_true", help="use the calling Python and what is installed there")
    parser.add_argument("task", choices=TASKS)
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="passed on to the task")
    options = parser.parse_args()

    extra, commands = TASKS[options.task]
    if options.no_venv:
        python = Path(sys.executable)
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    else:
        python = environment_python(extra)
    os.environ["PATH"] = os.pathsep.join([str(python.parent), os.environ.get("PATH", "")])  # pyright asks there
    os.environ["NO_MKDOCS_2_WARNING"] = "1"  # an advertisement of mkdocs-material's
    if options.task != "train":  # whose paths are the user's own
        os.chdir(ROOT)

    *first, last = [[str(python), *command] for command in commands]
    failed = [" ".join(command[1:]) for command in first if subprocess.run(command, check=False).returncode]
    sys.stdout.flush()
    if not failed:
        os.execv(python, [*last, *options.arguments])  # so that Ctrl-C and the exit status are the task's own
    subprocess.run([*last, *options.arguments], check=False)
    sys.exit("run.py: failed: " + "; ".join(failed))


if __name__ == "__main__":
    if sys.version_info < (3, 11):  # noqa: UP036  (the message is for those who have only an older one)
        sys.exit("run.py: flash_jax needs Python 3.11 or newer; this is %s." % sys.version.split()[0])  # noqa: UP031
    main()
