"""From logits to a token: one request at a time, so that nobody's neighbours change its tokens.

Names and meanings are vLLM's: log-probabilities are those of the model's own logits, before temperature and
masks; then EOS and stop tokens are masked while fewer than `min_tokens` are out, the temperature is applied,
`top_k`, and `top_p` of what is left. Greedy takes the highest logit, the lowest id among equals.

A seeded request has its own generator and takes one number from it for each token: the same seed gives the
same tokens whatever else the engine does, also after a preemption.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

import torch
from torch import Tensor

from kvhandoff.core.errors import RequestError
from kvhandoff.embedded.api import SamplingParams, TokenLogprob

GREEDY_BELOW = 1e-5
"""Temperatures below this are greedy, as in vLLM."""
_FIRST_CANDIDATES = 256
"""How many of the best tokens `top_p` looks at before it sorts them all, which takes 30 times as long."""
_PROMPT_ROWS = 64
"""How many prompt positions are turned into log-probabilities at a time: bounds the memory."""


@dataclass(frozen=True, slots=True)
class Sampled:
    """One token, and what was asked about it."""

    token_id: int
    logprob: TokenLogprob | None


class RequestSampler:
    """Samples one request's tokens. `params` have passed `limits.check_params`."""

    def __init__(self, params: SamplingParams, eos_token_ids: frozenset[int], prompt: Sequence[int]) -> None:
        self._params = params
        self._model_eos = eos_token_ids
        self._eos = frozenset() if params.ignore_eos else eos_token_ids
        self._stops = frozenset(params.stop_token_ids)
        # Also with ignore_eos: a minimum length is not made of end tokens.
        self._masked_ids = eos_token_ids | self._stops
        self._masked = torch.tensor(sorted(self._masked_ids), dtype=torch.long)
        self._greedy = params.temperature < GREEDY_BELOW or params.top_k == 1
        # Any 64-bit seed, negative ones too, is a stream of its own.
        seed = secrets.randbits(64) if params.seed is None else params.seed % 2**64
        self._random = Random(seed)
        self._prompt = prompt
        self.prompt_logprobs: list[TokenLogprob | None] = [None] * len(prompt)
        """Filled by `observe_prompt`; the first token has none."""

    def sample(self, logits: Tensor, generated: int) -> Sampled:
        """The next token from its float32 `logits` [vocab_size], `generated` tokens being out.

        Raises RequestError (500) when the logits leave no choice: not a number, or everything masked.
        """
        scores = logits
        if generated < self._params.min_tokens and len(self._masked):
            scores = logits.index_fill(0, self._masked.to(logits.device), -math.inf)
        best, token = scores.max(dim=-1)  # NaN wins here, so that it can't go unnoticed
        if not math.isfinite(best):
            raise RequestError(
                f"the model's best logit is {float(best)}; no token can be chosen",
                status=500,
                code="bad_logits",
                kind="internal_error",
            )
        token_id = int(token) if self._greedy else self._draw(scores / self._params.temperature)
        logprob = None
        if self._params.logprobs is not None:
            [logprob] = token_logprobs(logits.unsqueeze(0), [token_id], self._params.logprobs)
        return Sampled(token_id, logprob)

    def adopt(self, token_id: int) -> bool:
        """Take the token that the prefill engine sampled after this prompt as this request's first, if
        `sample` is sure to give the same for the same logits. Returns whether it is taken; the number that
        `sample` would have drawn is drawn then, so that all later tokens are the same either way (field
        case 40).

        The prefill engine samples with this request's temperature, top_k, top_p and seed; what it is not sent
        are the stop tokens, and of `min_tokens` more than 1 (`router/legs.py`). So the two can only differ in
        what is masked: nothing on either side when `min_tokens` is 0, else EOS on both and the stop tokens on
        this side alone. A token that is the best of all is the best of those left by a mask, too, if the mask
        leaves it; but what is drawn from all says nothing of what is drawn from fewer.

        Not taken either: a token drawn without a seed, one that ends the request, or one whose
        log-probability is asked for.
        """
        params = self._params
        unseeded = params.seed is None and not self._greedy
        if unseeded or params.logprobs is not None:
            return False
        if params.min_tokens > 0:
            if token_id in self._masked_ids or not (self._greedy or self._masked_ids == self._model_eos):
                return False
        elif self.stops_at(token_id, 1):
            return False
        if not self._greedy:
            self._random.random()  # the one number that `_draw` takes
        return True

    def stops_at(self, token_id: int, generated: int) -> bool:
        """Whether `token_id`, the last of `generated` tokens, is an EOS or stop token that ends it."""
        return generated >= self._params.min_tokens and (token_id in self._eos or token_id in self._stops)

    def observe_prompt(self, start: int, logits: Tensor) -> None:
        """Take the log-probabilities of prompt tokens from the `logits` [rows, vocab_size] of the positions
        from `start` on; each position's logits speak of the token after it."""
        if self._params.prompt_logprobs is None:
            return
        targets = self._prompt[start + 1 : start + 1 + len(logits)]
        for row in range(0, len(targets), _PROMPT_ROWS):
            part = targets[row : row + _PROMPT_ROWS]
            found = token_logprobs(logits[row : row + len(part)], part, self._params.prompt_logprobs)
            self.prompt_logprobs[start + 1 + row : start + 1 + row + len(part)] = found

    def _draw(self, scores: Tensor) -> int:
        """One token from the softmax of `scores`, cut by top_k and top_p."""
        scores = scores.double()
        ids: Tensor | None = None
        if 0 < self._params.top_k < len(scores):
            scores, ids = scores.topk(self._params.top_k)
        weights = (scores - scores.max()).exp()
        if self._params.top_p < 1:
            weights, order = _nucleus(weights, self._params.top_p)
            ids = order if ids is None else ids[order]
        sums = weights.cumsum(dim=-1)
        total = float(sums[-1])
        # Below the total even when the product is rounded up: the first sum above it exists, and its token
        # has a weight.
        point = min(self._random.random() * total, math.nextafter(total, 0.0))
        index = int(torch.searchsorted(sums, point, right=True))
        return index if ids is None else int(ids[index])


def token_logprobs(logits: Tensor, token_ids: Sequence[int], top: int) -> list[TokenLogprob]:
    """Log-probability, rank (1 is the best) and the `top` best alternatives of one token per row of `logits`
    [rows, vocab_size]."""
    logprobs = logits.float().log_softmax(dim=-1)
    chosen = logprobs.gather(1, torch.tensor(token_ids, device=logprobs.device).unsqueeze(1))
    ranks = (logprobs >= chosen).sum(dim=-1).tolist()
    values, ids = logprobs.topk(top, dim=-1)
    tops = [tuple(zip(*row, strict=True)) for row in zip(ids.tolist(), values.tolist(), strict=True)]
    return [
        TokenLogprob(token_id, value, rank, best)
        for token_id, value, rank, best in zip(token_ids, chosen[:, 0].tolist(), ranks, tops, strict=True)
    ]


def _nucleus(weights: Tensor, top_p: float) -> tuple[Tensor, Tensor]:
    """The best tokens (weights, indices; best first) such that those before each weigh less than `top_p`."""
    limit = top_p * float(weights.sum())
    for count in (_FIRST_CANDIDATES, len(weights)):
        best, order = weights.topk(min(count, len(weights)))
        before = best.cumsum(dim=-1) - best
        keep = int((before < limit).sum())
        if keep < len(best):
            break
    return best[:keep], order[:keep]
