"""Files are whole or not there, and what is not ours is refused by name."""

import contextlib
import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from anywidth.app.runs.training_state import flatten_state, unflatten_state
from anywidth.errors import AnywidthError
from anywidth.files import (
    decode_tensors,
    encode_tensors,
    load_tensors,
    make_folder,
    read_json,
    remove_leftovers,
    save_tensors,
    temporary_path,
    write_atomically,
    write_json,
    write_together,
)


def sample() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {"weight": torch.randn(3, 4), "steps": torch.tensor(7), "empty": torch.empty(0, 2)}


def test_bytes_and_a_writing_function_give_the_same_file(tmp_path: Path) -> None:
    write_atomically(tmp_path / "a", b"content")

    def write(file: BinaryIO) -> None:
        file.write(b"con")
        file.write(b"tent")

    write_atomically(str(tmp_path / "b"), write)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes() == b"content"
    assert sorted(os.listdir(tmp_path)) == ["a", "b"]


def test_a_failing_writer_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    write_atomically(tmp_path / "a", b"old")

    def fail(file: BinaryIO) -> None:
        file.write(b"half of the ne")
        raise RuntimeError("disk full")

    with pytest.raises(RuntimeError, match="full"):
        write_atomically(tmp_path / "a", fail)
    assert (tmp_path / "a").read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["a"]


@pytest.mark.parametrize("kind", ["a folder in its place", "a file as its folder", "no folder"])
def test_what_cannot_be_written_is_named_without_its_temporary_file(
    tmp_path: Path, kind: str
) -> None:
    if kind == "a folder in its place":
        path, reason = tmp_path / "y.gif", "Is a directory"
        path.mkdir()
    elif kind == "a file as its folder":
        (tmp_path / "file").write_bytes(b"")
        path, reason = tmp_path / "file" / "y.gif", "Not a directory"
    else:
        path = tmp_path / "none" / "y.gif"
        reason = f"there is no folder {path.parent}"
    with pytest.raises(AnywidthError) as error:
        write_atomically(path, b"content")
    assert str(error.value) == f"{path}: cannot be written ({reason})"
    assert not list(tmp_path.glob("*.tmp"))


@pytest.mark.skipif(not Path("/proc/self").is_dir(), reason="a folder of Linux")
def test_a_folder_that_takes_no_files_is_not_called_missing() -> None:
    with pytest.raises(AnywidthError, match=r"/proc/x\.png"):
        write_atomically("/proc/x.png", b"content")


def test_files_that_belong_together_all_stay_if_one_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    write_together({first: b"1", second: b"1"})
    synced: list[int] = []

    def fill(descriptor: int) -> None:
        synced.append(descriptor)
        if len(synced) == 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", fill)
    with pytest.raises(AnywidthError, match="No space"):
        write_together({first: b"2", second: b"2"})
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {
        "first": b"1",
        "second": b"1",
    }


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS])
def test_a_full_or_locked_disk_names_the_file(tmp_path: Path, code: int) -> None:
    def refuse(file: BinaryIO) -> None:
        raise OSError(code, os.strerror(code))

    with pytest.raises(AnywidthError) as error:
        write_atomically(tmp_path / "c.png", refuse)
    assert str(error.value) == f"{tmp_path / 'c.png'}: cannot be written ({os.strerror(code)})"
    assert os.listdir(tmp_path) == []


def test_an_error_of_another_file_stays_its_own(tmp_path: Path) -> None:
    def copy(file: BinaryIO) -> None:
        file.write((tmp_path / "source").read_bytes())

    with pytest.raises(FileNotFoundError, match="source"):
        write_atomically(tmp_path / "copy", copy)


