"""A real server, asked by real clients."""

from __future__ import annotations

import asyncio
import io
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anywidth_runtime
import numpy as np
import pytest
import tritonclient.http as triton
from anywidth_runtime.governor_scheduler import TooLate
from anywidth_runtime.server.inference_protocol import InferenceRequest, Parameters
from anywidth_runtime.server.page_load import Load
from anywidth_runtime.server.service import Service
from anywidth_runtime.server.settings import Settings
from PIL import Image
from served import HANGS_AFTER, Running, served, write_tiny_bundle
from tiny_networks import PIXELS

PIXEL_COUNT = PIXELS**2


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_bundle(tmp_path_factory.mktemp("bundle"))


@pytest.fixture(scope="module")
def server(bundle: Path) -> Iterator[Running]:
    with served(bundle, most_body=100_000, most_pixels=10_000) as running:
        yield running


@pytest.fixture(scope="module")
def images() -> np.ndarray:
    return np.random.default_rng(0).random((2, 1, PIXELS, PIXELS), np.float32)


def asked(images: np.ndarray, **parameters: Any) -> dict[str, Any]:
    tensor = {"name": "input", "shape": list(images.shape), "datatype": "FP32"}
    data = {"data": images.reshape(-1).tolist()}
    return {"inputs": [{**tensor, **data}], "parameters": parameters}


def png(size: tuple[int, int] = (PIXELS, PIXELS), mode: str = "L", level: int = 100) -> bytes:
    file = io.BytesIO()
    Image.new(mode, size, level if mode in ("L", "I;16") else (level,) * len(mode)).save(
        file, "PNG"
    )
    return file.getvalue()


def test_tritons_client_finds_and_runs_the_network(server: Running, images: np.ndarray) -> None:
    client = triton.InferenceServerClient(f"127.0.0.1:{server.port}")
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("net")
    assert client.is_model_ready("net", "1")
    assert client.get_server_metadata()["name"] == "anywidth"
    (described,) = client.get_model_metadata("net")["inputs"]
    assert described == {"name": "input", "datatype": "FP32", "shape": [-1, 1, PIXELS, PIXELS]}
    given = triton.InferInput("input", images.shape, "FP32")
    for width in (0.25, 0.5, 1.0):
        expected = server.service.network.run(images, width=width)
        for is_binary in (True, False):
            given.set_data_from_numpy(images, binary_data=is_binary)
            wanted = [triton.InferRequestedOutput("output", binary_data=is_binary)]
            result = client.infer("net", [given], outputs=wanted, parameters={"width": width})
            assert np.array_equal(result.as_numpy("output"), expected)
            told = result.get_response()["parameters"]
            assert told["width"] == width
            assert told["milliseconds"] >= told["run_ms"] > 0
            assert told["multiply_adds"] == len(images) * _row(server, width).macs
    held = client.infer("net", [given], parameters={"deadline_ms": 30_000}, request_id="7")
    assert held.get_response()["id"] == "7"
    assert held.get_response()["parameters"]["in_time"]
    classes = [triton.InferRequestedOutput("output", class_count=3)]
    largest = client.infer("net", [given], outputs=classes, parameters={"width": 1.0})
    first = largest.as_numpy("output")[0]
    expected = server.service.network.run(images, width=1.0)[0]
    assert [int(text.split(b":")[1]) for text in first] == np.argsort(-expected)[:3].tolist()
    client.close()


def _row(server: Running, width: float) -> Any:
    return next(row for row in server.service.network.table if row.width == width)


def test_tritons_client_reads_our_errors(server: Running, images: np.ndarray) -> None:
    client = triton.InferenceServerClient(f"127.0.0.1:{server.port}")
    given = triton.InferInput("input", images.shape, "FP32")
    given.set_data_from_numpy(images)
    with pytest.raises(triton.InferenceServerException, match=r"0\.25 and 0\.5"):
        client.infer("net", [given], parameters={"width": 0.4})
    with pytest.raises(triton.InferenceServerException, match="other"):
        client.infer("other", [given])
    client.close()


def test_an_image_file_is_classified(server: Running) -> None:
    reply = server.infer(png(), {"Content-Type": "image/png"}, "?width=0.5")
    assert reply.status == 200
    assert reply.headers["anywidth-width"] == "0.5"
    found = reply.data["outputs"][0]
    pixels = np.full((1, 1, PIXELS, PIXELS), 100 / 255, np.float32)
    expected = server.service.network.run(pixels, width=0.5)
    assert np.allclose(found["data"], expected.reshape(-1), atol=1e-6)
    assert reply.data["parameters"]["width"] == 0.5


