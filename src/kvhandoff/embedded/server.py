"""The embedded engine's HTTP server: OpenAI's endpoints in front, the router's behind.

One request, in order: read and check the body; open a leg; turn the prompt into token ids; let the engine
run; send pieces as they come. A leg is finished whatever happens, and that ends what still runs of it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import msgspec
from aiohttp import web
from aiohttp.typedefs import Middleware

from kvhandoff.core.errors import RequestError, invalid
from kvhandoff.embedded.api import Agent
from kvhandoff.embedded.generation import Generation, Piece, Run, open_leg
from kvhandoff.embedded.openai import AnyBody, ChatBody, CompletionBody, parse
from kvhandoff.embedded.params import sampling_params
from kvhandoff.embedded.prompts import PromptReader, split
from kvhandoff.embedded.responses import Answer, event
from kvhandoff.embedded.text import TextProcessor
from kvhandoff.embedded.web import EventStream, Limits, StreamFailed, broken_streams, send_json
from kvhandoff.engine.api import EngineControl
from kvhandoff.engine.internal import Internal
from kvhandoff.web import INTERNAL_ERROR, ClientGone, errors, json_response, read_body

logger = logging.getLogger(__name__)

TOKENIZER_THREADS = 2


def create_app(
    agent: Agent,
    engine_core: EngineControl,
    text: TextProcessor,
    model_name: str,
    *,
    limits: Limits | None = None,
    middlewares: Sequence[Middleware] = (),
) -> web.Application:
    """The application of one engine; `serve` listens with it.

    `model_name`: the only value of `model` that is served. `middlewares`: around its own.
    """
    limits = limits or Limits()
    executor = ThreadPoolExecutor(TOKENIZER_THREADS, thread_name_prefix="kvhandoff-tokenizer")
    prompts = PromptReader(text, engine_core.max_model_len, executor)
    front = _Front(agent, engine_core, text, model_name, prompts, limits)
    internal = Internal(agent, engine_core, body_bytes=limits.body_bytes, read_s=limits.read_s)

    app = web.Application(
        middlewares=[*middlewares, errors, broken_streams], client_max_size=limits.body_bytes
    )
    app.add_routes(
        [
            web.post("/v1/chat/completions", front.chat),
            web.post("/v1/completions", front.completions),
            web.get("/v1/models", front.models),
            web.get("/v1/models/{id:.+}", front.one_model),
            *internal.routes(),
        ]
    )

    async def close(_: web.Application) -> None:
        executor.shutdown(wait=False, cancel_futures=True)

    app.on_cleanup.append(close)
    return app


class _Front:
    """OpenAI's endpoints."""

    def __init__(
        self,
        agent: Agent,
        engine_core: EngineControl,
        text: TextProcessor,
        model_name: str,
        prompts: PromptReader,
        limits: Limits,
    ) -> None:
        self._agent = agent
        self._engine = engine_core
        self._text = text
        self._model_name = model_name
        self._prompts = prompts
        self._limits = limits
        self._started = int(time.time())

    async def models(self, _: web.Request) -> web.Response:
        return json_response({"object": "list", "data": [self._model()]})

    async def one_model(self, request: web.Request) -> web.Response:
        self._check_model(request.match_info["id"])
        return json_response(self._model())

    def _model(self) -> dict[str, Any]:
        return {
            "id": self._model_name,
            "object": "model",
            "created": self._started,
            "owned_by": "kvhandoff",
            "root": self._model_name,
            "parent": None,
            "max_model_len": self._engine.max_model_len,
        }

    async def chat(self, request: web.Request) -> web.StreamResponse:
        raw = await read_body(request, self._limits.body_bytes, self._limits.read_s)
        body = parse(raw, ChatBody, model_vocab=self._text.vocab_size)
        self._check_model(body.model)
        with ExitStack() as legs:
            run = legs.enter_context(open_leg(self._agent, body.kv_transfer_params))
            if run.leg.prompt_token_ids is not None:
                run.token_ids = self._prompts.checked(run.leg.prompt_token_ids, "kv_transfer_params")
            else:
                run.token_ids = await self._prompts.chat(body, len(raw))
            return await self._answer(request, body, [run])

    async def completions(self, request: web.Request) -> web.StreamResponse:
        raw = await read_body(request, self._limits.body_bytes, self._limits.read_s)
        body = parse(raw, CompletionBody, model_vocab=self._text.vocab_size)
        self._check_model(body.model)
        prompts = split(body)
        if len(prompts) > 1 and body.kv_transfer_params is not None:
            raise invalid("kv_transfer_params", body.kv_transfer_params, "null for several prompts")
        with ExitStack() as legs:
            runs = [legs.enter_context(open_leg(self._agent, body.kv_transfer_params)) for _ in prompts]
            for run, prompt in zip(runs, prompts, strict=True):
                run.prompt = prompt if isinstance(prompt, str) else None
                if run.leg.prompt_token_ids is not None:
                    run.token_ids = self._prompts.checked(run.leg.prompt_token_ids, "kv_transfer_params")
                else:
                    run.token_ids = await self._prompts.completion(body, prompt, len(raw))
            return await self._answer(request, body, runs)

    def _check_model(self, name: str | None) -> None:
        if name is not None and name != self._model_name:
            raise RequestError(
                f"The model `{name[:80]}` does not exist; allowed is `{self._model_name}`",
                status=404,
                param="model",
                code="model_not_found",
            )

    async def _answer(self, request: web.Request, body: AnyBody, runs: list[Run]) -> web.StreamResponse:
        """Run what is tokenized, and answer."""
        is_prefill = runs[0].leg.role == "prefill"
        if is_prefill:
            body = _one_token(body)
        for run in runs:
            run.leg.tokenized()
            run.params = sampling_params(
                body,
                prompt_tokens=len(run.token_ids),
                max_model_len=self._engine.max_model_len,
                defaults=self._text.defaults,
            )
            run.cache_salt = (body.cache_salt or "") if run.leg.cache_salt is None else run.leg.cache_salt
        generation = Generation(body, runs, self._text, silence_s=self._limits.silence_s)
        answer = Answer(body, runs, self._text, self._model_name)
        generation.start()
        if body.stream:
            return await self._stream(EventStream(request, self._limits), generation, answer)
        pieces: list[Piece] = []
        while arrived := await generation.pieces():
            pieces += arrived
        response = answer.whole(pieces)
        if is_prefill:
            response["kv_transfer_params"] = await runs[0].leg.response_params()
        return await send_json(request, response, self._limits)

    async def _stream(
        self, stream: EventStream, generation: Generation, answer: Answer
    ) -> web.StreamResponse:
        try:
            while pieces := await generation.pieces():
                await stream.write(answer.events(pieces))
            await stream.write(answer.last_events())
            await stream.end()
        except ClientGone:
            raise
        except Exception as error:
            if not stream.begun:
                raise
            known = error if isinstance(error, RequestError) else INTERNAL_ERROR
            if known is INTERNAL_ERROR:
                logger.exception("a stream failed")
            await stream.write(event(known.body()))
            await stream.end()
            raise StreamFailed(stream.response) from error
        return stream.response


def _one_token(body: AnyBody) -> AnyBody:
    """A prefill leg makes one token of one choice, all at once, whatever the body says."""
    changes: dict[str, Any] = {
        "max_tokens": 1,
        "min_tokens": min(body.min_tokens or 0, 1),
        "n": 1,
        "best_of": None,
        "stream": False,
        "stream_options": None,
    }
    if isinstance(body, ChatBody):
        return msgspec.structs.replace(body, **changes, max_completion_tokens=None)
    return msgspec.structs.replace(body, **changes)
