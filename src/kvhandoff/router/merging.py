"""What several workers say, as one would say it: pure functions of their pages, the asked one's first; None
stands for that of one that does not answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

SUMMED_GAUGES = frozenset({"kvhandoff_router_in_flight", "kvhandoff_router_engine_legs"})
"""Gauges of what is each worker's own. The others show what all of them see: the worst of it is shown."""
LEAST_GAUGES = frozenset({"kvhandoff_router_engine_healthy"})


def merge_running(pages: Sequence[bytes | None]) -> bytes:
    """`GET /v1/handoffs`: the requests under way at all of them."""
    return msgspec.json.encode({"running": [record for page in _said(pages) for record in page["running"]]})


def merge_ready(pages: Sequence[bytes | None]) -> bytes:
    """`GET /ready`: the asked worker's, but legs are those of all, and an engine is drained when it is for
    all of them: while one does not answer, none is."""
    own, *others = _said(pages)
    for engine in own["engines"]:
        engine["drained"] = engine["drained"] and None not in pages
        for other in others:
            for same in other.get("engines", ()):
                if same["url"] == engine["url"]:
                    _join(engine, same)
    return msgspec.json.encode(own)


def merge_metrics(pages: Sequence[bytes | None]) -> bytes:
    """`GET /metrics`: counters and histograms are summed, as are the gauges of what is each worker's own."""
    families: dict[str, Metric] = {}
    values: dict[tuple[str, frozenset[tuple[str, str]]], float] = {}
    for page in filter(None, pages):
        for family in text_string_to_metric_families(page.decode()):
            known = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            together = _rule(family)
            for sample in family.samples:
                key = (sample.name, frozenset(sample.labels.items()))
                if key in values:
                    values[key] = (min if sample.name.endswith("_created") else together)(
                        values[key], sample.value
                    )
                else:
                    values[key] = sample.value
                    known.add_sample(sample.name, sample.labels, 0.0)
    return b"".join(_lines(family, values) for family in families.values())


def _rule(family: Metric) -> Callable[[float, float], float]:
    if family.type != "gauge" or family.name in SUMMED_GAUGES:
        return lambda a, b: a + b
    return min if family.name in LEAST_GAUGES else max


def _lines(family: Metric, values: dict[tuple[str, frozenset[tuple[str, str]]], float]) -> bytes:
    name = family.name + ("_total" if family.type == "counter" else "")
    lines = [f"# HELP {name} {_escaped(family.documentation)}", f"# TYPE {name} {family.type}"]
    created: list[str] = []
    for sample in family.samples:
        labels = ",".join(f'{key}="{_escaped(value, quote=True)}"' for key, value in sample.labels.items())
        value = values[sample.name, frozenset(sample.labels.items())]
        line = f"{sample.name}{{{labels}}} {value!r}" if labels else f"{sample.name} {value!r}"
        (created if sample.name.endswith("_created") else lines).append(line)
    if created:
        base = f"{family.name}_created"
        lines += [f"# HELP {base} {_escaped(family.documentation)}", f"# TYPE {base} gauge", *created]
    return ("\n".join(lines) + "\n").encode()


def _escaped(text: str, *, quote: bool = False) -> str:
    text = text.replace("\\", r"\\").replace("\n", r"\n")
    return text.replace('"', r"\"") if quote else text


def _join(engine: dict[str, Any], same: dict[str, Any]) -> None:
    engine["legs"] += same["legs"]
    engine["drained"] = engine["drained"] and same["drained"]


def _said(pages: Sequence[bytes | None]) -> list[dict[str, Any]]:
    return [msgspec.json.decode(page) for page in pages if page is not None]
