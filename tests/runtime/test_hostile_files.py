"""Files that are damaged or made to harm: each is refused with one sentence that names it."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anywidth_runtime
import numpy as np
import pytest
from anywidth_runtime import BundleError
from anywidth_runtime.bundle_file import encode_bundle
from handmade import INPUTS, WIDTHS, Handmade, outside
from onnx import NodeProto, SparseTensorProto, TensorProto, helper, numpy_helper

X = np.random.default_rng(1).standard_normal((5, INPUTS)).astype(np.float32)


def refusal(path: Path) -> str:
    """What opening the file, or running one of its widths, says."""
    with pytest.raises(BundleError) as error:
        anywidth_runtime.open(path).prepare()
    message = str(error.value)
    assert message.startswith(str(path))
    assert "\n" not in message
    assert len(message) < 500 + len(str(path))
    return message


def test_a_whole_file_runs(tmp_path: Path) -> None:
    made = Handmade()
    net = anywidth_runtime.open(made.write(tmp_path))
    for width in WIDTHS:
        np.testing.assert_allclose(net.run(X, width=width), made.expected(X, width), rtol=1e-5)


# ---- damage --------------------------------------------------------------------------------------


def test_a_file_cut_off_anywhere_is_refused(tmp_path: Path) -> None:
    path = Handmade().write(tmp_path)
    whole = path.read_bytes()
    for length in [*range(0, len(whole), 97), len(whole) - 1]:
        path.write_bytes(whole[:length])
        refusal(path)
    path.write_bytes(whole + b"\0")
    assert "appended" in refusal(path)


def test_any_changed_byte_is_noticed(tmp_path: Path) -> None:
    path = Handmade().write(tmp_path)
    whole = path.read_bytes()
    chance = np.random.default_rng(0)
    for place in chance.integers(0, len(whole), 300):
        changed = bytearray(whole)
        changed[place] ^= int(chance.integers(1, 256))
        path.write_bytes(changed)
        try:
            net = anywidth_runtime.open(path)
        except BundleError:
            continue
        # Blanks in the header may change and mean the same.
        np.testing.assert_allclose(net.run(X, width=0.5), Handmade().expected(X, 0.5), rtol=1e-5)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{}",
        b"\xff" * 7 + b"\x7f{" + b"a" * 100,
        (2**40).to_bytes(8, "little") + b"{" + b" " * 100,
        (100_000).to_bytes(8, "little") + b'{"a":' + b"[" * 99_995,
        (12).to_bytes(8, "little") + b'{"a":{"b":1}',
        (2).to_bytes(8, "little") + b"{}",
        pickle.dumps({"weights": [1.0]}),
        b"PK\x03\x04" + b"\0" * 100,
    ],
)
def test_other_files_are_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "net.anywidth"
    path.write_bytes(content)
    refusal(path)


def test_missing_files_and_folders_are_refused(tmp_path: Path) -> None:
    refusal(tmp_path / "nowhere.anywidth")
    refusal(tmp_path)


def test_files_of_another_version_are_named(tmp_path: Path) -> None:
    path = Handmade().write(tmp_path)
    newer = path.read_bytes().replace(b'"anywidth.bundle":"1 ', b'"anywidth.bundle":"9 ')
    path.write_bytes(newer)
    assert "version 9" in refusal(path)


# ---- weights -------------------------------------------------------------------------------------

CUTS: list[Any] = [
    [[0, 5], [4, 0]], [[0, 4], [3, 1]], [[4, 1], [0, 1]], [[-1, 4]], [[0, 9]], [[0, 10**30]],
    [], [[0.0, 4]], [[True, 4]], "all", [[0, 4, 1]], [[[0]]], {"0": 4}, None,
]  # fmt: skip
PIECES: list[dict[str, Any]] = [
    *({"cuts": [cut, None]} for cut in CUTS),
    {"cuts": [None]},
    {"cuts": [None, None, None]},
    {"weight": "c"},
    {"weight": ["a"]},
    {"order": [0, 0]},
    {"order": [1, -2]},
    {"order": ["1", "0"]},
    {"scale": [0, 2]},
    {"scale": [0, -1]},
    {"scale": [2, 0]},
    {"scale": [0]},
    {"scale": [0, 10**30]},
    {"scale": "all"},
]


@pytest.mark.parametrize("change", PIECES, ids=str)
def test_weights_that_cannot_be_cut_so_are_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    made = Handmade()
    made.pieces[1]["first"] |= change
    refusal(made.write(tmp_path))


def other_shape(made: Handmade) -> None:
    made.graphs[1].graph.initializer[0].dims[0] = 5


def huge_shape(made: Handmade) -> None:
    made.graphs[1].graph.initializer[0].dims[:] = [2**40, 2**40]


def negative_shape(made: Handmade) -> None:
    made.graphs[1].graph.initializer[0].dims[0] = -4


def other_type(made: Handmade) -> None:
    made.graphs[1].graph.initializer[0].data_type = TensorProto.INT32


def odd_type(made: Handmade) -> None:
    made.graphs[1].graph.initializer[0].data_type = TensorProto.STRING


def a_weight_that_nobody_cuts(made: Handmade) -> None:
    made.graphs[1].graph.initializer.append(outside("third", [4]))


def a_cut_that_nobody_wants(made: Handmade) -> None:
    made.pieces[1]["third"] = made.pieces[1]["first"]


def smaller_weight(made: Handmade) -> None:
    made.first = made.first[:6]


def weight_of_another_type(made: Handmade) -> None:
    made.first = made.first.astype(np.float64)


def no_scales(made: Handmade) -> None:
    made.scales[1] = made.scales[1][:0]


def scales_of_another_type(made: Handmade) -> None:
    made.scales[1] = made.scales[1].astype(np.int64)


def pieces_that_are_no_json(made: Handmade) -> None:
    made.pieces[1] = "[" * 100_000  # type: ignore[call-overload]


# ---- graphs --------------------------------------------------------------------------------------


def a_path_to_another_file(made: Handmade) -> None:
    made.graphs[1].graph.initializer[0].external_data[0].value = "/etc/passwd"


def a_path_out_of_the_folder(made: Handmade) -> None:
    made.graphs[1].graph.initializer[0].external_data[0].value = "../weights"


def an_address_in_memory(made: Handmade) -> None:
    made.graphs[1].graph.initializer[0].external_data[0].value = "*/_ORT_MEM_ADDR_/*"


def a_second_path(made: Handmade) -> None:
    entry = made.graphs[1].graph.initializer[0].external_data.add()
    entry.key, entry.value = "location", "/etc/passwd"


def an_offset(made: Handmade) -> None:
    entry = made.graphs[1].graph.initializer[0].external_data.add()
    entry.key, entry.value = "offset", "4096"


def a_path_without_the_mark(made: Handmade) -> None:
    made.graphs[1].graph.initializer[0].data_location = TensorProto.DEFAULT


def a_path_in_an_attribute(made: Handmade) -> None:
    node = helper.make_node("Constant", [], ["c"], value=outside("v", [4], "/etc/passwd"))
    made.graphs[1].graph.node.insert(0, node)


def our_own_mark_in_an_attribute(made: Handmade) -> None:
    node = helper.make_node("Constant", [], ["c"], value=outside("v", [4]))
    made.graphs[1].graph.node.insert(0, node)


def branch(tensor: TensorProto) -> NodeProto:
    value = helper.make_tensor_value_info("v", TensorProto.FLOAT, [4])
    inner = helper.make_graph([], "inner", [], [value], [tensor])
    return helper.make_node("If", ["yes"], ["i"], then_branch=inner, else_branch=inner)


def a_path_in_a_branch(made: Handmade) -> None:
    graph = made.graphs[1].graph
    graph.initializer.append(numpy_helper.from_array(np.array(True), "yes"))
    graph.node.insert(0, branch(outside("v", [4], "/etc/passwd")))


def branches_without_end(made: Handmade) -> None:
    last = branch(numpy_helper.from_array(np.zeros(4, np.float32), "v"))
    node, plain = last, last.attribute[0].g
    for _ in range(20):
        inner = helper.make_graph([node], "inner", [], list(plain.output))
        node = helper.make_node("If", ["yes"], ["i"], then_branch=inner, else_branch=plain)
    made.graphs[1].graph.node.insert(0, node)


def an_operator_of_another_library(made: Handmade) -> None:
    made.graphs[1].graph.node[1].domain = "com.microsoft"


def a_function(made: Handmade) -> None:
    imports = [helper.make_opsetid("", 20)]
    function = helper.make_function("own", "F", ["a"], ["b"], [], imports)
    made.graphs[1].functions.append(function)


def a_sparse_weight(made: Handmade) -> None:
    made.graphs[1].graph.sparse_initializer.append(SparseTensorProto(dims=[4]))


def training_steps(made: Handmade) -> None:
    made.graphs[1].training_info.add()


def an_unknown_operator(made: Handmade) -> None:
    made.graphs[1].graph.node[1].op_type = "Detonate"


def nodes_that_do_not_fit(made: Handmade) -> None:
    made.graphs[1].graph.node[2].input[0] = "nothing"


def other_inputs(made: Handmade) -> None:
    made.graphs[1].graph.input[0].name = "z"
    made.graphs[1].graph.node[0].input[0] = "z"


def two_weights_of_a_name(made: Handmade) -> None:
    made.graphs[1].graph.initializer.append(outside("first", [INPUTS, 4]))


# ---- tables --------------------------------------------------------------------------------------


def of_row(number: int, **values: Any) -> Callable[[Handmade], None]:
    def change(made: Handmade) -> None:
        made.about["widths"][number] |= values

    change.__name__ = f"row_{values}"
    return change


def of_about(**values: Any) -> Callable[[Handmade], None]:
    def change(made: Handmade) -> None:
        made.about |= values

    change.__name__ = f"about_{values}"
    return change


def swapped_widths(made: Handmade) -> None:
    rows = made.about["widths"]
    rows[0]["variant"], rows[2]["variant"] = rows[2]["variant"], rows[0]["variant"]


def costs_in_disorder(made: Handmade) -> None:
    made.about["widths"].reverse()


def narrow_and_dear(made: Handmade) -> None:
    rows = made.about["widths"]
    rows[0]["width"], rows[2]["width"] = rows[2]["width"], rows[0]["width"]


def a_graph_too_few(made: Handmade) -> None:
    del made.graphs[2], made.pieces[2], made.scales[2]


def a_graph_too_many(made: Handmade) -> None:
    del made.about["widths"][2]


INPUT = {"name": "x", "dtype": "float32", "shape": ["batch", 4], "example": [1, 4]}
LIES = [
    of_row(1, width=0.25), of_row(1, width=0), of_row(1, width=-0.5), of_row(1, width=1.5),
    of_row(1, width=float("nan")), of_row(1, width=None), of_row(1, width=[0.5]),
    of_row(1, variant=3), of_row(1, variant=-1), of_row(1, variant=0.5), of_row(2, variant=1),
    of_row(1, macs=-1), of_row(1, macs=1e9), of_row(1, macs="many"), of_row(1, macs=10**30),
    of_row(1, latency_ms=0), of_row(1, latency_ms=-1), of_row(1, latency_ms=float("inf")),
    of_row(1, accuracy="good"), of_row(1, accuracy=float("nan")), of_row(1, metrics=[1]),
    of_about(widths=[]), of_about(widths=None), of_about(inputs=[]), of_about(outputs=[]),
    of_about(inputs=[INPUT, INPUT]), of_about(inputs=[INPUT | {"dtype": "object"}]),
    of_about(inputs=[INPUT | {"dtype": ["float32"]}]), of_about(inputs=[INPUT | {"name": 1}]),
    of_about(inputs=[INPUT | {"example": [1, 5]}]), of_about(inputs=[INPUT | {"example": [1]}]),
    of_about(inputs=[INPUT | {"example": [2**40, 4]}]), of_about(facts=1), of_about(machine=[]),
    of_about(classes=1), swapped_widths, costs_in_disorder, narrow_and_dear, a_graph_too_few,
    a_graph_too_many,
]  # fmt: skip
WRONG_WEIGHTS = [
    other_shape, huge_shape, negative_shape, other_type, odd_type, a_weight_that_nobody_cuts,
    a_cut_that_nobody_wants, smaller_weight, weight_of_another_type, no_scales,
    scales_of_another_type, pieces_that_are_no_json,
]  # fmt: skip
HOSTILE_GRAPHS = [
    a_path_to_another_file, a_path_out_of_the_folder, an_address_in_memory, a_second_path,
    an_offset, a_path_without_the_mark, a_path_in_an_attribute, our_own_mark_in_an_attribute,
    a_path_in_a_branch, branches_without_end, an_operator_of_another_library, a_function,
    a_sparse_weight, training_steps, an_unknown_operator, nodes_that_do_not_fit, other_inputs,
    two_weights_of_a_name,
]  # fmt: skip


EVERYTHING = [*WRONG_WEIGHTS, *HOSTILE_GRAPHS, *LIES]


@pytest.mark.parametrize("change", EVERYTHING, ids=lambda change: change.__name__)
def test_what_does_not_fit_is_refused(tmp_path: Path, change: Callable[[Handmade], None]) -> None:
    made = Handmade()
    change(made)
    refusal(made.write(tmp_path))


@pytest.mark.parametrize("name", ["graph/1", "pieces/1", "scales/1", "weight/a"])
def test_missing_parts_are_refused(tmp_path: Path, name: str) -> None:
    made = Handmade()
    tensors = made.tensors()
    del tensors[name]
    path = tmp_path / "net.anywidth"
    path.write_bytes(encode_bundle(tensors, made.about))
    refusal(path)


def test_other_files_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """onnxruntime alone would read a file named `weights` in the present folder."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "weights").write_bytes(np.full(1000, 1e9, np.float32).tobytes())
    made = Handmade()
    net = anywidth_runtime.open(made.write(tmp_path))
    np.testing.assert_allclose(net.run(X, width=0.5), made.expected(X, 0.5), rtol=1e-5)


