"""Requests and answers of the Open Inference Protocol."""

from __future__ import annotations

import contextlib
import json
import math
from typing import Any

import numpy as np
import pytest
from anywidth_runtime.errors import RequestError
from anywidth_runtime.server.inference_protocol import (
    Elements,
    Wanted,
    read_parameters,
    read_request,
    write_answer,
)
from hypothesis import given
from hypothesis import strategies as st

TWO = {"name": "x", "shape": [2], "datatype": "FP32", "data": [1, 2.5]}


def asked(*inputs: Any, **more: Any) -> bytes:
    return json.dumps({"inputs": list(inputs), **more}).encode()


def test_numbers_in_json() -> None:
    nested = {"name": "y", "shape": [2, 1], "datatype": "INT64", "data": [[1], [2]]}
    request = read_request(asked(TWO, nested, id="7", parameters={"width": 0.5}), None)
    assert request.tensors["x"].dtype == np.float32
    assert request.tensors["x"].tolist() == [1, 2.5]
    assert request.tensors["y"].tolist() == [[1], [2]]
    assert (request.id, request.parameters.width, request.parameters.deadline_ms) == (
        "7",
        0.5,
        None,
    )


def test_tensors_after_the_json() -> None:
    first, second = np.arange(6, dtype=np.float32), np.arange(2, dtype=np.uint8)
    header = asked(
        {"name": "x", "shape": [2, 3], "datatype": "FP32", "parameters": {"binary_data_size": 24}},
        {"name": "y", "shape": [2], "datatype": "UINT8", "parameters": {"binary_data_size": 2}},
    )
    request = read_request(header + first.tobytes() + second.tobytes(), len(header))
    assert np.array_equal(request.tensors["x"], first.reshape(2, 3))
    assert np.array_equal(request.tensors["y"], second)


def test_image_files_as_bytes_or_base64() -> None:
    header = asked(
        {"name": "x", "shape": [2], "datatype": "BYTES", "parameters": {"binary_data_size": 13}}
    )
    body = header + b"\x03\0\0\0abc\x02\0\0\0de"
    assert read_request(body, len(header)).files == {"x": [b"abc", b"de"]}
    text = {"name": "x", "shape": [1], "datatype": "BYTES", "data": ["YWJj"]}
    assert read_request(asked(text), None).files == {"x": [b"abc"]}


def test_outputs_that_are_asked_for() -> None:
    request = read_request(
        asked(
            TWO,
            parameters={"binary_data_output": True, "deadline_ms": 20},
            outputs=[
                {"name": "a"},
                {"name": "b", "parameters": {"binary_data": False, "classification": 3}},
                {"name": "c", "parameters": {"encoding": "png"}},
            ],
        ),
        None,
    )
    assert request.outputs == (
        Wanted("a", True),
        Wanted("b", False, 3),
        Wanted("c", True, 0, "png"),
    )
    assert request.parameters.binary_data_output
    assert request.parameters.deadline_ms == 20


@pytest.mark.parametrize(
    ("body", "named"),
    [
        (b"no json", "JSON"),
        (b"[" * 100_000, "JSON"),
        (b"[]", "object"),
        (b"{}", "inputs"),
        (asked(), "inputs"),
        (asked(TWO, TWO), "two inputs"),
        (asked(3), "object"),
        (asked({**TWO, "name": 3}), "name"),
        (asked({**TWO, "shape": [3]}), "shape"),
        (asked({**TWO, "shape": [-2]}), "shape"),
        (asked({**TWO, "shape": [2**40]}), "shape"),
        (asked({**TWO, "shape": "2"}), "shape"),
        (asked({**TWO, "datatype": "FLOAT"}), "FLOAT"),
        (asked({**TWO, "data": ["a", "b"]}), "numbers"),
        (asked({**TWO, "data": [[1], [2, 3]]}), "numbers"),
        (asked({**TWO, "datatype": "INT8", "data": [1, 300]}), "int8"),
        (asked({**TWO, "datatype": "INT8", "data": [1, 1.5]}), "int8"),
        (asked({"name": "x", "shape": [1], "datatype": "FP32"}), "binary_data_size"),
        (asked({**TWO, "parameters": {"binary_data_size": 8}}), "binary_data_size"),
        (asked({**TWO, "parameters": {"binary_data_size": -1}}), "binary_data_size"),
        (asked({**TWO, "datatype": "BYTES", "data": ["%%", "a"]}), "base64"),
        (asked({**TWO, "datatype": "BYTES", "data": {"YQ==": 1, "Yg==": 2}}), "base64"),
        (asked(TWO, outputs=[{"name": "a", "parameters": {"encoding": "gif"}}]), "gif"),
        (asked(TWO, outputs=[{"name": "a", "parameters": {"classification": -1}}]), "-1"),
        (asked(TWO, parameters={"binary_data_output": 1}), "binary_data_output"),
        (asked(TWO, width=0.5), "width"),
    ],
)
def test_what_is_wrong_is_named(body: bytes, named: str) -> None:
    with pytest.raises(RequestError, match=named):
        read_request(body, None)


