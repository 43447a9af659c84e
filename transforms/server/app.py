"""`Server`: the routes of `weft serve`, as a Starlette application."""

import asyncio
import contextlib
import hmac
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import attrs
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from weft import __version__
from weft.extras import install_command
from weft.stages.checkpoints.chat import ChatTemplate
from weft.stages.checkpoints.tokenizer import LONG_TEXT, token_ids
from weft.transforms.server.answers import Part, Writer
from weft.transforms.server.bodies import (
    ServerLimits,
    UnfinishedBodies,
    check_limits,
    check_stream_options,
    read_body,
    while_connected,
)
from weft.transforms.server.browsers import refuse_browsers
from weft.transforms.server.commands import Add
from weft.transforms.server.forms import Asked, ChatForm, Form, TextForm
from weft.transforms.server.grammars.compiling import GrammarUse
from weft.transforms.server.grammars.masks import CompileGrammar
from weft.transforms.server.host import STILL_SECONDS, ClosedError, Host
from weft.transforms.server.metrics import Metrics
from weft.transforms.server.protocol import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    Sampled,
    TokenizeRequest,
    texts_of,
)
from weft.transforms.server.refusals import Refusal, event, json_response, refusal_of
from weft.transforms.server.streams import Output
from weft.transforms.server.templates import ChatRenderer
from weft.transforms.server.vocabulary import Vocabulary

_RETRY_SECONDS = 1
_TOO_LONG = {"param": "max_tokens", "code": "context_length_exceeded"}
# The most requests that may wait for a grammar to be compiled.
_MOST_COMPILING = 64


