"""What the documentation says, runs: Python blocks of the README and docs, docstring examples, commands, links."""

import doctest
import importlib
import inspect
import re
import shlex
import sys
from pathlib import Path

import pytest

import flash_jax
from tests.support.tiers import every

ROOT = Path(__file__).resolve().parent.parent
PAGES = {
    str(page.relative_to(ROOT)): page.read_text() for page in [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md"))]
}
FENCE = re.compile(r"^( *)```(\S*)[^\n]*\n(.*?)^\1```", re.MULTILINE | re.DOTALL)
PUBLIC_MODULES = ["flash_jax", "flash_jax.flax.linen", "flash_jax.flax.nnx"]


def blocks(page: str, *languages: str) -> list[str]:
    """The page's code blocks in these languages, each after so many empty lines that errors name the page's line."""
    text = PAGES[page]
    return [
        "\n" * text.count("\n", 0, match.start(3)) + inspect.cleandoc("\n" + match[3])
        for match in FENCE.finditer(text)
        if match[2] in languages
    ]


def documented() -> dict[str, object]:
    """Every public name that is a function or class, and the methods that a public class of ours defines."""
    found = {}
    for module in map(importlib.import_module, PUBLIC_MODULES):
        for name in module.__all__:
            thing = getattr(module, name)
            if not callable(thing):
                continue
            found[f"{module.__name__}.{name}"] = thing
            for method, of_class in vars(thing).items() if inspect.isclass(thing) else ():
                if (
                    inspect.isfunction(of_class)
                    and not method.startswith("_")
                    and of_class.__module__.startswith("flash_jax")
                ):
                    found[f"{module.__name__}.{name}.{method}"] = of_class
    return found


@pytest.mark.parametrize("page", every(99, [page for page in PAGES if blocks(page, "python")]))
def test_python_blocks_run(page):
    names = {"__name__": "__main__"}  # one namespace a page: later blocks go on where earlier ones ended
    for block in blocks(page, "python"):
        exec(compile(block, page, "exec"), names)


@pytest.mark.parametrize("name", documented())
def test_public_names_are_documented_and_their_examples_run(name):
    thing = documented()[name]
    assert inspect.getdoc(thing)
    runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE | doctest.FAIL_FAST)
    module = sys.modules[getattr(thing, "__module__", "flash_jax")]
    for example in doctest.DocTestFinder(recurse=False).find(thing, name, module=False, globs=dict(vars(module))):
        runner.run(example)
    assert runner.summarize().failed == 0


def test_flash_attention_has_an_example():
    (found,) = doctest.DocTestFinder(recurse=False).find(flash_jax.flash_attention, module=False, globs={})
    assert found.examples


@pytest.mark.parametrize("page", PAGES)
def test_commands_named_are_there(page):
    runner = (ROOT / "scripts" / "run.py").read_text()
    extras = (ROOT / "pyproject.toml").read_text().partition("[project.optional-dependencies]")[2]
    for script, task in re.findall(r"python3? (scripts/\S+\.py)(?: --no-venv)? ([a-z]+)", PAGES[page]):
        assert (ROOT / script).exists()
        assert f'"{task}": (' in runner
    for named in re.findall(r"\[(cuda\d+|flax|examples|test|bench)\]", PAGES[page]):
        assert f"\n{named} = [" in extras
    for line in (line for block in blocks(page, "sh", "bash") for line in block.strip().splitlines()):
        for word in shlex.split(line, comments=True):
            assert not word.endswith((".py", ".sh")) or (ROOT / word).exists(), line


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_to_files(page):
    targets = re.findall(r"\]\((?!https?:|#)([^)#\s]+)", PAGES[page])
    assert [target for target in targets if not (ROOT / page).parent.joinpath(target).exists()] == []
