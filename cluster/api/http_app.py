"""The OpenAI-compatible endpoint: a FastAPI application in front of one model or several."""

from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Mapping
from contextlib import suppress
from functools import partial
from typing import Any, Final
from urllib.parse import quote

from fastapi import APIRouter, FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.responses import PlainTextResponse, Response

import diffray
from diffray.cluster.api.anthropic import Messages
from diffray.cluster.api.anthropic_body import MessagesBody
from diffray.cluster.api.batch_routes import batch_router
from diffray.cluster.api.bodies import GenerationBody, SharedFields
from diffray.cluster.api.dialects import Dialect, answer_stream, answer_whole
from diffray.cluster.api.errors import ApiError, Json, as_api_error, bug
from diffray.cluster.api.fields import StrictModel
from diffray.cluster.api.gate import Gate, lacks_slash, page_router
from diffray.cluster.api.http import WARNINGS, EventStream, answer, read_json, refusal, unless_gone
from diffray.cluster.api.metrics import CONTENT_TYPE
from diffray.cluster.api.openapi import (
    ANSWERS,
    ERROR,
    describe,
    docs_page,
    documented,
    with_warnings,
    without_unknown,
)
from diffray.cluster.api.operations import OPERATIONS
from diffray.cluster.api.responses import Responses
from diffray.cluster.api.responses_body import ResponsesBody
from diffray.cluster.api.served import QUESTIONS, Endpoint, Served
from diffray.cluster.api.settings import ApiSettings
from diffray.cluster.control.engine_client import EngineFailed

GetService = Callable[[], Served]
Read = Callable[[Request, Endpoint], Awaitable[tuple[object, list[str]]]]  # and warnings

_DIALECTS: Final[dict[type[SharedFields], Callable[[object], Dialect]]] = {
    ResponsesBody: Responses,
    MessagesBody: Messages,
}


def build_api(
    get_service: GetService,
    settings: ApiSettings | None = None,
    *,
    model: str | None = None,
    about: str = "",
) -> FastAPI:
    """Return the application; `get_service` is called for each request, and may raise EngineFailed.

    The examples in the OpenAPI document name `model`, as requests must if several are served;
    `about` describes what is served. FastAPI applications cannot be pickled; build it in the
    process that runs it.
    """
    settings = settings or ApiSettings()
    app = FastAPI(
        title="diffray",
        summary="Diffusion language models behind an OpenAI-compatible API.",
        version=diffray.__version__,
        docs_url=None,  # it is below, with a content security policy of its own
        redoc_url=None,
        redirect_slashes=False,  # a redirect would repeat the client's Host header
        openapi_url="/openapi.json" if settings.docs else None,
        responses=ERROR,
    )
    keys = bool(settings.api_keys), bool(settings.operator_keys)
    described = partial(describe, app, has_keys=keys, model=model, about=about)
    app.openapi = described  # type: ignore[method-assign]  # as FastAPI's manual says
    app.include_router(_answers(get_service, settings))
    app.include_router(batch_router(settings))
    app.include_router(_operations(get_service, settings))
    app.include_router(_reports(get_service, settings))
    if settings.docs:

        @app.get("/docs", include_in_schema=False)
        async def docs() -> Response:
            return docs_page(f"{app.title} {app.version}")

    if settings.page:
        app.include_router(page_router())

    for kind in (ApiError, EngineFailed):
        app.add_exception_handler(kind, partial(_refuse, get_service))
    app.add_exception_handler(HTTPException, partial(_refuse_http, settings))
    app.add_exception_handler(ClientDisconnect, _client_gone)
    app.add_exception_handler(Exception, _internal_error)
    app.add_middleware(Gate, keys=settings.api_keys, operators=settings.operator_keys)
    if settings.cors_origins:  # outside the gate, because a browser must be able to read errors
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.cors_origins,
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],
            expose_headers=["Retry-After", "X-Request-Id", WARNINGS],
        )
    return app


def _answers(get_service: GetService, settings: ApiSettings) -> APIRouter:
    """Return the routes for clients."""
    router, read = APIRouter(tags=["Answers"]), partial(_read_known, settings)

    @router.get("/v1/models")
    async def list_models() -> Response:
        """List the models and adapters, with the kinds of decoders and caches that each accepts."""
        return answer(await get_service().models())

    @router.get("/v1/models/{name:path}")
    async def show_model(name: str) -> Response:
        """Show the model under one of its names."""
        return answer(await get_service().model(name))

    def add(path: str, kind: type[SharedFields]) -> None:
        @router.post(path, **documented(path, kind))
        async def handle(request: Request) -> Response:
            body, warnings = await read(request, kind)
            return await _generate(request, get_service(), kind, body, warnings)

    for path, kind in ANSWERS.items():
        add(path, kind)

    async def read_question(request: Request, question: Endpoint) -> tuple[object, list[str]]:
        if not question.queried:
            return await read(request, question.given)
        query = request.query_params.items()
        return {name: value for name, value in query if name in question.given.model_fields}, []

    _add(router, get_service, QUESTIONS, read_question)
    return router


