"""Exact mode: logits that are equal bit for bit, however the work was cut up.

A token's logits must not depend on what else ran in the same step, on where a prompt was cut into chunks, on
whether its KV was computed as prefill or decode, or on which blocks hold it. Copying KV never changes a bit;
the shapes of matrix products do, since kernels sum in another order for another shape. So exact mode

- makes MKL keep one order (`MKL_CBWR`, read when torch loads: call `prepare_environment` before);
- gives every forward a multiple of ROW_MULTIPLE tokens: kernels treat 1 to 3 rows differently from more;
- attends one sequence at a time, with queries padded alike and keys to a multiple of KV_MULTIPLE, the
  block in which the CPU kernel of scaled_dot_product_attention walks over keys;
- computes in float32 unless told otherwise.

Whether that is enough depends on the machine and the model, so `prove` tries it at load. It costs speed: it
is for tests and for finding out where outputs part.

No torch in this file: it is imported before torch may be loaded.
"""

from __future__ import annotations

import itertools
import os
import platform
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from kvhandoff.core.errors import ConfigError
from kvhandoff.embedded.api import ModelRunner, SequenceStep
from kvhandoff.transport.api import HostRegion

ROW_MULTIPLE = 8
KV_MULTIPLE = 512
DEFAULT_DTYPE = "float32"


def pad_rows(rows: int) -> int:
    """The number of rows a matrix product over `rows` tokens is given."""
    return -(-rows // ROW_MULTIPLE) * ROW_MULTIPLE


def pad_kv(tokens: int) -> int:
    """The number of keys an attention over `tokens` keys is given."""
    return -(-tokens // KV_MULTIPLE) * KV_MULTIPLE


def prepare_environment(exact: bool) -> None:
    """Set what torch reads when it loads. Call it in an engine's process before anything imports torch.

    Raises ConfigError when exact mode is wanted and torch was loaded without it.
    """
    wanted = _mkl_mode()
    if not exact or wanted is None or os.environ.get("MKL_CBWR") == wanted:
        return
    if "torch" in sys.modules:
        raise ConfigError(
            f"exact mode: torch is loaded already and MKL_CBWR is {os.environ.get('MKL_CBWR')!r}; "
            f"start the process with MKL_CBWR={wanted}, or choose exact mode before torch is loaded"
        )
    os.environ["MKL_CBWR"] = wanted


def _mkl_mode() -> str | None:
    """The strictest reproducible mode of MKL on this processor; None where torch has no MKL."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return None
    cpuinfo = Path("/proc/cpuinfo")
    flags = cpuinfo.read_text().split() if cpuinfo.exists() else []
    for flag, mode in (("avx512f", "AVX512,STRICT"), ("avx2", "AVX2,STRICT")):
        if flag in flags:
            return mode
    return "COMPATIBLE"


class ExactRunner(ModelRunner, Protocol):
    """A runner whose blocks can be looked at."""

    region: HostRegion


PROOF_TOKENS = 552
"""More than KV_MULTIPLE, so that a second run of keys takes part."""
_CHUNKS = (3, 130, 1, 7)
"""The first tokens, cut into chunks."""
_LAST_CHUNKS = (2, 48, 1, 1, 1)
"""The last tokens, computed on copied blocks: chunks, then decode steps."""
_BESIDE = 9
"""Tokens of another sequence that run in the same steps."""


def blocks_needed(block_size: int) -> int:
    """Blocks that `prove` needs."""
    return 4 * -(-PROOF_TOKENS // block_size)


def prove(runner: ExactRunner) -> None:
    """Compute one random prompt in several ways on a scratch runner, and compare bit for bit.

    Raises ConfigError that says which comparison failed. Takes about as long as a prefill of 800 tokens.
    """
    rng = random.Random(0)
    block_size = runner.layout.block_size
    tokens, others = _random_tokens(rng, runner), _random_tokens(rng, runner)
    whole, pieces, copied, beside = _tables(rng, block_size, len(tokens))
    neighbour = _neighbour(others, beside)

    [expected] = runner.forward([SequenceStep(tokens, 0, whole, "all")])

    def compare(table: list[int], first: int, sizes: tuple[int, ...], what: str) -> int:
        """Run chunks of these sizes beside another sequence; returns where they end."""
        for size in sizes:
            step = SequenceStep(tokens[first : first + size], first, table, "all")
            got, _ = runner.forward([step, next(neighbour)])
            if not got.equal(expected[first : first + size]):
                raise _not_exact(
                    f"the logits of {size} tokens after {first}, {what}, and of one forward alone"
                )
            first += size
        return first

    end = compare(pieces, 0, _CHUNKS, "computed in chunks in a batch")
    for mine, theirs in zip(whole[: end // block_size], pieces, strict=False):
        if _block(runner, mine) != _block(runner, theirs):
            raise _not_exact("keys and values of chunks in a batch, and of one forward alone")
    for mine, theirs in zip(whole, copied, strict=True):
        _block(runner, theirs)[:] = _block(runner, mine)
    compare(copied, len(tokens) - sum(_LAST_CHUNKS), _LAST_CHUNKS, "computed on copied blocks")


def _random_tokens(rng: random.Random, runner: ExactRunner) -> list[int]:
    return [rng.randrange(runner.vocab_size) for _ in range(min(PROOF_TOKENS, runner.max_context))]


def _tables(rng: random.Random, block_size: int, tokens: int) -> list[list[int]]:
    """Four disjoint block tables in random order."""
    blocks = list(range(blocks_needed(block_size)))
    rng.shuffle(blocks)
    each = -(-tokens // block_size)
    return [blocks[i * each : (i + 1) * each] for i in range(4)]


def _neighbour(tokens: list[int], table: list[int]) -> Iterator[SequenceStep]:
    """Steps of a sequence that runs beside the one looked at, again from its start when it ends."""
    for start in itertools.cycle(range(0, len(tokens) - _BESIDE, _BESIDE)):
        yield SequenceStep(tokens[start : start + _BESIDE], start, table, None)


def _block(runner: ExactRunner, block: int) -> memoryview:
    size = runner.layout.block_bytes
    return runner.region.buffer[block * size : (block + 1) * size]


def _not_exact(what: str) -> ConfigError:
    return ConfigError(
        f"exact mode does not hold for this model on this machine: {what}, differ "
        f"(processor {platform.machine()}, MKL_CBWR={os.environ.get('MKL_CBWR')!r})"
    )
