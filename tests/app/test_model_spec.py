"""Networks named on a command line, and errors that say what to write instead."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from anywidth.app.model_spec import load_model, parse_input
from anywidth.errors import AnywidthError

CODE = """
import torch
from torch import nn

READY = nn.Linear(2, 3)
NUMBER = 7

def build(size=4):
    return nn.Linear(size, 1)

def late():
    import beside_the_network
    return nn.Linear(beside_the_network.SIZE, 1)

def broken():
    raise RuntimeError("no weights at hand")

class Zoo:
    @staticmethod
    def small():
        return nn.Linear(1, 1)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A current folder with a network in a file, as a user of the command line has it."""
    (tmp_path / "my_networks.py").write_text(CODE)
    (tmp_path / "beside_the_network.py").write_text("SIZE = 6\n")
    (tmp_path / "needs_more.py").write_text("import no_such_package_at_all\n")
    (tmp_path / "misspelt.py").write_text("def build(:\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    for name in ("my_networks", "beside_the_network", "needs_more", "misspelt"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return tmp_path


@pytest.mark.parametrize("name", ["mobilenet_v1", "mobilenet_v2"])
def test_the_zoo_takes_options(name: str) -> None:
    model = load_model(name, num_classes=7, in_channels=1, total_stride=8)
    assert model(torch.randn(2, 1, 16, 16)).shape == (2, 7)


@pytest.mark.parametrize("name", ["mobilenet_v1", "mobilenet_v2"])
@pytest.mark.parametrize(
    ("options", "sizes"),
    [
        ({"total_stride": 32}, [16, 8, 4, 2, 1]),
        ({"total_stride": 8}, [32, 16, 8, 4]),
        ({"strides": (1, 1, 2, 2, 2)}, [32, 16, 8, 4]),
        ({"strides": (1, 2, 2, 1, 1)}, [32, 16, 8]),
        ({"strides": [2, 1, 1, 1, 2]}, [16, 8]),
    ],
)
def test_strides_say_where_images_are_halved(
    name: str, options: dict[str, Any], sizes: list[int]
) -> None:
    model = load_model(name, **options).eval()
    seen: dict[int, None] = {}
    for layer in model.features:
        layer.register_forward_hook(lambda *call: seen.setdefault(call[-1].shape[-1]))
    model(torch.randn(1, 3, 32, 32))
    assert list(seen) == sizes


def test_strides_other_than_five_ones_and_twos_are_refused() -> None:
    for strides in ((1, 2, 2), (1, 1, 2, 2, 4)):
        with pytest.raises(AnywidthError, match="five"):
            load_model("mobilenet_v2", strides=strides)


def test_wdsr_is_in_the_zoo() -> None:
    assert load_model("wdsr", channels=8, blocks=1)(torch.rand(1, 3, 4, 4)).shape == (1, 3, 8, 8)


def test_torchvision_networks_come_untrained() -> None:
    model = load_model("torchvision:squeezenet1_1", num_classes=5)
    assert model.eval()(torch.randn(1, 3, 64, 64)).shape == (1, 5)


def test_segmentation_networks_download_no_backbone(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object, **options: object) -> None:
        raise AssertionError("weights were asked for")

    monkeypatch.setattr("torch.hub.load_state_dict_from_url", refuse)
    monkeypatch.setattr("torchvision.models._api.load_state_dict_from_url", refuse)
    model = load_model("torchvision:lraspp_mobilenet_v3_large", num_classes=3)
    assert model.eval()(torch.randn(1, 3, 32, 32))["out"].shape == (1, 3, 32, 32)


@pytest.mark.parametrize("name", ["googlenet", "inception_v3"])
def test_slow_initialisations_are_left_out(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object, **options: object) -> None:
        raise AssertionError("initialised")

    monkeypatch.setattr(nn.init, "trunc_normal_", refuse)
    assert isinstance(load_model(f"torchvision:{name}"), nn.Module)
    with pytest.raises(AnywidthError, match="AssertionError"):
        load_model(f"torchvision:{name}", init_weights=True)


def test_timm_networks_take_options() -> None:
    model = load_model("timm:resnet10t", num_classes=4)
    assert model.eval()(torch.randn(1, 3, 32, 32)).shape == (1, 4)


def test_a_function_in_the_current_folder(folder: Path) -> None:
    before = list(sys.path)
    model = load_model("my_networks:build", size=9)
    assert isinstance(model, nn.Linear)
    assert model.in_features == 9
    assert load_model("my_networks:READY") is sys.modules["my_networks"].READY
    assert isinstance(load_model("my_networks:Zoo.small"), nn.Linear)
    late = load_model("my_networks:late")
    assert isinstance(late, nn.Linear)
    assert late.in_features == 6
    assert sys.path == before


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("mobilnet_v1", "mobilenet_v1"),
        ("resnet50", "torchvision:resnet50"),
        ("torchvision:resnet51", "resnet50"),
        ("timm:resnet5o", "resnet50"),
        ("torchvision:", "'torchvision:'"),
        (":build", "module:function"),
        ("", "''"),
        ("my_netwarks:build", "'my_netwarks'"),
        ("no_such.inner:build", "'no_such'"),
        ("needs_more:build", "no_such_package_at_all"),
        ("misspelt:build", "SyntaxError"),
        ("my_networks:bild", "'bild'"),
        ("my_networks:NUMBER", "int"),
        ("my_networks:broken", "no weights at hand"),
        ("os:getcwd", "str"),
    ],
)
def test_errors_say_what_to_write(folder: Path, spec: str, message: str) -> None:
    with pytest.raises(AnywidthError, match=message):
        load_model(spec)


def test_wrong_options_are_quoted(folder: Path) -> None:
    with pytest.raises(AnywidthError, match="TypeError"):
        load_model("my_networks:build", shape=3)
    with pytest.raises(AnywidthError, match="total_stride"):
        load_model("mobilenet_v1", total_stride=5)


@pytest.mark.parametrize(
    ("package", "extra"), [("torchvision", r"anywidth\[cli\]"), ("timm", r"anywidth\[timm\]")]
)
def test_a_missing_package_names_its_extra(
    package: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.setitem(sys.modules, f"{package}.models", None)
    with pytest.raises(AnywidthError, match=f"install {extra}"):
        load_model(f"{package}:resnet50")


def test_shapes_are_read() -> None:
    assert parse_input("3x224x224") == (3, 224, 224)
    assert parse_input(" 1 X 28 x28") == (1, 28, 28)
    assert parse_input("512") == (512,)


@pytest.mark.parametrize("text", ["", "3x", "3x224xq", "3x0x5", "-3x2", "3,224", "1_0x2", "٣x4"])
def test_bad_shapes_are_quoted(text: str) -> None:
    with pytest.raises(AnywidthError) as caught:
        parse_input(text)
    assert repr(text) in str(caught.value)
    assert "3x224x224" in str(caught.value)


def test_a_file_may_be_named_by_its_path(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "elsewhere").mkdir()
    monkeypatch.chdir(folder / "elsewhere")
    built: Any = load_model(f"{folder}/my_networks.py:build", size=5)
    assert built.in_features == 5
    beside: Any = load_model("../my_networks.py:late")
    assert beside.in_features == 6
    assert type(load_model("../my_networks.py:Zoo.small")) is nn.Linear
    with pytest.raises(AnywidthError, match=r"nothing\.py"):
        load_model("nothing.py:build")
    with pytest.raises(AnywidthError, match="SyntaxError"):
        load_model("../misspelt.py:build")
    with pytest.raises(AnywidthError, match="no_such_package_at_all"):
        load_model("../needs_more.py:build")
