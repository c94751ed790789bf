"""Runs a command for as long as the other end of standard input is held: `python lifeline.py COMMAND …`.

When it closes, because the tests have ended however they did, the whole process group is killed.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading


def watch() -> None:
    """Kill the group, this process included, at the end of standard input."""
    os.read(0, 1)
    os.killpg(0, signal.SIGKILL)


threading.Thread(target=watch, daemon=True).start()
sys.exit(subprocess.call(sys.argv[1:], stdin=subprocess.DEVNULL))
