"""Would this model be served rightly? Asked at load, before the first request.

Two questions. `check_config`: does its config promise attention of the two kinds that the pool can hold, full
and sliding? And `Probe`: do logits computed through the pool, in chunks and decode steps of two sequences
over scattered blocks, equal those of a plain transformers forward? Both are asked of every model: an
architecture that keeps other state beside K and V can run without an error and answer nonsense.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, repeat, zip_longest
from typing import Any, Protocol

import torch

from kvhandoff.core.errors import ConfigError
from kvhandoff.embedded.api import ModelRunner, SequenceStep
from kvhandoff.embedded.attention import ATTENTION_NAME, UnsupportedAttention

_LAYER_TYPES = ("full_attention", "sliding_attention")
_ROPE_TYPES_BY_LENGTH = ("dynamic", "longrope")
"""Rotations that depend on how long the sequence has become: KV computed before would be of another kind."""

_TOLERANCES = {torch.float32: 1e-4, torch.float16: 0.05, torch.bfloat16: 0.2}
"""Largest relative error of the logits, root mean square over all rows; a wrong attention gives about 1.

Rounding alone gives 1e-6 to 1e-5 in float32 and up to 0.05 in bfloat16, where single rows are off by 0.25
as soon as matrix products have another shape, in plain transformers as well."""

_MODEL_ERRORS = (RuntimeError, ValueError, TypeError, AttributeError, LookupError, AssertionError)
"""What layers raise that stumble over a config, or over what they get from another attention."""

_LENGTHS = (44, 21)


def refused(config: Any, why: str) -> ConfigError:
    """The refusal of an architecture."""
    names = getattr(config, "architectures", None) or [config.model_type]
    return ConfigError(f"model: the architecture {names[0]} can't be served: {why}")


def check_config(config: Any) -> None:
    """Raises ConfigError for a config that names state or attention which the pool can't hold."""
    text = config.get_text_config(decoder=True)
    if getattr(config, "is_encoder_decoder", False):
        raise refused(config, "it is an encoder-decoder model")
    kinds = sorted(set(getattr(text, "layer_types", None) or ()) - set(_LAYER_TYPES))
    if kinds:
        raise refused(
            config, f"it has layers of type {', '.join(kinds)}; supported: {', '.join(_LAYER_TYPES)}"
        )
    rope = sorted(set(_rope_types(getattr(text, "rope_parameters", None))) & set(_ROPE_TYPES_BY_LENGTH))
    if rope:
        raise refused(config, f"its rotary embedding ({', '.join(rope)}) depends on the sequence's length")
    missing = [
        name
        for name in ("vocab_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings")
        if not isinstance(getattr(text, name, None), int)
    ]
    if missing:
        raise refused(config, f"its config doesn't say {', '.join(missing)}")


def _rope_types(parameters: Any) -> list[str]:
    """The types in `rope_parameters`, which may be nested by layer type."""
    if not isinstance(parameters, dict):
        return []
    nested = [kind for value in parameters.values() for kind in _rope_types(value)]
    return [*nested, *([parameters["rope_type"]] if parameters.get("rope_type") else [])]


class CheckedRunner(ModelRunner, Protocol):
    """A runner that says which windows its layers asked for."""

    windows: dict[int, int | None]


def blocks_needed(block_size: int) -> int:
    """Blocks that `Probe.check` needs."""
    return sum(-(-length // block_size) for length in _LENGTHS)


@dataclass(frozen=True)
class Probe:
    """Two short sequences of random tokens, and what a plain forward makes of them."""

    config: Any
    dtype: torch.dtype
    sequences: Sequence[Sequence[int]]
    logits: Sequence[torch.Tensor]
    """Per sequence `[tokens, vocab_size]`, float32."""

    @classmethod
    def of(cls, model: Any) -> Probe:
        """Run the plain forward. The model must still have an attention of transformers' own."""
        text = model.config.get_text_config(decoder=True)
        rng = random.Random(0)
        longest = text.max_position_embeddings
        sequences = [[rng.randrange(text.vocab_size) for _ in range(min(n, longest))] for n in _LENGTHS]
        inputs = [torch.tensor([tokens], device=model.device) for tokens in sequences]
        try:
            with torch.inference_mode():
                logits = [model(input_ids=ids, use_cache=False).logits[0].float() for ids in inputs]
        except _MODEL_ERRORS as cause:
            raise refused(model.config, f"a plain forward fails: {cause!r}") from cause
        return cls(model.config, model.dtype, sequences, logits)

    def check(self, runner: CheckedRunner) -> None:
        """Compute the same on a runner with scratch blocks. Raises ConfigError naming what differs."""
        if self.config._attn_implementation != ATTENTION_NAME:
            raise refused(self.config, "its attention can't be replaced")
        try:
            error = self._relative_error(runner)
        except UnsupportedAttention as cause:
            raise refused(self.config, str(cause)) from cause
        except _MODEL_ERRORS as cause:
            raise refused(self.config, f"it fails on paged attention: {cause!r}") from cause
        self._check_windows(runner)
        tolerance = _TOLERANCES[self.dtype]
        if not error <= tolerance:  # not-a-number too
            raise refused(
                self.config,
                f"its logits through the KV pool are off by {error:.2g} (relative, allowed {tolerance:g}) "
                "from those of a plain forward",
            )

    def _relative_error(self, runner: CheckedRunner) -> float:
        """Of all logits: norm of the differences over norm of the values' spread within their rows."""
        difference = spread = 0.0
        for batch in self._schedule(runner.layout.block_size):
            for (sequence, step), got in zip(batch, runner.forward([step for _, step in batch]), strict=True):
                rows = self.logits[sequence][step.start : step.start + len(step.token_ids)]
                difference += (got - rows).square().sum().item()
                spread += (rows - rows.mean(dim=1, keepdim=True)).square().sum().item()
        return math.sqrt(difference / spread)

    def _schedule(self, block_size: int) -> Iterator[list[tuple[int, SequenceStep]]]:
        """Batches of (sequence, step) as an engine would run them: a chunk alone, a chunk beside another
        sequence's, decode steps of both together."""
        blocks = list(range(blocks_needed(block_size)))
        random.Random(1).shuffle(blocks)
        cut = -(-_LENGTHS[0] // block_size)
        long = self._steps(0, (18, 20, 3), blocks[:cut])
        short = self._steps(1, (18,), blocks[cut:])
        yield [(0, next(long))]
        for pair in zip_longest(long, short):
            yield [(sequence, step) for sequence, step in enumerate(pair) if step is not None]

    def _steps(self, sequence: int, chunks: Sequence[int], table: Sequence[int]) -> Iterator[SequenceStep]:
        """A sequence's steps: these chunks, then one by one the tokens that are left."""
        tokens, start = self.sequences[sequence], 0
        for size in chain(chunks, repeat(1)):
            if start >= len(tokens):
                return
            yield SequenceStep(tokens[start : start + size], start, table, "all")
            start += size

    def _check_windows(self, runner: CheckedRunner) -> None:
        """The probe is shorter than most windows: see that each layer asked for the one its config names."""
        text = self.config.get_text_config(decoder=True)
        own = getattr(text, "sliding_window", None)
        kinds = getattr(text, "layer_types", None) or ["sliding_attention"] * text.num_hidden_layers
        expected = {
            layer: own if kind == "sliding_attention" else None
            for layer, kind in enumerate(kinds[: text.num_hidden_layers])
        }
        if runner.windows != expected:
            raise refused(
                self.config,
                f"its layers ask for windows {runner.windows}, its config says {expected}",
            )