@pytest.mark.parametrize(("mode", "level"), [("RGB", 100), ("RGBA", 100), ("I;16", 100 * 257)])
def test_images_of_other_kinds_and_sizes_are_brought_to_the_networks(
    server: Running, mode: str, level: int
) -> None:
    plain = server.infer(png(), {"Content-Type": "image/png"}, "?width=1.0").data
    reply = server.infer(png((40, 30), mode, level), {"Content-Type": "image/png"}, "?width=1.0")
    assert reply.status == 200, reply.body
    assert np.allclose(reply.data["outputs"][0]["data"], plain["outputs"][0]["data"], atol=1e-5)


@pytest.mark.parametrize(
    ("body", "headers", "query", "status", "named"),
    [
        (b"no image", {"Content-Type": "image/png"}, "", 400, "image"),
        (png()[:40], {"Content-Type": "image/png"}, "", 400, "image"),
        (png((200, 200)), {"Content-Type": "image/png"}, "", 413, "pixels"),
        (png(), {"Content-Type": "image/png"}, "?width=0.3", 400, "0.25 and 0.5"),
        (png(), {"Content-Type": "image/png"}, "?deadline_ms=soon", 400, "soon"),
        (png(), {"Content-Type": "image/png"}, "?size=3", 400, "size"),
        (b"x" * 100_001, {}, "", 413, "most-body"),
        (b"{}", {}, "", 400, "inputs"),
        (b"{}", {"Inference-Header-Content-Length": "two"}, "", 400, "two"),
        (asked(np.zeros((1, 1, 5, 5))), {}, "", 400, "shape"),
        (asked(np.zeros((0, 1, PIXELS, PIXELS))), {}, "", 400, "nothing"),
    ],
)
def test_what_is_wrong_is_answered_in_a_sentence(
    server: Running, body: Any, headers: dict[str, str], query: str, status: int, named: str
) -> None:
    reply = server.infer(body, headers, query)
    assert reply.status == status
    assert named in reply.data["error"]


def test_a_body_without_a_length_is_bounded_too(server: Running) -> None:
    chunks = (b"x" * 10_000 for _ in range(30))
    reply = server.infer(chunks)
    assert reply.status == 413
    assert server.get("/v2/health/ready").status == 200


def test_addresses_that_are_not_there(server: Running) -> None:
    assert server.get("/v2/models/net/versions/2").status == 404
    assert server.get("/nothing").status == 404
    assert server.request("DELETE", "/v2/models/net").status == 405
    for path in ("/page/files/..%2f__init__.py", "/page/files/../../errors.py"):
        assert server.get(path).status == 404


@pytest.mark.parametrize("kind", [MemoryError, TimeoutError])
def test_a_network_that_fails_is_a_500_without_details(
    kind: type[Exception], bundle: Path, images: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*arrays: Any, width: float) -> None:
        raise kind("details")

    with served(bundle) as running:
        monkeypatch.setattr(running.service.network, "run", broken)
        reply = running.infer(asked(images))
        assert reply.status == 500
        assert b"details" not in reply.body
        assert running.get("/v2/health/ready").status == 200
        assert (
            'anywidth_requests_total{outcome="failed"} 1.0' in running.get("/metrics").body.decode()
        )


