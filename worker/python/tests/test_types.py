"""The types for type checkers: the stub equals the compiled module, the public modules are consistent, and the README's lines check. The
package's folders import each other in one direction.

tests/run installs mypy and import-linter beside the other packages, into a folder that TEST_TYPES names.
"""

import ast
import importlib.util
import inspect
import os
import pathlib
import re
import subprocess
import sys
from typing import Any

import pytest

import longshore
from longshore import _longshore

FOLDER = os.environ.get("TEST_TYPES")
needs_tools = pytest.mark.skipif(
    not FOLDER and not all(map(importlib.util.find_spec, ("mypy", "importlinter"))),
    reason=os.environ.get("TEST_TYPES_ABSENT") or "mypy and import-linter are not installed: tests/run installs them",
)
#: The environment in which Python finds mypy and import-linter.
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (FOLDER, os.environ.get("PYTHONPATH"))))}
PACKAGE = pathlib.Path(longshore.__file__).parent
README = pathlib.Path(__file__).parent.parent.parent.parent / "README.md"
#: Code around the lines of the README, with the definitions that they need.
AROUND = """
from torch import nn
from torch.utils.data import Dataset
from transformers import PreTrainedModel, Trainer, TrainingArguments


def lines(model: PreTrainedModel, args: TrainingArguments, dataset: Dataset[object]) -> None:
"""
#: Further lines as users write them. Each module is reachable from the package, and a wrong use is an error.
USES = """
import torch
import longshore

callback: longshore.huggingface.Callback = longshore.huggingface.Callback(checkpoint=True)
strategy = longshore.lightning.Strategy()
schedule = longshore.schedules.WarmupLR(torch.optim.SGD([]), warmup_max_lr=1.0)
shape = longshore.Shape((2, 3), "bf16")
longshore.accelerate.attach, longshore.axolotl.Plugin, longshore.checkpoint.save_deepspeed, longshore.jax.Client
longshore.AdamW([], lr="a")  # wrong: lr
longshore.AdamW([], tier="tape")  # wrong: tier
longshore.huggingface.Callback(checkpoints=True)  # wrong: name
longshore.nothing  # wrong: module
"""


def stub() -> dict[str, Any]:
    """Returns the stub's declarations by name: functions, and methods and properties of classes."""
    declared: dict[str, Any] = {}
    for node in ast.parse((PACKAGE / "_longshore.pyi").read_text()).body:
        if isinstance(node, ast.ClassDef):
            declared[node.name] = {part.name: part for part in node.body if isinstance(part, ast.FunctionDef)}
        elif isinstance(node, ast.FunctionDef):
            declared[node.name] = node
    return declared


def parameters(node: ast.FunctionDef) -> list[tuple[str, bool]]:
    """Returns the names of a declared function's parameters, and whether each has a default."""
    positional = node.args.posonlyargs + node.args.args
    without = len(positional) - len(node.args.defaults)
    found = [(argument.arg, index >= without) for index, argument in enumerate(positional)]
    found += [(argument.arg, value is not None) for argument, value in zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True)]
    return [each for each in found if each[0] != "self"]


def compiled(function: Any) -> list[tuple[str, bool]]:
    found = inspect.signature(function).parameters.values()
    return [(each.name, each.default is not each.empty) for each in found if each.name != "self"]


def test_the_stub_declares_what_was_compiled() -> None:
    declared = stub()
    there = {name for name in dir(_longshore) if not name.startswith("__")}
    assert there == set(declared)
    for name, node in declared.items():
        made = getattr(_longshore, name)
        if isinstance(node, ast.FunctionDef):
            assert compiled(made) == parameters(node), name
            continue
        assert {part for part in dir(made) if not part.startswith("_")} == {part for part in node if not part.startswith("_")}, name
        for part, method in node.items():
            if any(isinstance(mark, ast.Name) and mark.id == "property" for mark in method.decorator_list):
                assert not callable(getattr(made, part)), f"{name}.{part}"
            else:
                assert compiled(made if part == "__init__" else getattr(made, part)) == parameters(method), f"{name}.{part}"


def modules() -> list[str]:
    """Returns the modules that users import from."""
    folders = ["checkpoint", "client"]
    return sorted(f"longshore.{name}" for name in [*(path.stem for path in PACKAGE.glob("[!_]*.py")), *folders])


@needs_tools
def test_folders_import_in_one_direction() -> None:
    """import-linter checks the contracts of .importlinter."""
    code = "import sys; from importlinter.cli import lint_imports; sys.exit(lint_imports(config_filename=sys.argv[1], no_cache=True))"
    command = [sys.executable, "-c", code, str(pathlib.Path(__file__).parent.parent / ".importlinter")]
    path = os.pathsep.join([str(PACKAGE.parent), ENVIRONMENT["PYTHONPATH"]])
    done = subprocess.run(command, capture_output=True, text=True, env={**ENVIRONMENT, "PYTHONPATH": path})
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 kept, 0 broken" in done.stdout


@needs_tools
def test_the_public_modules_and_the_readmes_lines_check(tmp_path: pathlib.Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert len(blocks) >= 3 and any("longshore.huggingface.Callback()" in block for block in blocks)
    indented = "".join(f"    {line}\n" for block in blocks for line in block.splitlines())
    (tmp_path / "readme_lines.py").write_text(AROUND + "    import longshore\n" + indented)
    (tmp_path / "readme_uses.py").write_text(USES)
    # Only errors in these modules count. Other modules are private, or belong to other projects.
    named = [argument for name in ["readme_lines", "readme_uses", "longshore", *modules()] for argument in ("-m", name)]
    command = [sys.executable, "-m", "mypy", "--config-file=", "--ignore-missing-imports", "--follow-imports=silent", "--show-error-codes"]
    # The cache lies beside mypy, outside of the clone. Most of the time goes into modules of torch and transformers,
    # which no clone changes.
    cache = pathlib.Path(FOLDER or tmp_path) / "mypy-cache"
    command += ["--check-untyped-defs", "--no-error-summary", f"--cache-dir={cache}", *named]
    environment = {**ENVIRONMENT, "MYPYPATH": f"{tmp_path}{os.pathsep}{PACKAGE.parent}"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path)
    assert not done.stderr and done.returncode in (0, 1), done.stderr
    said = [line for line in done.stdout.splitlines() if ": error:" in line]
    wrong = {number for number, line in enumerate(USES.splitlines(), 1) if "# wrong" in line}
    found = {int(line.split(":")[1]) for line in said if line.startswith("readme_uses.py:")}
    assert found == wrong, said
    assert not [line for line in said if not line.startswith("readme_uses.py:")]
