"""The file of tenants: who may call the router, by the hashes of their keys, and what each may do.

    tenants:
      - name: acme
        keys: ["sha256:9f86…"]        # printed by `kvhandoff router-key acme`
        salt: "4c1f…"
        models: [smollm2]             # left out: all
        max_concurrency: 32           # left out: no limit
        tokens_per_minute: 200000     # left out: no limit
      - name: operations
        role: operator
        keys: ["sha256:2c26…"]
        salt: "77ab…"
    open_pages: [ready, metrics]      # left out: both need an operator's key

YAML, of which JSON is a part. Keys are 256 random bits, so that a plain hash of one can't be guessed at; no
key stands in the file, and a copy of the file lets nobody in.
"""

from __future__ import annotations

import hmac
import re
import secrets
from collections.abc import Iterator, Mapping
from functools import lru_cache
from hashlib import blake2b, sha256
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from kvhandoff.core.errors import ConfigError, RequestError
from kvhandoff.router.body import Fields, shown_json
from kvhandoff.router.yaml_file import SECRET_CHARACTERS, read_yaml

Role = Literal["client", "operator"]
OpenPage = Literal["ready", "metrics"]

KEY_PREFIX = "kvh_"
"""Of every key, so that scanners for leaked secrets can know one."""
_HASH_PREFIX = "sha256:"
_HASH = re.compile(r"sha256:[0-9a-f]{64}")
_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
_SALT_BYTES = 16
"""Random ones of a new salt; twice as many characters."""

_Limit = Annotated[int, msgspec.Meta(ge=1, description="a whole number, 1 or more")]


class Tenant(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One tenant, as the file has it."""

    name: str
    """Stands in records and metrics; with the salt it separates the tenant's KV from all others'."""
    keys: tuple[str, ...]
    """`sha256:` and the hash in hex, of each key; several while one is being replaced. None: locked out."""
    salt: str
    """Random text that only the operator knows, 16 characters at least. Another one: none of the tenant's
    KV is used again."""
    role: Role = "client"
    """An operator may do all that a client may, and sees and moves everybody's requests."""
    models: tuple[str, ...] | None = None
    """The only ones that it may use."""
    max_concurrency: _Limit | None = None
    """Requests under way."""
    tokens_per_minute: _Limit | None = None
    """Prompt and answer together; up to a minute's worth at once."""


class TenantsFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The file."""

    tenants: tuple[Tenant, ...]
    open_pages: tuple[OpenPage, ...] = ()
    """Pages that need no key."""


class Tenants:
    """A checked file, for look-ups."""

    def __init__(self, file: TenantsFile) -> None:
        """Raises ConfigError naming the field. No message holds a key, a hash or a salt."""
        self.open_pages = frozenset(file.open_pages)
        self.by_name: Mapping[str, Tenant] = {tenant.name: tenant for tenant in file.tenants}
        self._by_hash: dict[bytes, tuple[bytes, Tenant]] = {}
        for field, tenant, digest in _checked(file.tenants):
            if digest in self._by_hash:
                _, other = self._by_hash[digest]
                raise ConfigError(f"{field}: it is a key of {other.name} already, allowed is once")
            self._by_hash[digest] = (digest, tenant)

    def __iter__(self) -> Iterator[Tenant]:
        return iter(self.by_name.values())

    def of(self, key: str) -> Tenant | None:
        """Whose key it is. Looked up by its hash, so that no time tells how much of a key is right."""
        # A header's bytes that are no UTF-8 stand in its text as lone surrogates.
        digest = sha256(key.encode(errors="surrogatepass")).digest()
        known, tenant = self._by_hash.get(digest, (b"", None))
        return tenant if hmac.compare_digest(digest, known) else None


def read_tenants(path: Path, raw: bytes) -> Tenants:
    """From what is in the file at `path`. Raises ConfigError naming it and what in it is wrong."""
    try:
        return Tenants(read_yaml(raw, TenantsFile, secret=("keys", "salt")))
    except ConfigError as error:
        raise ConfigError(f"tenants: {path}: {error}") from error


def new_key() -> str:
    """A key that nobody can guess."""
    return KEY_PREFIX + secrets.token_urlsafe(32)


def hash_of(key: str) -> str:
    """As it stands in the file."""
    return _HASH_PREFIX + sha256(key.encode()).hexdigest()


def new_salt() -> str:
    """A salt that nobody can guess."""
    return secrets.token_hex(_SALT_BYTES)


def check_name(name: str, where: str = "name") -> None:
    """Raises ConfigError; `where`: the field, for its message."""
    allowed = "allowed is 1 to 64 letters, digits, '.', '_' and '-'"
    if name.startswith((KEY_PREFIX, _HASH_PREFIX)):
        raise ConfigError(f"{where}: got a key or a hash, {allowed}, and neither of them: names are shown")
    if not _NAME.fullmatch(name):
        raise ConfigError(f"{where}: got {name[:80]!r}, {allowed}")


def salted(fields: Fields, tenant: Tenant) -> Fields:
    """The body with the cache salt of the tenant and of the client's own `cache_salt` (rule 6).

    It is a hash of both, each with its length: whatever a client sends, no other tenant's comes out, and
    what comes out tells nothing of the tenant's salt. Both legs get the body's, and it is what tickets and
    the names of conversations are made from. Raises RequestError for a `cache_salt` that is no text.
    """
    own = None
    try:
        if "cache_salt" in fields:
            own = _own_salt.decode(fields["cache_salt"])
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        why = f"cache_salt: got {shown_json(fields['cache_salt'])}, allowed is a string or null"
        raise RequestError(why, param="cache_salt") from error
    salt = _salt(tenant.name, tenant.salt, own) if own else _usual_salt(tenant.name, tenant.salt)
    return {**fields, "cache_salt": salt}


_own_salt = msgspec.json.Decoder(str | None)


def _salt(name: str, salt: str, own: str) -> msgspec.Raw:
    parts = msgspec.json.encode((name, salt, own))
    digest = blake2b(parts, digest_size=32, person=b"kvhandoff salt").hexdigest()
    return msgspec.Raw(msgspec.json.encode(digest))


@lru_cache(maxsize=1024)
def _usual_salt(name: str, salt: str) -> msgspec.Raw:
    """Of clients that send none of their own."""
    return _salt(name, salt, "")


def _checked(tenants: tuple[Tenant, ...]) -> Iterator[tuple[str, Tenant, bytes]]:
    """Each tenant with each of its keys' hashes, and the field that has it."""
    names: set[str] = set()
    for number, tenant in enumerate(tenants):
        where = f"tenants[{number}]"
        check_name(tenant.name, f"{where}.name")
        if tenant.name in names:
            raise ConfigError(f"{where}.name: got {tenant.name!r} again, allowed is once")
        names.add(tenant.name)
        if len(tenant.salt) < SECRET_CHARACTERS:
            raise ConfigError(
                f"{where}.salt: got a string of {len(tenant.salt)} characters, allowed is "
                f"{SECRET_CHARACTERS} or more"
            )
        for index, key in enumerate(tenant.keys):
            field = f"{where}.keys[{index}]"
            if key.startswith(KEY_PREFIX):
                raise ConfigError(
                    f"{field}: got a key itself, allowed is its hash: make a new key, this one has been "
                    "written down"
                )
            if not _HASH.fullmatch(key):
                raise ConfigError(
                    f"{field}: got a string of {len(key)} characters, allowed is {_HASH_PREFIX} and 64 hex "
                    "digits, as `kvhandoff router-key` prints"
                )
            yield field, tenant, bytes.fromhex(key.removeprefix(_HASH_PREFIX))
