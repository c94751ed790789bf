"""Ids, token chains, block spans, layouts, phases, reasons, errors, clock: what every layer speaks."""
