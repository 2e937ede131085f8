"""The kernels on a GPU: 213 comparisons with float64, and new widths that compile nothing."""

import os

import pytest
import torch

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


def test_values_and_gradients_are_those_of_float64() -> None:
    """In several processes, because compiling takes most of the time."""
    from kernel_checks import check_everything

    results = check_everything(processes=min(8, os.cpu_count() or 1))
    assert len(results) == 213
    assert [row for row in results if not row["passed"]] == []


def test_a_new_width_compiles_nothing() -> None:
    from kernel_checks import variants_of_new_widths

    before, after = variants_of_new_widths()
    assert sum(before.values()) > 0
    assert after == before
