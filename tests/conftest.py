"""Set before torch is loaded anywhere: the exact mode's environment, and one thread for each engine."""

from __future__ import annotations

import gc

from hypothesis import HealthCheck, settings

from kvhandoff.embedded.process import prepare

prepare(exact=True, threads=1)

# An example takes as long as it takes: the machine may stand still for a moment. The examples are the same in
# every run, so that a run says something of the code alone; others are tried by hand, with
# `pytest --hypothesis-profile=random`.
_patient = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("same", _patient, derandomize=True)
settings.register_profile("random", _patient)
settings.load_profile("same")


def pytest_collection_finish() -> None:
    """Garbage collections leave alone what is loaded by now: nothing happens while they go through all of
    it."""
    gc.collect()
    gc.freeze()
