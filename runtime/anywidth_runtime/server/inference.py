"""The routes that run the network."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Depends, HTTPException, Request, Response

from anywidth_runtime.contents import TensorInfo
from anywidth_runtime.errors import RequestError
from anywidth_runtime.governor_scheduler import Closed, QueueFull, TooLate
from anywidth_runtime.network import Network
from anywidth_runtime.server.bodies import Bodies, BodyTooLarge, BodyTooSlow, TooMuchHeld
from anywidth_runtime.server.inference_protocol import (
    FROM_NUMPY,
    Elements,
    InferenceRequest,
    Wanted,
    read_parameters,
    read_request,
    write_answer,
)
from anywidth_runtime.server.picture_files import PictureTooLarge
from anywidth_runtime.server.service import Reply, Service

_JSON_LENGTH = "Inference-Header-Content-Length"

_TEXT = """\
Takes the JSON of the Open Inference Protocol, optionally followed by binary tensors, or the bytes
of an image file (`Content-Type: image/png` or similar).

Parameters are in the JSON's `parameters` or, for an image file, in the query of the address:
`width` runs at that width; with `deadline_ms` the governor chooses the width, and the answer is due
this many milliseconds after the request arrived.

For an output, `classification` asks for this many of the largest values, with the names of their
classes, and the `encoding` `png` for an image. An image file sent with `Accept: image/png` gets the
first output as an image file.

The answer's `parameters` give the width used, the time taken, and whether it was in time.
"""
_ANSWERS: dict[int | str, dict[str, Any]] = {
    400: {"description": "The request is invalid; `error` gives the reason."},
    413: {"description": "The request has too many bytes or pixels."},
    503: {"description": "The queue is full, or no width could answer in time."},
}


def inference_routes(service: Service) -> APIRouter:
    """The routes of the model, without the prefix that names it."""
    network, settings = service.network, service.settings
    bodies = Bodies(settings.most_body, settings.most_held)

    async def check_name(model: str) -> None:
        if model != settings.name:
            raise HTTPException(404, f"no model {model!r}: this server has {settings.name!r}")

    router = APIRouter(dependencies=[Depends(check_name)], tags=["model"])

    @router.get("", summary="Inputs, outputs, widths")
    async def describe(model: str) -> dict[str, Any]:
        return {
            "name": model,
            "versions": ["1"],
            "platform": "anywidth_onnxruntime",
            "inputs": [_described(one) for one in network.inputs],
            "outputs": [_described(one) for one in network.outputs],
            "parameters": {
                "takes": network.takes,
                "widths": list(network.widths),
                "deadline_ms": settings.deadline_ms,
            },
        }

    @router.get("/ready", summary="Whether it accepts requests")
    async def model_ready(model: str) -> dict[str, Any]:
        return {"name": model, "ready": True}

    @router.post(
        "/infer",
        summary="Run the network",
        description=_TEXT,
        openapi_extra=_body(network),
        responses=_ANSWERS,
    )
    async def infer(model: str, request: Request) -> Response:
        since = service.scheduler.clock()
        try:
            async with bodies.read(request) as body:
                asked = _read(request, body, service)
                reply = await service.infer(asked, since)
        except RequestError as error:
            status = _status(error)
            if not isinstance(error, TooLate | QueueFull):  # the service counts these
                service.metrics.turned_away("wrong" if status < 500 else "refused")
            headers = {"Retry-After": "1"} if status == 503 else None
            raise HTTPException(status, str(error), headers) from error
        except Exception:
            service.metrics.turned_away("failed")
            raise
        return _answer(request, settings.name, asked, reply)

    return router


def _body(network: Network) -> dict[str, Any]:
    """The OpenAPI description of the body, with an example for this network."""
    inputs = [
        {
            "name": one.name,
            "shape": list(one.example),
            "datatype": FROM_NUMPY[one.dtype],
            "data": [0, 0, "as many numbers as the shape has"],
        }
        for one in network.inputs
    ]
    file = {"schema": {"type": "string", "format": "binary"}}
    example = {"parameters": {"deadline_ms": 20}, "inputs": inputs}
    return {
        "requestBody": {
            "required": True,
            "content": {
                "application/json": {"schema": {"type": "object"}, "example": example},
                "application/octet-stream": file,
                "image/*": file,
            },
        },
        "parameters": [
            {"name": name, "in": "query", "schema": {"type": "number"}, "description": text}
            for name, text in (
                ("width", "for an image file: the width to run at"),
                ("deadline_ms", "for an image file: when the answer is due"),
            )
        ],
    }


def _status(error: RequestError) -> int:
    if isinstance(error, BodyTooLarge | PictureTooLarge):
        return 413
    if isinstance(error, QueueFull | TooLate | Closed | TooMuchHeld):
        return 503
    return 408 if isinstance(error, BodyTooSlow) else 400


def _described(one: TensorInfo) -> dict[str, Any]:
    shape = [-1 if isinstance(axis, str) else axis for axis in one.shape]
    return {"name": one.name, "datatype": FROM_NUMPY[one.dtype], "shape": shape}


def _is_picture(request: Request) -> bool:
    return request.headers.get("Content-Type", "").startswith("image/")


def _wants_picture(request: Request) -> bool:
    return _is_picture(request) and request.headers.get("Accept", "").startswith("image/png")


def _read(request: Request, body: bytes, service: Service) -> InferenceRequest:
    if _is_picture(request):
        takes = service.picture_input
        if takes is None:
            raise RequestError(
                f"this network takes no image files: it takes {service.network.takes}"
            )
        parameters = read_parameters(request.query_params)
        first = Wanted(service.network.outputs[0].name, encoding="png")
        return InferenceRequest(
            files={takes.name: [body]},
            outputs=(first,) if _wants_picture(request) else (),
            parameters=parameters,
        )
    length = request.headers.get(_JSON_LENGTH)
    if length is not None and not length.isdigit():
        raise RequestError(f"{_JSON_LENGTH} is {length!r}: expected a whole number")
    return read_request(body, None if length is None else int(length))


def _answer(request: Request, name: str, asked: InferenceRequest, reply: Reply) -> Response:
    told = {
        f"Anywidth-{key.replace('_', '-')}": str(value) for key, value in reply.parameters.items()
    }
    if _wants_picture(request):
        ((_, value),) = reply.outputs
        assert isinstance(value, Elements)
        return Response(value.items[0], media_type="image/png", headers=told)
    answer = write_answer(name, reply.outputs, reply.parameters, asked.id)
    if answer.json_length is not None:
        told[_JSON_LENGTH] = str(answer.json_length)
    kind = "json" if answer.json_length is None else "octet-stream"
    return Response(answer.body, media_type=f"application/{kind}", headers=told)
