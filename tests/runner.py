"""Runs the tests of built programs: each in its own process, three for a core at once, since end-to-end tests wait most of the time.

`tests/run` calls this with the messages of a cargo build. With its own process each test has its time, an abort ends one test, and a failed
test can run once more by itself. Tests that measure run last, one at a time.
"""

import argparse
import collections
import concurrent.futures
import contextlib
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import threading
import time

# End-to-end tests that measure CPU time or speed, which tests beside them would change.
MEASURING = ("bench::", "floods::beside", "large::", "output::a_cluster_is_entered_as_its_entry_says")
# End-to-end tests of packages, of the page in a browser, and of large jobs: `--all` or their name runs them.
ONLY_WITH_ALL = ("chart", "container", "floods::beside", "large", "monitoring", "packages", "page", "slurm")
# Longer than any test takes on a busy machine. Soak tests take hours.
DEADLINE = None if "LONGSHORE_SOAK" in os.environ else 900
# Tests at once for each core: an end-to-end test takes a quarter of a core on the mean.
TESTS_PER_CORE = 3
# After more failures than this the build or the machine is at fault, and no test is repeated.
MOST_REPEATED = 20
SLOWEST = 20

Test = collections.namedtuple("Test", "crate name program folder")


def programs(messages, root):
    """Returns the crate, path and folder of each test program."""
    for line in messages.read_text().splitlines():
        message = json.loads(line) if line.startswith("{") else {}
        if message.get("reason") == "compiler-artifact" and message["profile"]["test"] and message["executable"]:
            folder = pathlib.Path(message["manifest_path"]).parent
            yield str(folder.relative_to(root)), message["executable"], folder


def listed(program, *options):
    """Returns the names of a program's tests."""
    command = [program, "--list", "--format", "terse", *options]
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return [line.removesuffix(": test") for line in text.splitlines() if line.endswith(": test")]


def is_measuring(test):
    return test.crate == "tests" and test.name.startswith(MEASURING)


def needs_all(test):
    return test.crate == "tests" and test.name.startswith(tuple(f"{module}::" for module in ONLY_WITH_ALL))


def named(test, word):
    """Returns whether a word chooses a test: `kills::` means a file of end-to-end tests, and `kills` a part of any name."""
    return test.crate == "tests" and test.name.startswith(word) if word.endswith("::") else word in test.name


