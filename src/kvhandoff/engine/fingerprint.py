"""A model's fingerprint: its part of every token chain."""

from __future__ import annotations

import json
import os
import tempfile
from concurrent.futures import ThreadPoolExecutor
from hashlib import blake2b
from pathlib import Path


def model_fingerprint(model_dir: Path, *variant: str) -> str:
    """Short hash of all that decides KV values for given tokens: config, weights, and `variant`: what the
    engine was told beyond them (dtype, exact mode, …).

    Weights count with every byte of their content, so the fingerprint is equal on every machine that holds
    the same files, and another fine-tune has another. Hashes of large files are remembered in the user's
    cache, by path, size and times. The tokenizer is no part: KV stands for token ids.
    """
    config = json.loads((model_dir / "config.json").read_text())
    for neutral in ("_name_or_path", "transformers_version", "use_cache"):
        config.pop(neutral, None)
    h = blake2b(digest_size=16, person=b"kvh-model")
    for part in (
        json.dumps(config, sort_keys=True),
        *variant,
        *(f"{path.name} {_file_hash(path)}" for path in sorted(model_dir.glob("*.safetensors"))),
    ):
        raw = part.encode()
        h.update(len(raw).to_bytes(8, "little"))
        h.update(raw)
    return h.hexdigest()


def user_cache() -> Path:
    """`$XDG_CACHE_HOME/kvhandoff`, or `~/.cache/kvhandoff`."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG specification wants relative paths to be ignored.
    return (Path(base) if base.startswith("/") else Path.home() / ".cache") / "kvhandoff"


_REMEMBERED_BYTES = 64 << 20
"""Files from here on have their hash remembered: hashing goes at about 1 GB/s and thread."""
_PART_BYTES = 64 << 20


def _file_hash(path: Path) -> str:
    """Hash over all of a file's content, in parts that are hashed side by side."""
    stat = path.stat()
    if stat.st_size < _REMEMBERED_BYTES:
        return _content_hash(path, stat.st_size)
    identity = f"{path.resolve()}\0{stat.st_size}\0{stat.st_mtime_ns}\0{stat.st_ctime_ns}\0{stat.st_ino}"
    note = user_cache() / "hashes" / blake2b(identity.encode(), digest_size=16).hexdigest()
    try:
        return note.read_text()
    except FileNotFoundError:
        digest = _content_hash(path, stat.st_size)
        note.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=note.parent, delete=False) as draft:
            draft.write(digest)
        os.replace(draft.name, note)
        return digest


def _content_hash(path: Path, size: int) -> str:
    def part(start: int) -> bytes:
        with path.open("rb") as file:
            file.seek(start)
            return blake2b(file.read(_PART_BYTES), digest_size=32).digest()

    with ThreadPoolExecutor(max_workers=min(4, os.cpu_count() or 1)) as threads:
        digests = threads.map(part, range(0, max(size, 1), _PART_BYTES))
        return blake2b(b"".join(digests), digest_size=16).hexdigest()