def test_a_folder_for_results_is_made_or_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_folder(tmp_path / "new" / "folder")
    make_folder(tmp_path / "new" / "folder")
    (tmp_path / "shirt.png").write_bytes(b"")
    with pytest.raises(AnywidthError, match=r"shirt\.png"):
        make_folder(tmp_path / "shirt.png")
    with pytest.raises(AnywidthError, match="directory"):
        make_folder(tmp_path / "shirt.png" / "in")
    monkeypatch.setattr(os, "access", lambda *arguments: False)
    with pytest.raises(AnywidthError, match="written"):
        make_folder(tmp_path / "new")


def test_a_file_keeps_the_permissions_new_files_get(tmp_path: Path) -> None:
    (tmp_path / "ordinary").write_bytes(b"")
    write_atomically(tmp_path / "atomic", b"")
    assert (tmp_path / "atomic").stat().st_mode == (tmp_path / "ordinary").stat().st_mode


def test_leftovers_are_removed_and_other_files_stay(tmp_path: Path) -> None:
    temporary_path(tmp_path / "model.safetensors").write_bytes(b"half")
    folder = temporary_path(tmp_path / "step-000000001")
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(b"half")
    for name in ("notes.tmp", ".hidden"):
        (tmp_path / name).write_bytes(b"the user's")
    remove_leftovers(tmp_path)
    assert sorted(os.listdir(tmp_path)) == [".hidden", "notes.tmp"]
    remove_leftovers(tmp_path / "not there")


