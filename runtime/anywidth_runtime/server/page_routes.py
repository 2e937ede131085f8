"""The page: its files, its facts, its examples and its load."""

from __future__ import annotations

import base64
import json
import math
import time
from dataclasses import dataclass
from importlib import resources
from typing import Any

import numpy as np
from fastapi import APIRouter, HTTPException, Request, Response
from fastapi.responses import HTMLResponse

from anywidth_runtime.errors import BundleError, RequestError
from anywidth_runtime.network import Network
from anywidth_runtime.server.bodies import Bodies
from anywidth_runtime.server.inference_protocol import FROM_NUMPY
from anywidth_runtime.server.page_load import MOST_PER_SECOND, Load, history
from anywidth_runtime.server.picture_files import makes_pictures
from anywidth_runtime.server.service import Service
from anywidth_runtime.server.tokens import brings_token

_TYPES = {"css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
_HEADERS = {
    # Nothing is loaded from another host, and no other page can frame this one.
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
        "img-src 'self' blob: data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-cache",
}
_SECONDS, _BINS = 30.0, 120
_MOST_BODY = 1000


def page_routes(service: Service, has_token: Any) -> APIRouter:
    """`/`, `/docs` and the routes below `/page`."""
    router = APIRouter(include_in_schema=False)
    files = resources.files("anywidth_runtime.page")

    @router.get("/docs")
    async def docs() -> Response:
        return HTMLResponse(files.joinpath("docs.html").read_text("utf-8"), headers=_HEADERS)

    @router.get("/page/files/{name}")
    async def file(name: str) -> Response:
        kind = _TYPES.get(name.rpartition(".")[2])
        # Only names of the package's own files are served.
        if kind is None or name not in {one.name for one in files.iterdir()}:
            raise HTTPException(404, f"no file {name!r}")
        return Response(files.joinpath(name).read_bytes(), media_type=kind, headers=_HEADERS)

    if not service.settings.has_page:
        return router

    examples = read_examples(service.network)
    load = Load(service)
    bodies = Bodies(_MOST_BODY, 100 * _MOST_BODY)

    @router.get("/")
    async def page() -> Response:
        return HTMLResponse(files.joinpath("page.html").read_text("utf-8"), headers=_HEADERS)

    @router.get("/page/door")
    async def door(request: Request) -> dict[str, bool]:
        return {"is_open": brings_token(request, service.settings.token)}

    @router.get("/page/about", dependencies=[has_token])
    async def about() -> dict[str, Any]:
        shown = [{"name": one.name, "is_tensor": one.tensor is not None} for one in examples]
        return describe(service) | {"examples": shown}

    def example(number: int) -> Example:
        if not 0 <= number < len(examples):
            raise HTTPException(404, f"no example {number}: there are {len(examples)}")
        return examples[number]

    @router.get("/page/examples/{number}.png", dependencies=[has_token])
    async def picture(number: int) -> Response:
        return Response(example(number).picture, media_type="image/png", headers=_HEADERS)

    @router.get("/page/examples/{number}.json", dependencies=[has_token])
    async def tensor(number: int) -> dict[str, Any]:
        found = example(number).tensor
        if found is None:
            raise HTTPException(404, f"example {number} is a picture: see {number}.png")
        return found

    if not service.settings.has_load:
        return router

    @router.post("/page/load", dependencies=[has_token])
    async def ask(request: Request) -> dict[str, Any]:
        try:
            async with bodies.read(request) as body:
                asked = json.loads(body)
            await load.ask(float(asked["per_second"]), float(asked["deadline_ms"]))
        except RequestError as error:
            raise HTTPException(400, str(error)) from error
        except (KeyError, TypeError, ValueError) as error:
            raise HTTPException(400, "expected numbers: per_second, deadline_ms") from error
        return state(service, load)

    return router


def describe(service: Service) -> dict[str, Any]:
    """What the page shows before the first run."""
    network = service.network
    return {
        "name": service.settings.name,
        "task": network.task,
        "takes": network.takes,
        "takes_pictures": service.picture_input is not None,
        "makes_pictures": makes_pictures(network),
        "classes": network.classes,
        "scale": network.facts.get("scale"),
        "actions": json.loads(network.facts.get("actions", "null")),
        "accuracy_name": network.accuracy_name,
        "deadline_ms": service.settings.deadline_ms,
        "has_load": service.settings.has_load,
        "most_per_second": MOST_PER_SECOND,
        "governed": [choice.width for choice in service.governor.menu],
        "table": [
            {
                "width": row.width,
                "multiply_adds": row.macs,
                "parameters": row.parameters,
                "accuracy": row.accuracy,
                "latency_ms": row.latency_ms,
            }
            for row in network.table
        ],
    }


def state(service: Service, load: Load) -> dict[str, Any]:
    """The state of the governor."""
    now = time.monotonic()
    return {
        "per_second": load.per_second,
        "deadline_ms": load.deadline_ms,
        "waiting": service.scheduler.waiting,
        "slowdown": service.governor.latencies.slowdown,
        "seconds": _SECONDS,
        "history": history(service.metrics.recent(_SECONDS), now, _SECONDS, _BINS),
    }


_PNG = b"\x89PNG\r\n\x1a\n"


@dataclass(frozen=True)
class Example:
    """One example input.

    Args:
        name: its content, such as its true class.
        picture: a PNG file that shows it; for networks that take pictures, also the input itself.
        tensor: the input of other networks, in the form of the Open Inference Protocol.
    """

    name: str
    picture: bytes
    tensor: dict[str, Any] | None = None


def read_examples(network: Network) -> list[Example]:
    """The examples in a bundle's facts; none if it has none."""
    text = network.facts.get("examples")
    if text is None:
        return []
    try:
        return [_read(one, network) for one in json.loads(text)]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise BundleError(f"{network.path}: its examples cannot be read ({error})") from error


def _read(data: Any, network: Network) -> Example:
    picture = base64.b64decode(data["picture"], validate=True)
    if not picture.startswith(_PNG):
        raise ValueError("a picture that is no PNG")
    if data.get("tensor") is None:
        return Example(str(data["name"]), picture)
    first = network.inputs[0]
    raw = base64.b64decode(data["tensor"]["data"], validate=True)
    shape = [int(size) for size in data["tensor"]["shape"]]
    if len(raw) != math.prod(shape) * np.dtype(first.dtype).itemsize:
        raise ValueError(f"a tensor of shape {shape} in {len(raw)} bytes")
    tensor = {
        "name": first.name,
        "datatype": FROM_NUMPY[first.dtype],
        "shape": shape,
        "data": np.frombuffer(raw, first.dtype).tolist(),
    }
    return Example(str(data["name"]), picture, tensor)