@pytest.mark.parametrize("length", [-1, 10_000])
def test_a_wrong_json_length_is_named(length: int) -> None:
    with pytest.raises(RequestError, match="Content-Length"):
        read_request(asked(TWO), length)


def test_bytes_left_over_and_elements_cut_short_are_named() -> None:
    header = asked(TWO)
    with pytest.raises(RequestError, match="left over"):
        read_request(header + b"abc", len(header))
    header = asked(
        {"name": "x", "shape": [1], "datatype": "BYTES", "parameters": {"binary_data_size": 6}}
    )
    with pytest.raises(RequestError, match="element 0"):
        read_request(header + b"\xff\0\0\0ab", len(header))


@pytest.mark.parametrize(
    ("given_", "found"),
    [
        ({"width": "0.5"}, {"width": 0.5}),
        ({"width": "nonuniform 1"}, {"width": "nonuniform 1"}),
        ({"deadline_ms": "20"}, {"deadline_ms": 20.0}),
    ],
)
def test_parameters_of_an_address_are_text(given_: dict[str, Any], found: dict[str, Any]) -> None:
    assert read_parameters(given_).model_dump(exclude_unset=True) == found


@pytest.mark.parametrize("bad", [0, -1, "soon", math.nan, math.inf, True, None, [1]])
def test_a_wrong_deadline_is_named(bad: Any) -> None:
    with pytest.raises(RequestError, match="deadline_ms"):
        read_parameters({"deadline_ms": bad})


@given(st.binary(max_size=400), st.none() | st.integers(-10, 500))
def test_any_bytes_are_refused_in_a_sentence(body: bytes, length: int | None) -> None:
    with pytest.raises(RequestError):
        read_request(body, length)


scalars = st.none() | st.booleans() | st.integers(-5, 2**40) | st.floats() | st.text(max_size=5)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=8,
)
fields = ("name", "shape", "datatype", "data", "parameters")


@given(
    st.fixed_dictionaries({}, optional=dict.fromkeys(fields, values)),
    st.fixed_dictionaries({}, optional=dict.fromkeys(("outputs", "parameters", "id"), values)),
)
def test_any_json_is_read_or_refused(changes: dict[str, Any], more: dict[str, Any]) -> None:
    body = json.dumps({"inputs": [{**TWO, **changes}], **more}).encode()
    with contextlib.suppress(RequestError):
        read_request(body, None)


def test_answers_in_json_and_in_bytes() -> None:
    logits = np.array([[1.5, -2]], np.float32)
    plain = write_answer("net", [(Wanted("logits"), logits)], {"width": 0.5}, "7")
    assert plain.json_length is None
    assert json.loads(plain.body) == {
        "model_name": "net",
        "model_version": "1",
        "id": "7",
        "parameters": {"width": 0.5},
        "outputs": [{"name": "logits", "datatype": "FP32", "shape": [1, 2], "data": [1.5, -2.0]}],
    }
    both = [(Wanted("logits", True), logits), (Wanted("files", True), Elements([b"ab"], (1,)))]
    binary = write_answer("net", both, {})
    assert binary.json_length is not None
    header = json.loads(binary.body[: binary.json_length])
    assert [one["parameters"]["binary_data_size"] for one in header["outputs"]] == [8, 6]
    assert binary.body[binary.json_length :] == logits.tobytes() + b"\x02\0\0\0ab"


def test_numbers_that_json_lacks_are_null() -> None:
    odd = np.array([1, np.nan, np.inf], np.float32)
    answer = write_answer("net", [(Wanted("y"), odd)], {})
    assert json.loads(answer.body)["outputs"][0]["data"] == [1.0, None, None]


def test_files_in_json_are_base64_and_texts_are_not() -> None:
    outputs = [
        (Wanted("image", encoding="png"), Elements([b"\x89PNG"], (1,))),
        (Wanted("classes", classes=1), Elements([b"0.5:1:boot"], (1, 1))),
    ]
    found = json.loads(write_answer("net", outputs, {}).body)["outputs"]
    assert [one["data"] for one in found] == [["iVBORw=="], ["0.5:1:boot"]]