def kill(process):
    """Kills a test's process and its descendants."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


class Runner:
    def __init__(self, log, times, nocapture):
        self.log, self.times, self.nocapture = log, times, nocapture
        self.lock = threading.Lock()
        self.running = set()

    def say(self, text):
        with self.lock:
            print(text, flush=True)
            print(text, file=self.log, flush=True)

    def run(self, test):
        """Runs a test in its own session. Returns whether it passed."""
        # With a single thread libtest runs a test in the main thread, which lacks the test's name.
        command = [test.program, "--exact", test.name, "--test-threads", "2"]
        if self.nocapture:
            command.append("--nocapture")
        begun = time.monotonic()
        # A file instead of a pipe: a pipe ends only with the last process that a test leaves behind.
        with tempfile.TemporaryFile() as written:
            process = subprocess.Popen(
                command, cwd=test.folder, stdin=subprocess.DEVNULL, stdout=written, stderr=subprocess.STDOUT, start_new_session=True
            )
            with self.lock:
                self.running.add(process)
            try:
                status = process.wait(DEADLINE)
                end = f"ended by signal {-status}\n" if status < 0 else ""
            except subprocess.TimeoutExpired:
                status, end = -signal.SIGKILL, f"killed after {DEADLINE} s\n"
            finally:
                with self.lock:
                    self.running.discard(process)
            if status:
                kill(process)
            written.seek(0)
            output = written.read().decode(errors="replace") + end
        took = time.monotonic() - begun
        passed = status == 0
        self.times[f"{test.crate} {test.name}"] = round(took, 2)
        text = f"{'ok    ' if passed else 'FAILED'} {took:7.2f} s  {test.crate}  {test.name}"
        self.say(text if passed and not self.nocapture else f"{text}\n{output}")
        return passed

    def run_all(self, tests, jobs):
        """Runs tests in parallel. Returns the failed ones."""
        with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
            try:
                passed = list(pool.map(self.run, tests))
            except KeyboardInterrupt:
                pool.shutdown(wait=False, cancel_futures=True)
                with self.lock:
                    for process in self.running:
                        kill(process)
                raise
        return [test for test, good in zip(tests, passed) if not good]


def report(times, say):
    """Reports the time of each file of end-to-end tests and of each crate, and the slowest tests."""
    parts = collections.Counter()
    for key, took in times.items():
        crate, name = key.split(" ", 1)
        parts[f"{crate}/tests/{name.split('::')[0]}" if crate == "tests" else crate] += took
    say("\nseconds by file of tests/ and by crate:")
    for part, took in parts.most_common():
        if took >= 1:
            say(f"{took:9.1f}  {part}")
    say(f"\nthe {SLOWEST} slowest tests, in seconds:")
    for key, took in sorted(times.items(), key=lambda entry: -entry[1])[:SLOWEST]:
        say(f"{took:9.1f}  {key}")


def main():
    parser = argparse.ArgumentParser(prog="tests/run ... --")
    parser.add_argument("--messages", type=pathlib.Path, required=True, help=argparse.SUPPRESS)
    parser.add_argument("--cache", type=pathlib.Path, required=True, help=argparse.SUPPRESS)
    parser.add_argument("--flaky", type=pathlib.Path, required=True, help=argparse.SUPPRESS)
    parser.add_argument("--all", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--name", action="append", default=[], help=argparse.SUPPRESS)
    parser.add_argument("--nocapture", action="store_true", help="show the output of tests that pass too")
    parser.add_argument("--test-threads", type=int, default=TESTS_PER_CORE * os.cpu_count(), help="how many tests run at once")
    parser.add_argument("words", nargs="*", metavar="WORD", help="run those of the chosen tests whose name contains one")
    options = parser.parse_args()
    root = pathlib.Path(__file__).resolve().parent.parent

    remembered = options.cache / "times.json"
    try:
        known = json.loads(remembered.read_text())
    except (OSError, ValueError):
        known = {}
    chosen, ignored = [], 0
    for crate, program, folder in programs(options.messages, root):
        unasked = set(listed(program, "--ignored"))
        for name in listed(program):
            test = Test(crate, name, program, folder)
            if options.name and not any(named(test, word) for word in options.name):
                continue
            if options.words and not any(word in name for word in options.words):
                continue
            if name in unasked:
                ignored += 1
            elif options.all or options.name or not needs_all(test):
                chosen.append(test)
    # The longest tests begin first, so that none runs alone at the end. End-to-end tests of unknown length precede unit tests.
    chosen.sort(key=lambda test: -known.get(f"{test.crate} {test.name}", 1 if test.crate == "tests" else 0))

    times = {}
    with open(options.cache / "tests.log", "w") as log:
        runner = Runner(log, times, options.nocapture)
        failed = runner.run_all([test for test in chosen if not is_measuring(test)], options.test_threads)
        failed += runner.run_all([test for test in chosen if is_measuring(test)], 1)
        whole = dict(times)
        flaky = []
        if len(failed) <= MOST_REPEATED:
            for test in failed[:]:
                runner.say(f"once more, by itself: {test.name}")
                if runner.run(test):
                    failed.remove(test)
                    flaky.append(test.name)
        report(whole, runner.say)
        if not (options.all or options.name):
            runner.say(f"\nleft out: {', '.join(ONLY_WITH_ALL)} (tests/run --all, or by name)")
        for test in failed:
            runner.say(f"tests/run: failed: {test.name}")
    remembered.write_text(json.dumps(known | whole, indent=0, sort_keys=True))
    with open(options.flaky, "a") as names:
        names.writelines(f"{name}\n" for name in flaky)
    (options.cache / "counts").write_text(f"{len(chosen) - len(failed)} {len(failed)} {ignored}\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
