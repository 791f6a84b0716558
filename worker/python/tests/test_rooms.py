"""The package's folders import each other in one direction, and its modules without cycles. import-linter checks the contracts of
.importlinter.

tests/run installs import-linter beside the other packages, into the folder that TEST_TYPES names.
"""

import importlib.util
import os
import pathlib
import subprocess
import sys

import pytest

import longshore

FOLDER = os.environ.get("TEST_TYPES")
CONTRACTS = pathlib.Path(__file__).parent.parent / ".importlinter"


@pytest.mark.skipif(
    not FOLDER and importlib.util.find_spec("importlinter") is None,
    reason=os.environ.get("TEST_TYPES_ABSENT") or "import-linter is not installed: tests/run installs it",
)
def test_folders_import_in_one_direction() -> None:
    package = pathlib.Path(longshore.__file__).parent.parent
    path = os.pathsep.join(filter(None, (str(package), FOLDER, os.environ.get("PYTHONPATH"))))
    code = "import sys; from importlinter.cli import lint_imports; sys.exit(lint_imports(config_filename=sys.argv[1], no_cache=True))"
    command = [sys.executable, "-c", code, str(CONTRACTS)]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path})
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 kept, 0 broken" in done.stdout
