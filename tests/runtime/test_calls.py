"""Calls that could be answered wrongly: odd widths, contradicting inputs, a file that changes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import anywidth_runtime
import numpy as np
import pytest
from anywidth_runtime import BundleError, Network, RequestError
from handmade import INPUTS, Handmade
from onnx import TensorProto, helper, numpy_helper

X = np.random.default_rng(1).standard_normal((5, INPUTS)).astype(np.float32)


@pytest.mark.parametrize(
    ("width", "same"),
    [(1, 1.0), (np.float32(0.3), 0.3), (np.array(0.3), 0.3), (np.int64(1), 1.0)],
    ids=repr,
)
def test_any_kind_of_number_is_a_width(tmp_path: Path, width: Any, same: float) -> None:
    made = Handmade()
    made.about["widths"][0]["width"] = 0.3
    net = anywidth_runtime.open(made.write(tmp_path))
    assert net.resolve(width) == same
    np.testing.assert_array_equal(net.run(X, width=width), net.run(X, width=same))


@pytest.mark.parametrize(
    "width", [True, np.True_, "1.0", None, [1.0], {}, np.array([1.0]), float("nan")], ids=repr
)
def test_other_things_are_no_widths(tmp_path: Path, width: Any) -> None:
    with pytest.raises(RequestError, match=r"is not in net\.anywidth"):
        anywidth_runtime.open(Handmade().write(tmp_path)).run(X, width=width)


@pytest.mark.parametrize("dtype", [np.float16, np.float64, np.int32, ">f4", object], ids=str)
def test_an_array_of_another_type_is_refused(tmp_path: Path, dtype: Any) -> None:
    with pytest.raises(RequestError, match="expected float32"):
        anywidth_runtime.open(Handmade().write(tmp_path)).run(X.astype(dtype), width=0.5)


def test_a_masked_array_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="masked"):
        anywidth_runtime.open(Handmade().write(tmp_path)).run(np.ma.masked_less(X, 0), width=0.5)


@pytest.mark.parametrize(
    "array",
    [np.asfortranarray(X), np.repeat(X, 2, 0)[::2], X[::-1][::-1], np.repeat(X, 2, 1)[:, ::2]],
    ids=["fortran", "rows", "backwards", "columns"],
)
def test_the_layout_of_an_array_does_not_matter(tmp_path: Path, array: np.ndarray) -> None:
    made = Handmade()
    found = anywidth_runtime.open(made.write(tmp_path)).run(array, width=0.5)
    np.testing.assert_allclose(found, made.expected(X, 0.5), rtol=1e-5)


def lookup(folder: Path) -> Network:
    """A network of two inputs that share their batch; one has the rows of a table."""
    made = Handmade()
    given = [
        helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", INPUTS]),
        helper.make_tensor_value_info("row", TensorProto.INT64, ["batch"]),
    ]
    table = numpy_helper.from_array(np.ones((10, 3), np.float32), "table")
    for proto in made.graphs:
        graph = proto.graph
        del graph.input[:]
        graph.input.extend(given)
        graph.initializer.append(table)
        graph.node[-1].output[0] = "z"
        graph.node.append(helper.make_node("Gather", ["table", "row"], ["rows"]))
        graph.node.append(helper.make_node("Add", ["z", "rows"], ["y"]))
    row = {"name": "row", "dtype": "int64", "shape": ["batch"], "example": [1]}
    made.about["inputs"].append(row)
    return anywidth_runtime.open(made.write(folder))


@pytest.mark.parametrize("count", [1, 3])
def test_inputs_that_share_an_axis_have_it_in_one_size(tmp_path: Path, count: int) -> None:
    """A batch of one beside a batch of five would be answered: it is spread over the other."""
    net = lookup(tmp_path)
    with pytest.raises(RequestError, match=f"'row' has {count} .*'batch'.* 'x' has 5"):
        net.run(X, np.zeros(count, np.int64), width=0.5)
    assert net.run(X, np.zeros(5, np.int64), width=0.5).shape == (5, 3)


def test_values_that_a_network_cannot_take_are_an_error_of_the_call(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"width 0\.5 .* out of data bounds"):
        lookup(tmp_path).run(X, np.full(5, 10), width=0.5)


def test_a_file_that_another_replaces_stays_open(tmp_path: Path) -> None:
    made, other = Handmade(), Handmade()
    other.first = other.first + 1
    net = anywidth_runtime.open(made.write(tmp_path))
    (tmp_path / "new").mkdir()
    os.replace(other.write(tmp_path / "new"), net.path)
    np.testing.assert_allclose(net.run(X, width=0.5), made.expected(X, 0.5), rtol=1e-5)


def test_a_file_that_is_written_into_is_noticed(tmp_path: Path) -> None:
    made, other = Handmade(), Handmade()
    other.about["takes"] = "other numbers"
    net = anywidth_runtime.open(made.write(tmp_path))
    other.write(tmp_path)
    with pytest.raises(BundleError, match="open it again"):
        net.run(X, width=0.5)
