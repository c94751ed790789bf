"""Scenarios for the rows of the state tables at the heads of `handoff/*.py`; `test_tables.py` runs them."""
