"""Imported last by the forkserver of `tests/processes.py`.

Garbage collections of its forks leave alone what is loaded by now; they would copy all of it.
"""

from __future__ import annotations

import gc

gc.collect()
gc.freeze()