class Server:
    """The HTTP routes, and the state that they share.

    Args:
        host: runs the engine.
        name: the model's name to clients.
        adapters: names of the engine's adapters; clients see each as a model.
        chat_template: replaces the model's own.
        api_key: the key that clients must send; None: no key is needed.
        limits: the limits of a request.
        compile_grammar: compiles a `response_format`.
        is_local: whether the server listens on this machine alone.
    """

    def __init__(
        self,
        host: Host,
        name: str,
        *,
        adapters: Sequence[str] = (),
        chat_template: ChatTemplate | None = None,
        api_key: str | None = None,
        limits: ServerLimits | None = None,
        compile_grammar: CompileGrammar,
        is_local: bool = False,
    ) -> None:
        self.host = host
        self.name = name
        self.adapters = tuple(adapters)
        self.limits = limits or ServerLimits()
        self._key = api_key
        self.max_model_len = host.max_model_len
        model = host.model
        self.model = (
            model if chat_template is None else attrs.evolve(model, chat_template=chat_template)
        )
        size = model.config.vocab_size
        self.vocabulary = None if model.tokenizer is None else Vocabulary(model.tokenizer, size)
        self.metrics = Metrics(name)
        # At least two bodies of the largest size must fit, or one could not be read beside another.
        self._bodies = UnfinishedBodies(max(self.limits.max_unfinished, 2 * self.limits.max_body))
        template = self.model.chat_template
        self._renderer = None if template is None else ChatRenderer(template)
        self._compile_grammar = compile_grammar
        self._is_local = is_local
        self._compilers = ThreadPoolExecutor(8, "weft grammars")
        self._num_compiling = 0

    # Routes

    async def health(self, _: Request) -> Response:
        """Answer 200 while the engine accepts requests and makes progress."""
        self.host.check_open()
        if not await self.host.is_moving(STILL_SECONDS):
            self.host.check_open()  # it may have ended meanwhile
            message = f"the engine stands still: it has not answered for {STILL_SECONDS:g} s"
            raise Refusal(503, message, "server_error", code="engine_stands_still")
        return json_response({"status": "ok"})

    async def models(self, _: Request) -> Response:
        """The model and its adapters."""
        return json_response({"object": "list", "data": self._models()})

    async def one_model(self, request: Request) -> Response:
        """The model or an adapter, by its name."""
        name = request.path_params["name"]
        self._adapter(name)
        return json_response(next(model for model in self._models() if model["id"] == name))

    def _models(self) -> list[dict[str, Any]]:
        names_and_parents = [(self.name, None), *((name, self.name) for name in self.adapters)]
        return [
            {
                "id": name,
                "object": "model",
                "created": 0,
                "owned_by": "weft",
                "root": self.name,
                "parent": parent,
            }
            | {"max_model_len": self.max_model_len}
            for name, parent in names_and_parents
        ]

    async def version(self, _: Request) -> Response:
        """The version of weft."""
        return json_response({"version": __version__})

    async def show_metrics(self, _: Request) -> Response:
        """Counters and histograms, in Prometheus' text format."""
        try:
            stats = await self.host.stats()
        except ClosedError:  # the counts before the end are still useful
            stats = None
        return Response(*self.metrics.text(stats))

    async def tokenize(self, request: Request) -> Response:
        """The tokens of a text or a chat."""
        body = await read_body(request, self.limits, TokenizeRequest, self._bodies)
        self._adapter(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise Refusal(400, "either prompt or messages", param="prompt")
        if body.messages is not None:
            ids = await self._encode_chat(
                body.messages, {"add_generation_prompt": body.add_generation_prompt}
            )
        else:
            ids = await self._encode(body.prompt, body.add_special_tokens)
        return json_response(
            {"tokens": ids, "count": len(ids), "max_model_len": self.max_model_len}
        )

    async def detokenize(self, request: Request) -> Response:
        """The text of tokens."""
        body = await read_body(request, self.limits, DetokenizeRequest, self._bodies)
        return json_response({"prompt": await asyncio.to_thread(self.model.decode, body.tokens)})

    async def completions(self, request: Request) -> Response:
        """`/v1/completions`."""
        body = await read_body(request, self.limits, CompletionRequest, self._bodies)
        if len(body.prompt) > self.limits.max_prompts:
            raise Refusal(
                400,
                f"{len(body.prompt)} prompts; at most {self.limits.max_prompts}",
                param="prompt",
            )
        prompts = [
            await self._encode(prompt) if isinstance(prompt, str) else prompt
            for prompt in body.prompt
        ]
        logprobs = body.logprobs
        if body.echo and body.prompt_logprobs is None:
            prompt_logprobs = logprobs
        else:
            prompt_logprobs = body.prompt_logprobs
        checked_request = await self._check_request(
            request, body, "cmpl", prompts, body.max_tokens, logprobs, prompt_logprobs
        )
        if body.echo:
            shown = body.prompt
        else:
            shown = [""] * len(prompts)
        texts = [
            prompt if isinstance(prompt, str) else self.model.decode(prompt) or ""
            for prompt in shown
        ]
        form = TextForm(checked_request, body, texts)
        return await self._answer(request, checked_request, form)

    async def chats(self, request: Request) -> Response:
        """`/v1/chat/completions`."""
        body = await read_body(request, self.limits, ChatRequest, self._bodies)
        if body.top_logprobs is not None and not body.logprobs:
            raise Refusal(
                400, "top_logprobs without logprobs: write logprobs=true", param="top_logprobs"
            )
        variables = {
            **body.chat_template_kwargs,
            "add_generation_prompt": body.add_generation_prompt,
        }
        async with while_connected(request.receive):
            ids = await self._encode_chat(body.messages, variables)
        if body.max_tokens is None:
            most = body.max_completion_tokens
        else:
            most = body.max_tokens
        if body.logprobs:
            logprobs = body.top_logprobs or 0
        else:
            logprobs = None
        checked_request = await self._check_request(
            request, body, "chatcmpl", [ids], most, logprobs, body.prompt_logprobs
        )
        return await self._answer(request, checked_request, ChatForm(checked_request, body))

    # Shared by the routes

    def _adapter(self, name: str | None) -> str | None:
        """The adapter that a model name refers to; None: the model itself."""
        if name in (None, self.name):
            return None
        if name in self.adapters:
            return name
        message = (
            f"the model {name!r:.100} does not exist; this server has"
            f" {', '.join((self.name, *self.adapters))}"
        )
        raise Refusal(404, message, param="model", code="model_not_found")

    async def _encode(self, text: str, special: bool = True) -> list[int]:
        self._check_length(text)
        tokenizer = self.model.tokenizer

        def encode() -> list[int]:
            if special or tokenizer is None:
                return self.model.encode(text)
            return token_ids(tokenizer, text, special=False)

        # A thread costs more than encoding a short text; a long one would block the event loop.
        if len(text) >= LONG_TEXT:
            return await asyncio.to_thread(encode)
        return encode()

    def _check_length(self, text: str) -> None:
        """Refuse a text that cannot fit, without the cost of encoding it."""
        if self.vocabulary is None:
            longest = None
        else:
            longest = self.vocabulary.longest
        if longest is not None and len(text) > self.max_model_len * longest:
            message = (
                f"This model's maximum context length is {self.max_model_len} tokens. However, you"
                " requested"
            )
            raise Refusal(
                400, f"{message} at least {len(text) // longest} tokens in the prompt.", **_TOO_LONG
            )

    async def _encode_chat(
        self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]
    ) -> list[int]:
        if self._renderer is None or self.model.tokenizer is None:
            if self.model.tokenizer is None:
                lacks = "tokenizer"
            else:
                lacks = "chat template"
            message = (
                f"the checkpoint of {self.name} has no {lacks}; use /v1/completions, or weft serve"
                " --chat-template"
            )
            raise Refusal(400, message, param="messages", code="no_chat_template")
        text = await self._renderer.render(texts_of(messages), variables)
        return await self._encode(text, special=False)

    async def _check_request(
        self,
        request: Request,
        body: Sampled,
        kind: str,
        prompts: list[list[int]],
        max_tokens: int | None,
        logprobs: int | None,
        prompt_logprobs: int | None,
    ) -> Asked:
        """Check a request and turn it into commands for the engine.

        From here on the request counts as under way: a signal lets it finish.
        """
        self.host.check_open()
        check_stream_options(body)
        check_limits(
            body,
            self.limits,
            self.model.config.vocab_size,
            max(logprobs or 0, prompt_logprobs or 0),
        )
        adapter = self._adapter(body.model)
        limit = self.max_model_len
        longest = max(map(len, prompts))
        if max_tokens is not None and max_tokens < 1:
            raise Refusal(400, f"max_tokens={max_tokens}: a whole number >= 1", param="max_tokens")
        if longest + (max_tokens or 1) > limit:
            if max_tokens:
                completion_text = f", and {max_tokens} for the completion"
            else:
                completion_text = ""
            message = (
                f"This model's maximum context length is {limit} tokens. However, you requested"
                f" {longest} tokens in "
            )
            raise Refusal(400, f"{message}the prompt{completion_text}.", **_TOO_LONG)
        count = body.n * len(prompts)
        if count > self.host.max_open:
            message = (
                f"{len(prompts)} prompts with n={body.n} are {count} completions; at most"
                f" {self.host.max_open} at once"
            )
            raise Refusal(400, message, param="n")
        grammar = None
        if body.response_format is not None and body.response_format.type != "text":
            form = body.response_format.model_dump(by_alias=True, exclude_none=True)
            use = GrammarUse(num_tokens=max_tokens or limit - min(map(len, prompts)), n=count)
            async with while_connected(request.receive):
                grammar = await self._compiled(form, use)
        options: dict[str, Any] = {
            "adapter": adapter,
            "priority": body.priority,
            "extras": body.weft.extras,
        }
        options |= {
            "cache_salt": body.cache_salt or "",
            "captured": body.weft.captured,
            "grammar": grammar,
        }
        options["sampling"] = body.sampling(logprobs, prompt_logprobs)
        requests = [
            Add(prompt=ids, max_tokens=max_tokens or limit - len(ids), **options) for ids in prompts
        ]
        self.host.check_room(count)
        writer = Writer(f"{kind}-{secrets.token_hex(12)}", body.model or self.name, self.vocabulary)
        return Asked(body, requests, writer)

    async def _compiled(self, form: dict[str, Any], use: GrammarUse) -> str:
        """Compile a `response_format` in a thread pool, where slow grammars queue up."""
        grammar = self._compile_grammar.find(form, use)
        if grammar is not None:
            return grammar
        if self._num_compiling >= _MOST_COMPILING:
            raise Refusal(
                429,
                f"{self._num_compiling} grammars wait to be compiled",
                "rate_limit_error",
                code="busy",
            )
        self._num_compiling += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(
                self._compilers, self._compile_grammar, form, use
            )
        except ImportError as error:
            message = f"this server has no grammars: {error}; {install_command('serve')}"
            raise Refusal(501, message, param="response_format", code="no_grammars") from error
        finally:
            self._num_compiling -= 1

    async def _answer(self, request: Request, checked_request: Asked, form: Form) -> Response:
        """The response to a request, either whole or as a stream."""
        parts = self._parts(checked_request, form)
        if checked_request.body.stream:
            # The status line is sent before the first chunk: wait for the first token, so that an
            # error before it can still set the status.
            try:
                async with while_connected(request.receive):
                    first = await anext(parts)
            except BaseException:
                await parts.aclose()
                raise
            return EventStream(first, parts, form)
        async with contextlib.aclosing(parts), while_connected(request.receive):
            async for _ in parts:
                pass
        return json_response(form.whole())

    async def _parts(
        self, checked_request: Asked, form: Form
    ) -> AsyncGenerator[Sequence[Part], None]:
        """Yield the parts of all choices as they arrive, within the time limit."""
        n = checked_request.body.n
        clock = self.metrics.begin(sum(map(len, checked_request.prompts)))
        outputs = self.host.stream(checked_request.requests)
        seconds = self.limits.timeout
        try:
            async with contextlib.aclosing(
                outputs if seconds is None else _within(outputs, seconds)
            ) as stream:
                async for batch in stream:
                    clock.add(sum(len(output.token_ids) for output in batch))
                    yield [
                        form.choices[output.place * n + output.index].add(output)
                        for output in batch
                    ]
            clock.end([choice.finish_reason or "" for choice in form.choices])
        finally:
            clock.drop()  # counts as aborted unless it has ended

    def app(self) -> Starlette:
        """The Starlette application."""
        routes = [  # Starlette tries them in order: the most frequent ones come first
            Route("/v1/completions", self._guarded(self.completions), methods=["POST"]),
            Route("/v1/chat/completions", self._guarded(self.chats), methods=["POST"]),
            Route("/health", self._guarded(self.health, is_open=True), methods=["GET"]),
            Route("/version", self._guarded(self.version, is_open=True), methods=["GET"]),
            Route("/metrics", self._guarded(self.show_metrics), methods=["GET"]),
            Route("/v1/models", self._guarded(self.models), methods=["GET"]),
            Route("/v1/models/{name:path}", self._guarded(self.one_model), methods=["GET"]),
            Route("/tokenize", self._guarded(self.tokenize), methods=["POST"]),
            Route("/detokenize", self._guarded(self.detokenize), methods=["POST"]),
        ]
        return Starlette(
            routes=routes, exception_handlers={HTTPException: _no_route}, lifespan=self._lifespan
        )

    @contextlib.asynccontextmanager
    async def _lifespan(self, _: Starlette) -> AsyncIterator[None]:
        await self.host.open()
        if self._renderer is not None:
            self._renderer.open()
        try:
            yield
        finally:
            # A grammar that is being compiled may take long, and nobody waits for it any more.
            self._compilers.shutdown(wait=False, cancel_futures=True)
            if self._renderer is not None:
                self._renderer.close()
            await self.host.close()

    def _guarded(
        self, route: Callable[[Request], Awaitable[Response]], is_open: bool = False
    ) -> Callable[[Request], Awaitable[Response]]:
        """Wrap a route: check the API key first, and answer errors in OpenAI's form."""

        async def guarded(request: Request) -> Response:
            try:
                if self._key is None:
                    refuse_browsers(request.headers, self._is_local)
                elif not is_open:
                    self._check_key(request)
                return await route(request)
            except ClientDisconnect:
                return Response(status_code=499)
            except Exception as error:
                refusal = refusal_of(error)
                self.metrics.refuse(refusal.status)
                if refusal.status in (429, 503):
                    headers = {"retry-after": str(_RETRY_SECONDS)}
                else:
                    headers = {}
                return json_response(refusal.body, refusal.status, headers)

        return guarded

    def _check_key(self, request: Request) -> None:
        authorization = request.headers.get("authorization", "").encode("latin-1", "replace")
        # Takes the same time wherever the keys differ, so timing does not reveal the key. On bytes,
        # because on str it refuses characters beyond ASCII.
        if not hmac.compare_digest(authorization, f"Bearer {self._key}".encode()):
            raise Refusal(
                401,
                "the API key is missing or wrong",
                "authentication_error",
                code="invalid_api_key",
            )


