"""The file of tenants: what is read, what is refused, and the salts that come of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvhandoff.core.errors import ConfigError, RequestError
from kvhandoff.router.body import parse_body, read_text
from kvhandoff.router.tenants import Tenant, Tenants, hash_of, new_key, new_salt, read_tenants, salted
from kvhandoff.router.watched import Watched

KEY, OTHER = new_key(), new_key()
SALT = "0123456789abcdef"


def entry(name: str = "acme", key: str = KEY, **fields: Any) -> dict[str, Any]:
    return {"name": name, "keys": [hash_of(key)], "salt": SALT} | fields


def written(path: Path, *entries: dict[str, Any], **fields: Any) -> Path:
    """The file, as JSON."""
    file = path / "tenants.json"
    file.write_bytes(msgspec.json.encode({"tenants": entries} | fields))
    return file


def opened(file: Path) -> Watched[Tenants]:
    return Watched("tenants", [file], lambda contents: read_tenants(file, *contents))


def read(file: Path) -> Tenants:
    return opened(file).value


YAML = f"""
tenants:
  - name: acme
    keys: [{hash_of(KEY)}, "{hash_of(OTHER)}"]
    salt: {SALT}
    models: [tiny, org/small]
    max_concurrency: 3
    tokens_per_minute: 1000
  - name: ops
    role: operator
    keys: []
    salt: "{SALT}"