def test_json_round_trip_and_its_errors(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    write_json(path, {"step": 3, "rate": 0.1})
    assert read_json(path) == {"step": 3, "rate": 0.1}
    with pytest.raises(AnywidthError, match="Tensor"):
        write_json(path, {"loss": torch.tensor(1.0)})
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(AnywidthError, match="truncated"):
        read_json(path)
    path.write_text("[1]")
    with pytest.raises(AnywidthError, match="list"):
        read_json(path)
    with pytest.raises(AnywidthError, match="No such file"):
        read_json(tmp_path / "none.json")


@pytest.mark.parametrize(
    "dtype",
    [
        torch.float64,
        torch.float16,
        torch.bfloat16,
        torch.int64,
        torch.int8,
        torch.uint8,
        torch.bool,
    ],
)
def test_tensors_come_back_bit_for_bit(tmp_path: Path, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    given = {"a": (torch.randn(2, 3, 5) * 10).to(dtype), "scalar": torch.ones((), dtype=dtype)}
    save_tensors(tmp_path / "t", given, {"config": json.dumps([1])})
    tensors, metadata = load_tensors(str(tmp_path / "t"))
    assert metadata == {"config": "[1]"}
    assert list(tensors) == list(given)
    for name, tensor in given.items():
        assert tensors[name].dtype == dtype
        assert torch.equal(tensors[name], tensor)


def test_shared_strided_and_parameter_tensors_are_saved_in_full(tmp_path: Path) -> None:
    weight = torch.nn.Parameter(torch.arange(24.0).reshape(2, 3, 2, 2))
    given = {
        "weight": weight,
        "tied": weight,
        "sliced": weight[:1, :2],
        "channels_last": weight.detach().to(memory_format=torch.channels_last),
    }
    save_tensors(tmp_path / "t", given)
    tensors, metadata = load_tensors(tmp_path / "t")
    assert metadata == {}
    assert set(tensors) == set(given)
    for name, tensor in given.items():
        assert torch.equal(tensors[name], tensor)
    tensors["weight"].zero_()
    assert torch.equal(tensors["tied"], weight)


def test_loaded_tensors_do_not_depend_on_the_file(tmp_path: Path) -> None:
    save_tensors(tmp_path / "t", sample())
    tensors, _ = load_tensors(tmp_path / "t")
    (tmp_path / "t").write_bytes(b"")
    tensors["weight"].add_(1)
    assert torch.equal(tensors["weight"], sample()["weight"] + 1)


def test_every_truncation_is_detected() -> None:
    whole = encode_tensors(sample(), {"a": "b"}, Path("model.safetensors"))
    for length in range(len(whole)):
        with pytest.raises(AnywidthError, match=r"model\.safetensors"):
            decode_tensors(whole[:length], Path("model.safetensors"))
    with pytest.raises(AnywidthError, match="truncated"):
        decode_tensors(whole[:-1], Path("model.safetensors"))
    with pytest.raises(AnywidthError, match=r"model\.safetensors"):
        decode_tensors(whole + b"\0", Path("model.safetensors"))


def test_a_changed_bit_never_changes_a_tensor() -> None:
    path = Path("model.safetensors")
    whole = encode_tensors(sample(), {"a": "b"}, path)
    start = 8 + int.from_bytes(whole[:8], "little")
    for place in range(len(whole)):
        damaged = bytearray(whole)
        damaged[place] ^= 1 << place % 8
        if place >= start:
            with pytest.raises(AnywidthError, match="checksum"):
                decode_tensors(bytes(damaged), path)
            continue
        with contextlib.suppress(AnywidthError):  # the name of the checksum itself may be hit
            found, _ = decode_tensors(bytes(damaged), path)
            assert found.keys() == sample().keys()
            assert all(torch.equal(found[name], tensor) for name, tensor in sample().items())


def test_the_same_tensors_and_metadata_are_the_same_bytes() -> None:
    metadata = {"a": "b", "c": "d", "e": "f"}
    assert len({encode_tensors(sample(), metadata, Path("t")) for _ in range(20)}) == 1


def test_files_of_others_have_no_checksum() -> None:
    data = safetensors.torch.save({"a": torch.ones(2)}, {"made": "elsewhere"})
    tensors, metadata = decode_tensors(data, Path("t"))
    assert torch.equal(tensors["a"], torch.ones(2))
    assert metadata == {"made": "elsewhere"}


@given(
    st.binary(max_size=200), st.sampled_from([b"", b"\x40" + b"\0" * 7, b"\x40" + b"\0" * 7 + b"{"])
)
def test_foreign_bytes_raise_only_our_error(data: bytes, start: bytes) -> None:
    with pytest.raises(AnywidthError, match="foreign"):
        decode_tensors(start + data, Path("foreign"))


@pytest.mark.parametrize("header", [b"[]", b'{"a": 1}', b'{"a": {}}', b'{"a": ' * 50, b"{" * 9])
def test_foreign_headers_raise_only_our_error(header: bytes) -> None:
    with pytest.raises(AnywidthError, match="foreign"):
        decode_tensors(len(header).to_bytes(8, "little") + header, Path("foreign"))


@pytest.mark.parametrize("zipped", [True, False])
def test_a_pickle_is_refused_and_never_executed(tmp_path: Path, zipped: bool) -> None:
    path = tmp_path / "model.pt"
    torch.save(sample(), path, _use_new_zipfile_serialization=zipped)
    with pytest.raises(AnywidthError, match="pickle"):
        load_tensors(path)


def test_a_header_whose_length_looks_like_a_pickle_is_read() -> None:
    for padding in range(300):
        data = encode_tensors({"a": torch.ones(1)}, {"p": "x" * padding}, Path("t"))
        assert decode_tensors(data, Path("t"))[1] == {"p": "x" * padding}


def test_what_cannot_be_saved_is_named(tmp_path: Path) -> None:
    path = tmp_path / "t"
    with pytest.raises(AnywidthError, match="'step'"):
        save_tensors(path, {"step": 3})  # type: ignore[dict-item]
    with pytest.raises(AnywidthError, match="to_dense"):
        save_tensors(path, {"s": torch.eye(2).to_sparse()})
    with pytest.raises(AnywidthError, match="complex128"):
        save_tensors(path, {"c": torch.ones(2, dtype=torch.complex128)})
    assert os.listdir(tmp_path) == []


def test_a_missing_file_or_a_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(AnywidthError, match="No such file"):
        load_tensors(tmp_path / "none")
    with pytest.raises(AnywidthError, match="folder"):
        load_tensors(tmp_path)


def assert_same(left: Any, right: Any) -> None:
    """Equal, with equal types, dtypes and memory layouts."""
    assert type(left) is type(right)
    if isinstance(left, Tensor):
        assert left.dtype == right.dtype
        assert left.stride() == right.stride()
        assert torch.equal(left, right)
    elif isinstance(left, dict):
        assert [(type(key), key) for key in left] == [(type(key), key) for key in right]
        for key in left:
            assert_same(left[key], right[key])
    elif isinstance(left, list | tuple):
        assert len(left) == len(right)
        for one, other in zip(left, right, strict=True):
            assert_same(one, other)
    else:
        assert left == right


def through_disk(folder: Path, state: dict[Any, Any]) -> Any:
    tensors, structure = flatten_state(state)
    save_tensors(folder / "state.safetensors", tensors)
    write_json(folder / "state.json", {"optimizer": structure})
    tensors, _ = load_tensors(folder / "state.safetensors")
    return unflatten_state(tensors, read_json(folder / "state.json")["optimizer"])


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=1e-4),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2, amsgrad=True),
    "adam in bfloat16": lambda p: torch.optim.Adam(p, lr=1e-2, betas=(0.8, 0.95)),
    "lbfgs": lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=3),
}


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_optimizer_state_is_exact_and_training_continues_identically(
    tmp_path: Path, kind: str
) -> None:
    torch.manual_seed(0)
    dtype = torch.bfloat16 if kind.endswith("bfloat16") else torch.float32
    layout = torch.contiguous_format if kind == "lbfgs" else torch.channels_last

    def build() -> nn.Module:
        layers = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16, 2))
        return layers.to(dtype).to(memory_format=layout)  # type: ignore[call-overload]

    model = build()
    batches = torch.randn(6, 5, 3, 4, 4, dtype=dtype)

    def train(network: nn.Module, optimizer: torch.optim.Optimizer, part: Tensor) -> None:
        for batch in part:

            def loss(batch: Tensor = batch) -> Tensor:
                optimizer.zero_grad()
                value = network(batch).float().square().mean()
                value.backward()
                return value

            optimizer.step(loss)  # type: ignore[arg-type]

    optimizer = OPTIMIZERS[kind](model.parameters())
    train(model, optimizer, batches[:3])
    restored = through_disk(tmp_path, optimizer.state_dict())
    assert_same(restored, optimizer.state_dict())

    other = build()
    other.load_state_dict(model.state_dict())
    resumed = OPTIMIZERS[kind](other.parameters())
    resumed.load_state_dict(restored)
    train(model, optimizer, batches[3:])
    train(other, resumed, batches[3:])
    for name, parameter in model.state_dict().items():
        assert torch.equal(parameter, other.state_dict()[name]), name
    assert_same(resumed.state_dict(), optimizer.state_dict())


def test_any_nested_state_is_exact(tmp_path: Path) -> None:
    state: dict[Any, Any] = {
        "state": {0: {"step": torch.tensor(3.0)}, "0": {"flag": torch.tensor([True])}},
        "a": {"b": torch.ones(2)},
        "a.b": torch.zeros(2, dtype=torch.float64),
        "betas": (0.9, 1e-308, float("inf")),
        "mixed": [1, True, None, "text", (), {}, [(torch.ones(1, dtype=torch.int8),)]],
        1.5: 2**70,
        "expanded": torch.ones(1).expand(3).clone(),
        "transposed": torch.arange(6).reshape(2, 3).t(),
    }
    assert_same(through_disk(tmp_path, state), state)


def test_a_state_that_is_not_plain_data_is_named() -> None:
    with pytest.raises(AnywidthError, match=r"groups\.0\.device"):
        flatten_state({"groups": [{"device": torch.device("cpu")}]})
    with pytest.raises(AnywidthError, match="None"):
        flatten_state({"state": {None: 1}})
    with pytest.raises(AnywidthError, match="'a'"):
        unflatten_state({}, flatten_state({"a": torch.ones(1)})[1])
