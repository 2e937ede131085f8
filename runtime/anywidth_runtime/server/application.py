"""The server's addresses, as a FastAPI application."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import Depends, FastAPI, HTTPException, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException as AnyHTTPException

from anywidth_runtime._version import __version__
from anywidth_runtime.server.counters import CONTENT_TYPE
from anywidth_runtime.server.inference import inference_routes
from anywidth_runtime.server.page_routes import page_routes
from anywidth_runtime.server.service import Service
from anywidth_runtime.server.tokens import token_check

_EXTENSIONS = ["binary_tensor_data", "classification", "parameters"]


def make_app(service: Service) -> FastAPI:
    """The application that serves a network; on shutdown it answers all accepted requests."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        await asyncio.to_thread(service.close)

    app = FastAPI(
        title=f"anywidth: {service.settings.name}",
        version=__version__,
        description="One network at any width, by the Open Inference Protocol, version 2.",
        lifespan=lifespan,
        # FastAPI's own pages load scripts from another host; this page does not.
        docs_url=None,
        redoc_url=None,
    )
    has_token = Depends(token_check(service.settings.token))
    model = inference_routes(service)
    for version in ("", "/versions/1"):
        app.include_router(
            model,
            prefix="/v2/models/{model}" + version,
            dependencies=[has_token],
            include_in_schema=not version,
        )
    app.include_router(page_routes(service, has_token))

    @app.get("/v2", tags=["server"], summary="Name and version")
    async def server() -> dict[str, Any]:
        return {"name": "anywidth", "version": __version__, "extensions": _EXTENSIONS}

    @app.get("/v2/health/live", tags=["server"], summary="Whether the server runs")
    async def live() -> dict[str, bool]:
        return {"live": True}

    @app.get("/v2/health/ready", tags=["server"], summary="Whether it takes requests")
    async def ready() -> dict[str, bool]:
        if service.scheduler.is_closed:
            raise HTTPException(503, "the server is shutting down")
        return {"ready": True}

    @app.get("/metrics", tags=["server"], summary="Prometheus metrics", dependencies=[has_token])
    async def metrics() -> Response:
        return Response(service.metrics.text(), media_type=CONTENT_TYPE)

    app.add_exception_handler(AnyHTTPException, _refusal)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(Exception, _failure)
    return app


async def _refusal(request: Request, error: Any) -> Response:
    """Return errors in the form of the protocol."""
    return JSONResponse({"error": error.detail}, error.status_code, error.headers)


async def _invalid(request: Request, error: Any) -> Response:
    first = error.errors()[0]
    return JSONResponse({"error": f"{first['loc'][-1]}: {first['msg']}"}, 400)


async def _failure(request: Request, error: Exception) -> Response:
    # The reason goes into the server's log, not into the answer.
    return JSONResponse({"error": "the server failed to answer; its log says why"}, 500)