async def _within(
    outputs: AsyncGenerator[list[Output], None], seconds: float
) -> AsyncGenerator[list[Output], None]:
    """Yield outputs until `seconds` have passed.

    Raises:
        Refusal: the outputs had not ended by then.
    """
    end = asyncio.get_running_loop().time() + seconds
    async with contextlib.aclosing(outputs):
        while True:
            try:
                async with asyncio.timeout_at(end):
                    batch = await anext(outputs)
            except StopAsyncIteration:
                return
            except TimeoutError:
                raise Refusal(
                    504, f"no end within {seconds:g} s", "timeout", code="timeout"
                ) from None
            yield batch


class EventStream(Response):
    """A response of server-sent events; the last parts are sent with the end of the stream.

    Args:
        first: the first parts of the answer.
        parts: the later ones.
        form: writes them as JSON.
    """

    def __init__(
        self, first: Sequence[Part], parts: AsyncGenerator[Sequence[Part], None], form: Form
    ) -> None:
        super().__init__(None, media_type="text/event-stream")
        # Starlette has set it to the length of the empty content.
        del self.headers["content-length"]
        self.headers["cache-control"] = "no-cache"
        self._first = first
        self._parts = parts
        self._form = form

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events until the client disconnects."""
        async with contextlib.aclosing(self._parts), contextlib.aclosing(self._events()) as events:
            with contextlib.suppress(ClientDisconnect):
                async with while_connected(receive):
                    if scope["http_version"] == "1.0":  # it has no chunked transfer encoding
                        whole = Response(
                            b"".join([chunk async for chunk in events]), 200, self.headers
                        )
                        await whole(scope, receive, send)
                        return
                    await send(
                        {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
                    )
                    async for chunk in events:
                        await send({"type": "http.response.body", "body": chunk, "more_body": True})
                    await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _events(self) -> AsyncGenerator[bytes, None]:
        try:
            yield self._form.written(self._first)
            async for parts in self._parts:
                yield self._form.written(parts)
        except Exception as error:  # the status is already sent: the error becomes an event
            yield event(refusal_of(error).body)


async def _no_route(request: Request, error: Exception) -> Response:
    if isinstance(error, HTTPException):
        status = error.status_code
    else:
        status = 500
    message = f"{request.method} {request.url.path!r:.200}: {getattr(error, 'detail', 'not found')}"
    if status == 405:
        code = "method_not_allowed"
    else:
        code = "not_found"
    return json_response(
        Refusal(status, message, code=code).body, status, getattr(error, "headers", None)
    )