def test_a_lying_record_of_latency_is_not_believed(tmp_path: Path) -> None:
    path = Handmade().write(tmp_path)
    net = anywidth_runtime.open(path)
    net.measure(repeats=1, progress=False)
    kept = path.with_name("net.anywidth.latency.json")
    good = json.loads(kept.read_text())
    assert anywidth_runtime.open(path).is_measured
    for lie in (
        {"milliseconds": [[0.25, -1], [0.5, 1], [1.0, 1]]},
        {"milliseconds": [[0.25, 1]]},
        {"milliseconds": {"0.25": 1}},
        {"bundle": "0"},
        {"machine": {}},
        {"version": 2},
    ):
        kept.write_text(json.dumps({**good, **lie}))
        assert not anywidth_runtime.open(path).is_measured
    kept.write_text("{")
    assert not anywidth_runtime.open(path).is_measured


FUZZ = """
import sys
import numpy as np
sys.path[:0] = sys.argv[3:]
import anywidth_runtime
from pathlib import Path
from anywidth_runtime import BundleError
from anywidth_runtime.bundle_file import encode_bundle
from handmade import Handmade

x = np.zeros((2, 4), np.float32)
made = Handmade()
path = Path(sys.argv[1]) / "net.anywidth"
chance = np.random.default_rng(int(sys.argv[2]))
refused = 0
for _ in range(300):
    tensors = made.tensors()
    name = list(tensors)[chance.integers(len(tensors))]
    content = bytearray(tensors[name].tobytes())
    for _ in range(chance.integers(1, 4)):
        if len(content) <= 8:
            break
        place = chance.integers(len(content) - 8)
        kind = chance.integers(3)
        if kind == 0:
            content[place] ^= 1 << chance.integers(8)
        elif kind == 1:
            content[place] = chance.integers(256)
        else:
            del content[place : place + chance.integers(1, 8)]
    if name[0] in "gp":
        tensors[name] = np.frombuffer(bytes(content), np.uint8)
    else:
        tensors[name] = np.frombuffer(bytes(content[: len(content) // 4 * 4]), np.float32)
    path.write_bytes(encode_bundle(tensors, made.about))
    try:
        net = anywidth_runtime.open(path)
        for width in net.widths:
            net.run(x, width=width)
    except BundleError as error:
        refused += 1
        assert str(error).startswith(str(path)), error
assert refused > 75, refused
"""


@pytest.mark.parametrize("seed", [0, 1])
def test_random_changes_under_a_true_checksum_do_no_harm(tmp_path: Path, seed: int) -> None:
    """They are refused, or give other numbers: no crash, no other error, no endless loop."""
    folders = [str(Path(__file__).parent), str(Path(anywidth_runtime.__file__).parents[1])]
    arguments = [sys.executable, "-c", FUZZ, str(tmp_path), str(seed), *folders]
    done = subprocess.run(arguments, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
