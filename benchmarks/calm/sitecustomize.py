"""Loaded by every Python process of an engine under test: where one waits for another, it sleeps.

vLLM's processes wait for each other by calling `os.sched_yield` in a loop, for a second after each message.
On two cores some kernels (seen: Linux 6.18) then leave other threads runnable, and unscheduled, for as long
as a prompt is computed: the handoff's threads stood still for 5 s. Engines with cores of their own have
nothing of that, and they are what tests of deadlines, and of what happens meanwhile, are about.
"""

import os
import time

_PAUSE_S = 50e-6


def _sleep() -> None:
    time.sleep(_PAUSE_S)


os.sched_yield = _sleep
