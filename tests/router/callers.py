"""Callers of a router with a file of tenants."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from kvhandoff.router.security import Security
from kvhandoff.router.tenants import hash_of, new_key, new_salt

KEYS = {name: new_key() for name in ("acme", "beta", "ops")}
SALTS = {name: new_salt() for name in KEYS}
PAGES = ("ready", "metrics")


def security(
    path: Path, acme: dict[str, Any] | None = None, open_pages: tuple[str, ...] = PAGES, **config: Any
) -> Security:
    """Two tenants and an operator; `acme`: more fields of the first."""
    entries: dict[str, dict[str, Any]] = {
        name: {"name": name, "keys": [hash_of(KEYS[name])], "salt": SALTS[name]} for name in KEYS
    }
    entries["acme"].update(acme or {})
    entries["ops"]["role"] = "operator"
    file = path / "tenants"
    file.write_bytes(msgspec.json.encode({"tenants": list(entries.values()), "open_pages": open_pages}))
    return Security(tenants=file, **config)


def bearer(name: str) -> dict[str, str]:
    """The headers of a tenant."""
    return {"Authorization": f"Bearer {KEYS[name]}"}
