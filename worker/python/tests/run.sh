# shellcheck shell=bash
# What tests/run does for the Python package: PyTorch, the package itself, and pytest.

# Makes a Python that has PyTorch, outside of the clone, and sets `package_python`. Its folder is named after what is pinned, so
# that clones with other pins get another one. The stamp, which is written last, says that it is whole.
install_torch() {
    local requirements=$root/worker/python/tests/requirements.txt base=${PYTHON:-python3} wanted folder
    wanted=$("$base" - "$requirements" <<'PY'
import hashlib, pathlib, sys
text = pathlib.Path(sys.argv[1]).read_text() + sys.version + sys.executable
print(hashlib.sha256(text.encode()).hexdigest()[:16])
PY
    )
    folder=${LONGSHORE_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/longshore}/python-$wanted
    package_python=$folder/bin/python
    mkdir -p "${folder%/*}"
    (
        if command -v flock >/dev/null; then
            exec 9>"$folder.lock"
            flock 9
        fi
        [[ -f $folder/stamp ]] && exit
        printf 'tests/run: installing PyTorch into %s (4.5 GB)\n' "$folder"
        rm -rf "$folder"
        "$base" -m venv "$folder" || exit 1
        "$package_python" -m pip install --quiet --disable-pip-version-check --no-deps --only-binary=:all: -r "$requirements" || exit 1
        touch "$folder/stamp"
    ) || fail "PyTorch could not be installed: see above, or leave the Python package out with LONGSHORE_SKIP_PACKAGE=1"
}

# Installs what requirements-NAME.txt pins beside that, into a folder of its own, which only the tests that need it put on their path.
# Exports TEST_NAME as that folder, or TEST_NAME_ABSENT as why it is not there: those tests are skipped then. Neither begins with
# LONGSHORE_, which the commands refuse where they do not know it. The folder lies within the environment's prefix: elsewhere dill,
# by which datasets are hashed, would take all packages for a user's own. More arguments are pip's.
install_beside() {
    local name=$1 requirements=$root/worker/python/tests/requirements-$1.txt parent=${package_python%/bin/python} folder variable
    shift
    folder=$parent/$name-$(sha256sum "$requirements" | cut -c1-16)
    variable=TEST_$(tr 'a-z-' 'A-Z_' <<<"$name")
    (
        if command -v flock >/dev/null; then
            exec 9>"$folder.lock"
            flock 9
        fi
        [[ -f $folder/stamp ]] && exit
        rm -rf "$folder"
        "$package_python" -m pip install --quiet --disable-pip-version-check --no-deps --only-binary=:all: --target "$folder" \
            -r "$requirements" "$@" >"$folder.log" 2>&1 || exit 1
        touch "$folder/stamp"
    ) || true
    if [[ -f $folder/stamp ]]; then
        export "$variable=$folder"
    else
        export "${variable}_ABSENT=$name could not be installed: $folder.log says why"
    fi
}

# Builds the package as `pip install ./worker/python` does, and installs it into the clone's cache.
install_package() {
    local package=$cache/python-package
    rm -rf "$package"
    # maturin is in the environment already. Without isolation it takes what cargo has built here.
    PATH=${package_python%/*}:$PATH "$package_python" -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation \
        --target "$package" "$root/worker/python" || fail "the Python package could not be built"
    export PYTHONPATH=$package
}

# Runs the package's tests and adds them to passed, failed and skipped. Arguments are pytest's. Names of tests that failed and then
# passed are appended to LONGSHORE_TEST_FLAKY.
test_package() {
    local base=${PYTHON:-python3} results=$cache/pytest.xml again=$cache/pytest-again.xml own_passed own_failed own_skipped reason=
    [[ ${LONGSHORE_SKIP_PACKAGE:-} ]] && reason="LONGSHORE_SKIP_PACKAGE is set"
    "$base" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || reason="it needs Python 3.11 or later, and $base is older"
    if [[ $reason ]]; then
        printf 'worker/python: the Python package: %s\n' "$reason" >>"$LONGSHORE_TEST_SKIPPED"
        ((skipped += 1))
        return
    fi
    took "tests of the workspace"
    install_torch
    # Without isolation DeepSpeed's setup.py finds the torch that is there, instead of installing another one.
    DS_BUILD_OPS=0 install_beside deepspeed --no-build-isolation --no-binary=deepspeed
    install_beside fine-tuning
    install_beside types
    install_beside xdist
    install_package
    took "installed the Python package"
    # Half of a test is waiting for processes to start. A file's tests stay in one process, since they share what they have started.
    local parallel=()
    if [[ ${TEST_XDIST:-} ]]; then
        export PYTHONPATH=$PYTHONPATH:$TEST_XDIST
        parallel=(-n 2 --dist loadfile)
    fi
    # From another folder, so that the installed package is tested and not its sources. The exit status also tells of errors
    # outside of tests.
    package_pytest() {
        (cd "$cache" && "$package_python" -m pytest --durations 15 -o cache_dir="$cache/pytest" "$@" "$root/worker/python/tests")
    }
    # Failures of earlier runs are forgotten, so that only this run's are repeated.
    rm -rf "$cache/pytest" "$results" "$again"
    package_pytest ${parallel[@]+"${parallel[@]}"} --junitxml="$results" "$@" || package_failed=1
    # A test that failed is run once more, with nothing beside it. One that passes then is flaky.
    if ((package_failed)); then
        took "failed tests of the Python package once more"
        package_pytest --last-failed --last-failed-no-failures none --junitxml="$again" && package_failed=0
    fi
    read -r own_passed own_failed own_skipped < <(
        "$package_python" - "$results" "$again" "$LONGSHORE_TEST_SKIPPED" "$LONGSHORE_TEST_FLAKY" <<'PY'
import os, sys, xml.etree.ElementTree as tree


def cases(path):
    """By name a test's result and its message."""
    found = {}
    for case in tree.parse(path).iter("testcase") if os.path.exists(path) else ():
        failure = case.find("failure") if case.find("error") is None else case.find("error")
        skip = case.find("skipped")
        result = "failed" if failure is not None else "passed" if skip is None else "skipped"
        found[f"{case.get('classname')}::{case.get('name')}"] = result, "" if skip is None else skip.get("message")
    return found


first, again = cases(sys.argv[1]), cases(sys.argv[2])
flaky = [name for name, (result, _) in first.items() if result == "failed" and again.get(name, ("",))[0] == "passed"]
results = {**first, **again}
with open(sys.argv[3], "a") as log:
    for name, (result, message) in results.items():
        if result == "skipped":
            print(f"{name}: {message}", file=log)
with open(sys.argv[4], "a") as log:
    for name in flaky:
        print(name, file=log)
for name, (result, _) in results.items():
    if result == "failed":
        print(f"tests/run: failed: {name}", file=sys.stderr)
counted = [result for result, _ in results.values()]
print(*(counted.count(result) for result in ("passed", "failed", "skipped")))
PY
    )
    ((passed += own_passed, failed += own_failed, skipped += own_skipped)) || true
}