open_pages: [ready]
"""


def test_yaml(tmp_path: Path) -> None:
    file = tmp_path / "tenants.yaml"
    file.write_text(YAML)
    tenants = read(file)
    acme = tenants.of(KEY)
    assert acme is not None
    assert acme is tenants.of(OTHER)
    assert (acme.name, acme.role, acme.models) == ("acme", "client", ("tiny", "org/small"))
    assert (acme.max_concurrency, acme.tokens_per_minute) == (3, 1000)
    assert [(tenant.name, tenant.role) for tenant in tenants] == [("acme", "client"), ("ops", "operator")]
    assert tenants.open_pages == {"ready"}


def test_json(tmp_path: Path) -> None:
    tenants = read(written(tmp_path, entry(), entry("b", OTHER)))
    assert [tenant.name for tenant in (tenants.of(KEY), tenants.of(OTHER)) if tenant] == ["acme", "b"]
    acme = tenants.of(KEY)
    assert acme is not None
    assert (acme.models, acme.max_concurrency, acme.tokens_per_minute) == (None, None, None)


def test_only_a_key_opens(tmp_path: Path) -> None:
    tenants = read(written(tmp_path, entry()))
    for wrong in ("", "acme", OTHER, KEY[:-1], KEY + "x", KEY.upper(), hash_of(KEY), "\udcff"):
        assert tenants.of(wrong) is None


def test_keys_and_salts_are_long_and_never_the_same() -> None:
    assert len({new_key() for _ in range(100)} | {new_salt() for _ in range(100)}) == 200
    assert len(KEY) == len("kvh_") + 43  # 256 bits
    assert len(new_salt()) == 32


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"name": "a b"}, "tenants[0].name: got 'a b', allowed is 1 to 64 letters"),
        ({"name": ""}, "tenants[0].name: got ''"),
        ({"name": KEY}, "tenants[0].name: got a key or a hash, allowed is 1 to 64 letters"),
        ({"name": hash_of(KEY)}, "tenants[0].name: got a key or a hash, allowed is 1 to 64 letters"),
        ({"keys": [KEY]}, "tenants[0].keys[0]: got a key itself, allowed is its hash"),
        ({"keys": ["sha256:12"]}, "tenants[0].keys[0]: got a string of 9 characters, allowed is sha256: and"),
        ({"keys": "x"}, "tenants[0].keys: got a string of 1 characters, allowed is an array"),
        ({"keys": [5]}, "tenants[0].keys[0]: got a value of type int, allowed is a string"),
        ({"keys": {KEY: SALT}}, "tenants[0].keys: got an object, allowed is an array"),
        ({"salt": "short"}, "tenants[0].salt: got a string of 5 characters, allowed is 16 or more"),
        ({"salt": 123456}, "tenants[0].salt: got a value of type int, allowed is a string"),
        ({"role": "king"}, "tenants[0].role: got 'king', allowed is client or operator"),
        ({"role": SALT}, f"tenants[0].role: got a string of {len(SALT)} characters, allowed is client or"),
        ({"models": KEY}, "tenants[0].models: got a string of 47 characters, allowed is an array or null"),
        ({"max_concurrency": 0}, "tenants[0].max_concurrency: got 0, allowed is a whole number, 1 or more"),
        ({"tokens_per_minute": 1.5}, "tokens_per_minute: got 1.5, allowed is a whole number, 1 or more"),
        (
            {"token_per_minute": 5},
            "tenants[0]: got the unknown field 'token_per_minute', allowed are name, keys",
        ),
        ({SALT: 5}, f"tenants[0]: got the unknown field a string of {len(SALT)} characters, allowed are"),
    ],
)
def test_bad_entries(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    file = written(tmp_path, entry(**change))
    with pytest.raises(ConfigError) as refused:
        read(file)
    assert said in str(refused.value)
    assert str(file) in str(refused.value)
    assert KEY not in str(refused.value)
    assert hash_of(KEY) not in str(refused.value)
    assert SALT not in str(refused.value)


def test_bad_files(tmp_path: Path) -> None:
    def refusal(content: str | None) -> str:
        file = tmp_path / "file"
        if content is not None:
            file.write_text(content)
        with pytest.raises(ConfigError) as refused:
            read(file)
        return str(refused.value)

    assert "can't be read (No such file or directory)" in refusal(None)
    assert "the file: got null, allowed is an object" in refusal("")
    assert "tenants: missing, it is required" in refusal("{}")
    assert "tenants[0].salt: missing, it is required" in refusal("tenants: [{name: a, keys: []}]")
    no_array = refusal(f"tenants: {{name: a, salt: {SALT}, keys: []}}")
    assert "tenants: got an object, allowed is an array" in no_array
    assert SALT not in no_array
    one = f"{{name: a, salt: {SALT}, keys: []}}"
    assert "tenants: got it at lines 1 and 2, allowed is once" in refusal(f"tenants: [{one}]\ntenants: []")
    twice = refusal(f"tenants:\n - name: a\n   salt: {SALT}\n   name: b\n   keys: []\n")
    assert "tenants[0].name: got it at lines 2 and 4, allowed is once" in twice
    misplaced = refusal(f"{SALT}: 1\n{SALT}: 2")
    assert f"a name of {len(SALT)} characters: got it at lines 1 and 2, allowed is once" in misplaced
    assert SALT not in misplaced
    broken = refusal(f"tenants:\n - name: a\n   salt: {SALT}: {SALT}\n")
    assert "neither YAML nor JSON at line 3" in broken
    assert SALT not in broken
    twice = msgspec.json.encode({"tenants": [entry(), entry(key=OTHER)]}).decode()
    assert "tenants[1].name: got 'acme' again, allowed is once" in refusal(twice)
    shared = msgspec.json.encode({"tenants": [entry(), entry("b")]}).decode()
    assert "tenants[1].keys[0]: it is a key of acme already, allowed is once" in refusal(shared)
    again = msgspec.json.encode({"tenants": [entry(keys=[hash_of(KEY), hash_of(KEY)])]}).decode()
    assert "tenants[0].keys[1]: it is a key of acme already, allowed is once" in refusal(again)


async def test_the_last_good_file_stays_in_force(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = written(tmp_path, entry())
    watched = opened(file)
    first = watched.value
    await watched.look()
    assert watched.value is first
    written(tmp_path, entry(role="king"))
    await watched.look()
    await watched.look()  # says it once
    assert watched.value is first
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    assert "'king'" in caplog.text
    assert "what was read before stays in force" in caplog.text
    written(tmp_path, entry())
    assert await watched.look()
    assert watched.problem is None
    first = watched.value
    file.unlink()
    assert not await watched.look()
    assert watched.value is first
    assert watched.problem is not None
    written(tmp_path, entry())  # the same as before
    assert await watched.look()
    assert watched.problem is None
    written(tmp_path, entry(key=OTHER))
    await watched.look()
    assert watched.value.of(KEY) is None
    assert watched.value.of(OTHER) is not None


def test_a_bad_file_at_the_start(tmp_path: Path) -> None:
    file = written(tmp_path, entry(role="king"))
    with pytest.raises(ConfigError):
        opened(file)


def salt_of(body: dict[str, Any], name: str = "acme", salt: str = SALT) -> str:
    fields = salted(parse_body(msgspec.json.encode(body)), Tenant(name=name, keys=(), salt=salt))
    return read_text(fields, "cache_salt")


def test_salts_never_mix() -> None:
    """Field cases 61 and 62: whatever a client sends, its tenant's salt is its own."""
    theirs = salt_of({})
    bodies: list[dict[str, Any]] = [{}, *({"cache_salt": text} for text in ("a", "b", theirs, SALT, "acme"))]
    names = ("acme", "acm", "acme2", "other")
    salts = {salt_of(body, name) for body in bodies for name in names}
    assert len(salts) == len(bodies) * len(names)
    assert salt_of({}, salt=SALT + "x") not in salts  # another salt of the tenant's: nothing is used again
    # Nothing runs into the next part.
    assert salt_of({"cache_salt": "bc"}, "a") != salt_of({"cache_salt": "c"}, "ab")
    assert salt_of({"cache_salt": ""}, "a", SALT + "x") != salt_of({"cache_salt": "x"}, "a", SALT)


def test_one_salt_is_always_the_same() -> None:
    assert salt_of({"cache_salt": "a"}) == salt_of({"cache_salt": "a", "model": "m"})
    assert salt_of({}) == salt_of({"cache_salt": None}) == salt_of({"cache_salt": ""})
    assert len(salt_of({})) == 64  # as vLLM takes it: 128 characters, none of @ / \
    assert set(salt_of({"cache_salt": "a@/\\"})) <= set("0123456789abcdef")


@pytest.mark.parametrize("raw", [b"5", b"[]", b"true"])
def test_a_salt_that_is_no_text(raw: bytes) -> None:
    with pytest.raises(RequestError) as refused:
        salted(parse_body(b'{"cache_salt":' + raw + b"}"), Tenant(name="a", keys=(), salt=SALT))
    assert (refused.value.status, refused.value.param) == (400, "cache_salt")
    assert refused.value.message == f"cache_salt: got {raw.decode()}, allowed is a string or null"


def test_the_last_of_two_salts_counts() -> None:
    """As for an engine that reads the body; only one is passed on."""
    fields = salted(parse_body(b'{"cache_salt":"a","cache_salt":"b"}'), Tenant(name="a", keys=(), salt=SALT))
    assert read_text(fields, "cache_salt") == salt_of({"cache_salt": "b"}, "a")
