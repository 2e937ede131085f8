"""Widths: the rounding rule, the range, configurations."""

from __future__ import annotations

import pickle
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import anywidth as aw
from anywidth.width import round_channels


@pytest.mark.parametrize(
    ("channels", "divisor", "expected"),
    [(32 * 0.25, 8, 8), (24 * 0.35, 8, 8), (16 * 0.35, 8, 8), (96 * 0.35, 8, 32), (44, 8, 48),
     (11.2, 8, 16), (3, 1, 3), (0.4, 1, 1), (20, 16, 32), (100, 8, 104)],
)  # fmt: skip
def test_rounding_is_that_of_the_mobilenet_papers(channels, divisor, expected) -> None:
    assert round_channels(channels, divisor) == expected


@settings(max_examples=200)
@given(st.floats(0.5, 5000), st.integers(1, 64))
def test_rounding_keeps_nine_tenths_and_is_near(channels: float, divisor: int) -> None:
    rounded = round_channels(channels, divisor)
    assert rounded % divisor == 0
    assert rounded >= max(divisor, 0.9 * channels - 1e-9)
    assert abs(rounded - channels) <= divisor


@given(st.floats(1, 2000), st.floats(1, 2000), st.integers(1, 32))
def test_rounding_never_falls_with_more_channels(a: float, b: float, divisor: int) -> None:
    low, high = sorted((a, b))
    assert round_channels(low, divisor) <= round_channels(high, divisor)


def test_range_allows_widths_computed_with_rounding_errors() -> None:
    assert aw.WidthRange(0.25, 0.55).fraction(0.25 + 3 * 0.1) == 0.55
    assert sum([0.25] + [0.025] * 30) > 1
    assert aw.WidthRange().fraction(sum([0.25] + [0.025] * 30)) == 1.0
    for width in np.array([0.3, 0.7], dtype=np.float32):
        found = aw.WidthRange(0.3, 0.7).fraction(width)
        assert type(found) is float
        assert found == pytest.approx(width)


def config(**channels: int) -> aw.ChannelConfig:
    return aw.ChannelConfig(tuple(channels.items()))


def test_configurations_are_keys() -> None:
    assert config(a=1, b=2) == config(a=1, b=2)
    assert hash(config(a=1, b=2)) == hash(config(a=1, b=2))
    assert config(a=1) != config(a=2)
    assert {config(a=1): "x"}[config(a=1)] == "x"


def test_configuration_reads_like_a_mapping() -> None:
    one = config(a=1, b=2)
    assert (one["b"], list(one), len(one), one.items()) == (2, ["a", "b"], 2, (("a", 1), ("b", 2)))
    assert one.replace({"b": 5}) == config(a=1, b=5)
    assert aw.ChannelConfig.from_json(one.to_json()) == one
    assert repr(config(a=1, b=2, c=3, d=4)) == "ChannelConfig(a=1, b=2, c=3, … 1 more)"
    with pytest.raises(aw.AnywidthError, match="'z'"):
        one.replace({"z": 1})


def test_configuration_survives_another_process() -> None:
    """Hashes of strings differ between processes; a pickled configuration is still a key."""
    code = (
        "import pickle, sys, anywidth as aw; one = aw.ChannelConfig((('a', 1), ('b', 2)));"
        "sys.stdout.buffer.write(pickle.dumps(one))"
    )
    sent = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout
    assert {config(a=1, b=2): True}[pickle.loads(sent)]
