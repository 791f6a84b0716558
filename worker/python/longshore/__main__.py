"""``python -m longshore`` is the command ``longshore``. The wheel installs it, and ``longshored``, by name too."""

import signal
import sys

from longshore import _longshore


def main() -> int:
    # Python's handler would only note Ctrl-C for Python code, of which none runs until the command ends.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    return _longshore.longshore(["longshore", *sys.argv[1:]])


def serve() -> int:
    return _longshore.longshored(["longshored", *sys.argv[1:]])


if __name__ == "__main__":
    sys.exit(main())