def test_a_full_queue_is_a_503_and_loses_nothing(
    bundle: Path, images: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    with served(bundle, most_waiting=2, deadline_ms=60_000) as running:
        network, may_run, runs = running.service.network, threading.Event(), threading.Event()
        plain = network.run

        def held(*arrays: Any, width: float) -> Any:
            runs.set()
            assert may_run.wait(HANGS_AFTER)
            return plain(*arrays, width=width)

        monkeypatch.setattr(network, "run", held)
        statuses: list[int] = []
        threads = [
            threading.Thread(target=lambda: statuses.append(running.infer(asked(images)).status))
            for _ in range(3)
        ]
        threads[0].start()
        assert runs.wait(HANGS_AFTER)
        for thread in threads[1:]:
            thread.start()
        while running.service.scheduler.waiting < 2:
            pass
        refused = running.infer(asked(images))
        assert refused.status == 503
        assert refused.headers["retry-after"] == "1"
        late = 'anywidth_requests_total{outcome="refused"} 1.0'
        assert late in running.get("/metrics").body.decode()
        may_run.set()
        for thread in threads:
            thread.join(HANGS_AFTER)
        assert statuses == [200, 200, 200]


def test_a_request_that_cannot_be_in_time_is_a_503(server: Running, images: np.ndarray) -> None:
    reply = server.infer(asked(images, deadline_ms=1e-6))
    assert reply.status == 503
    assert "1e-06 ms" in reply.data["error"]


def test_a_picture_that_is_late_already_is_not_decoded(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    takes = server.service.picture_input
    assert takes is not None
    decoded: list[bytes] = []
    monkeypatch.setattr(type(takes), "read", lambda self, file, most: decoded.append(file))
    request = InferenceRequest(files={takes.name: [png()]}, parameters=Parameters(deadline_ms=50.0))
    since = server.service.scheduler.clock() - 1.0
    with pytest.raises(TooLate, match="deadline"):
        asyncio.run(server.service.infer(request, since))
    assert not decoded


def test_late_answers_if_told_so(bundle: Path, images: np.ndarray) -> None:
    with served(bundle, late="answer") as running:
        reply = running.infer(asked(images, deadline_ms=1e-6))
        assert reply.status == 200
        assert reply.data["parameters"]["in_time"] is False


def test_a_token_is_asked_for(bundle: Path, images: np.ndarray) -> None:
    with served(bundle, token="a secret") as running:
        with_token = {"Authorization": "Bearer a secret"}
        assert running.infer(asked(images)).status == 401
        assert running.infer(asked(images), {"Authorization": "Bearer wrong"}).status == 401
        assert running.infer(asked(images), with_token).status == 200
        for path in ("/metrics", "/v2/models/net", "/page/about"):
            assert running.get(path).status == 401
            assert running.get(path, with_token).status == 200
        for path in ("/v2/health/live", "/v2/health/ready", "/"):
            assert running.get(path).status == 200


def test_metrics_count_what_was_served(bundle: Path, images: np.ndarray) -> None:
    with served(bundle) as running:
        running.infer(asked(images, width=0.5))
        running.infer(asked(images, width=0.5))
        running.infer(asked(images, deadline_ms=1e-6))
        running.infer(b"{}")
        text = running.get("/metrics").body.decode()
    for line in (
        'anywidth_requests_total{outcome="answered"} 2.0',
        'anywidth_requests_total{outcome="dropped"} 1.0',
        'anywidth_requests_total{outcome="wrong"} 1.0',
        'anywidth_width_served_total{width="0.5"} 2.0',
        "anywidth_request_seconds_count 2.0",
        "anywidth_requests_waiting 0.0",
    ):
        assert line in text


def test_openapi_describes_the_addresses(server: Running) -> None:
    schema = server.get("/openapi.json").data
    assert set(schema["paths"]) == {
        "/v2",
        "/v2/health/live",
        "/v2/health/ready",
        "/v2/models/{model}",
        "/v2/models/{model}/ready",
        "/v2/models/{model}/infer",
        "/metrics",
    }
    infer = schema["paths"]["/v2/models/{model}/infer"]["post"]
    assert {"400", "413", "503"} <= set(infer["responses"])
    assert "image/*" in infer["requestBody"]["content"]


def test_many_clients_at_once_get_their_own_answers(server: Running) -> None:
    """Each sends images of its own; no answer goes to another."""
    draw = np.random.default_rng(1)
    sent = [draw.random((1, 1, PIXELS, PIXELS), np.float32) for _ in range(8)]
    expected = [server.service.network.run(one, width=1.0).reshape(-1) for one in sent]
    wrong: list[int] = []

    def ask(number: int) -> None:
        for _ in range(10):
            reply = server.infer(json.dumps(asked(sent[number], width=1.0)))
            if not np.allclose(reply.data["outputs"][0]["data"], expected[number], atol=1e-6):
                wrong.append(number)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(HANGS_AFTER)
    assert not wrong


def test_the_load_of_the_page_ends_with_the_server(bundle: Path) -> None:
    service = Service(anywidth_runtime.open(bundle), Settings(workers=1))

    async def work() -> None:
        load = Load(service)
        await load.ask(per_second=500, deadline_ms=1000)
        await asyncio.sleep(0.02)
        service.close()
        assert load._task is not None
        await asyncio.wait_for(load._task, HANGS_AFTER)
        assert load.per_second == 0

    asyncio.run(work())