async def _generate(
    request: Request, service: Served, kind: type[SharedFields], body: Any, warnings: list[str]
) -> Response:
    """Answer a request of one of the APIs; those that are dialects are asked as chats."""
    stream: Callable[..., Response] = EventStream
    chunks: Callable[[], AsyncGenerator[Json, None]]
    whole: Callable[[], Coroutine[Any, Any, Json]]
    if issubclass(kind, GenerationBody):
        streams = isinstance(body, dict) and body.get("stream") is True
        chunks = partial(service.stream, kind, body)
        whole = partial(service.whole, kind, body)
    else:
        dialect = _DIALECTS[kind](body)
        dialect.warnings, warnings = warnings, []
        streams = dialect.chat.get("stream") is True
        chunks = partial(answer_stream, service, dialect)
        whole = partial(answer_whole, service, dialect)
        stream = partial(EventStream, failed=dialect.failed, end=b"")
    if streams:
        return await unless_gone(request.receive, _open(chunks(), warnings, stream))
    return answer(with_warnings(await unless_gone(request.receive, whole()), warnings))


def _operations(get_service: GetService, settings: ApiSettings) -> APIRouter:
    """Return the routes that change the engine, for which the gate asks for an operator's key."""
    router = APIRouter(tags=["Operation"])

    async def read(request: Request, operation: Endpoint) -> tuple[object, list[str]]:
        return _query(request) if operation.queried else await _read(settings, request), []

    _add(router, get_service, OPERATIONS, read)
    return router


def _add(
    router: APIRouter, get_service: GetService, endpoints: Mapping[str, Endpoint], read: Read
) -> None:
    """Add a route for each endpoint."""

    def add(path: str, endpoint: Endpoint) -> None:
        @router.api_route(
            path,
            methods=[endpoint.method],
            **documented(path, endpoint.given, queried=endpoint.queried),
        )
        async def handle(request: Request) -> Response:
            given, warnings = await read(request, endpoint)
            found = with_warnings(await get_service().ask(path, given), warnings)
            return answer(found) if found else Response()

    for path, endpoint in endpoints.items():
        add(path, endpoint)


async def _read(settings: ApiSettings, request: Request) -> object:
    return await read_json(request, settings.max_body_bytes, settings.body_timeout_s)


async def _read_known(
    settings: ApiSettings, request: Request, kind: type[StrictModel]
) -> tuple[object, list[str]]:
    """Return a body, and the warnings about unknown fields if those are ignored."""
    body = await _read(settings, request)
    return without_unknown(body, kind) if settings.ignore_unknown_fields else (body, [])


def _query(request: Request) -> Json:
    """Return a query as a JSON object, with `level` as a number."""
    given: Json = dict(request.query_params)
    if (level := given.get("level", "")).isdecimal() and len(level) == 1:
        given["level"] = int(level)
    return given


def _reports(get_service: GetService, settings: ApiSettings) -> APIRouter:
    """Return the routes that report on the server."""
    router = APIRouter(tags=["Reports"])

    @router.head("/health", include_in_schema=False)  # for monitors
    @router.api_route("/ping", methods=["GET", "HEAD"], include_in_schema=False)  # for SageMaker
    @router.get("/health", response_class=Response)
    async def health() -> Response:
        """Say whether the engine can answer; needs no key."""
        found = await get_service().health()
        return answer(found) if found else Response()

    @router.get("/version")
    async def version() -> Response:
        """Report the version; needs no key."""
        return answer({"version": diffray.__version__})

    @router.get("/load")
    async def load() -> Response:
        """Report how many requests run and wait."""
        found = await get_service().load()
        return answer(
            {
                "server_load": found.running + found.waiting,
                "running": found.running,
                "waiting": found.waiting,
                "free_pages": found.free_pages,
                "num_pages": found.num_pages,
            }
        )

    @router.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> Response:
        """Report the metrics of all replicas in Prometheus' format; needs no key."""
        text = await get_service().prometheus(vllm_names=settings.vllm_metric_names)
        return Response(text, media_type=CONTENT_TYPE)

    return router


async def _open(
    chunks: AsyncGenerator[Json, None], warnings: list[str], stream: Callable[..., Response]
) -> Response:
    """Return the stream after its first chunk, so that earlier errors get their own status.

    The first chunk gets the warnings.
    """
    try:
        return stream(with_warnings(await anext(chunks), warnings), chunks)
    except BaseException:
        await chunks.aclose()
        raise


# Errors.


async def _refuse(get_service: GetService, request: Request, error: Exception) -> Response:
    refused = as_api_error(error)
    with suppress(EngineFailed):  # there may be no service yet to count it
        get_service().count_refusal(refused)
    return refusal(refused, request.scope["path"])


async def _refuse_http(settings: ApiSettings, request: Request, error: Exception) -> Response:
    """Shape the framework's errors: unknown paths, wrong methods."""
    assert isinstance(error, HTTPException)
    if settings.page and lacks_slash(request):
        folder = request.scope["path"].rpartition("/")[2]
        return Response(status_code=307, headers={"Location": f"{quote(folder)}/"})
    message = f"{error.detail} ({request.method} {request.scope['path']})"
    if settings.docs:
        message += f"; {request.scope.get('root_path', '')}/docs lists the paths"
    code = "not_found" if error.status_code == 404 else None
    refused = ApiError(error.status_code, message, code=code, headers=error.headers)
    return refusal(refused, request.scope["path"])


async def _client_gone(request: Request, error: Exception) -> Response:
    return Response(status_code=499)


async def _internal_error(request: Request, error: Exception) -> Response:
    """Answer 500; the framework raises the error again afterwards, so that it is logged."""
    return refusal(bug(), request.scope["path"])
