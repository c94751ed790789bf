"""Set before torch is loaded anywhere: the exact mode's environment, and one thread for each engine."""

from __future__ import annotations

from kvhandoff.embedded.process import prepare

prepare(exact=True, threads=1)
