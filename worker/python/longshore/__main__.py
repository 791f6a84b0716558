"""Entry point of ``python -m longshore``, the command ``longshore``. The wheel also installs ``longshore`` and ``longshored`` by name."""

import signal
import sys

from longshore import _longshore


def main() -> int:
    # Ctrl-C ends the command at once. Python's own handler would only note the signal for Python code, and no Python
    # code runs before the command ends.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    return _longshore.longshore(["longshore", *sys.argv[1:]])


def serve() -> int:
    return _longshore.longshored(["longshored", *sys.argv[1:]])


if __name__ == "__main__":
    sys.exit(main())
