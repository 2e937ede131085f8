"""Two processes train and calibrate as one does."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import two_ranks
from command_line import HERE, TINY_RUN, torchrun
from torch import nn

import anywidth as aw
from anywidth import distributed
from anywidth.training.statistics_state import statistics_to_tensors


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ranks")
    done = torchrun(HERE / "two_ranks.py", folder)
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


@pytest.fixture(scope="module")
def ranks(folder: Path) -> list[dict[str, Any]]:
    with torch.serialization.safe_globals([aw.ChannelConfig]):
        return [torch.load(folder / f"rank{rank}.pt") for rank in range(2)]


def test_two_ranks_end_in_the_weights_of_one(ranks: list[dict[str, Any]]) -> None:
    model, widths = two_ranks.train(rank=0, world_size=1)
    start = two_ranks.converted(two_ranks.without_norms())
    for rank in ranks:
        assert rank["widths"] == widths
        for name, tensor in model.state_dict().items():
            torch.testing.assert_close(rank["weights"][name], tensor, atol=1e-6, rtol=1e-5)
    for name, tensor in ranks[0]["weights"].items():
        assert torch.equal(tensor, ranks[1]["weights"][name])
        assert not torch.allclose(tensor, start.state_dict()[name], atol=1e-3)


def test_gradients_are_reduced_once_a_step(ranks: list[dict[str, Any]]) -> None:
    parameters = sum(p.numel() for p in two_ranks.without_norms().parameters())
    for rank in ranks:
        assert rank["reductions"] == [parameters] * two_ranks.STEPS


def test_calibration_over_two_ranks_gives_the_bank_of_one(ranks: list[dict[str, Any]]) -> None:
    alone = two_ranks.calibrate()
    tensors, _ = statistics_to_tensors(alone)
    for rank in ranks:
        assert rank["bank"].keys() == tensors.keys()
        for name, tensor in tensors.items():
            assert torch.equal(rank["bank"][name], tensor), name
        for name, tensor in alone.state_dict().items():
            assert torch.equal(rank["full"][name], tensor), name


def test_running_statistics_are_averaged(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert torch.equal(rank["averaged"], torch.full((16,), 0.5))
        assert rank["sum"].tolist() == [2.0, 1.0]


def test_ranks_that_begin_elsewhere_train_one_network(ranks: list[dict[str, Any]]) -> None:
    """Averaging gradients would keep them apart for ever; so for a loss with parameters."""
    first, second = (rank["elsewhere"] for rank in ranks)
    assert "points" in first
    for name, tensor in first.items():
        torch.testing.assert_close(tensor, second[name])


def test_networks_of_one_process_each_stay_apart(ranks: list[dict[str, Any]]) -> None:
    """An initialised group does not make them one network."""
    for number, rank in enumerate(ranks):
        alone = two_ranks.everything(two_ranks.train_in(None, number))
        for kind in ("alone", "of one"):
            for name, tensor in rank[kind].items():
                torch.testing.assert_close(tensor, alone[name], msg=f"{kind}, {name}")
    assert not torch.equal(ranks[0]["alone"]["9.weight"], ranks[1]["alone"]["9.weight"])


def test_statistics_are_alike_on_all_ranks_after_training(ranks: list[dict[str, Any]]) -> None:
    first, second = (rank["together"] for rank in ranks)
    assert any(name.startswith("0/") for name in first)
    for name, tensor in first.items():
        torch.testing.assert_close(tensor, second[name], rtol=0, atol=0, msg=name)


def test_one_rank_may_calibrate_alone(ranks: list[dict[str, Any]]) -> None:
    for name, tensor in two_ranks.everything(two_ranks.calibrate()).items():
        assert torch.equal(ranks[0]["calibrated by one"][name], tensor), name


def test_a_sharded_network_trains_as_a_whole_one() -> None:
    done = torchrun(HERE / "sharded_ranks.py")
    assert done.returncode == 0, done.stderr[-3000:]


def test_what_is_no_group_is_named() -> None:
    model = two_ranks.converted()
    for group in ("all", 3):
        with pytest.raises(aw.AnywidthError, match=f"process_group={group!r}"):
            aw.calibrate(model, [torch.ones(4, 1, 12, 12)], [1.0], process_group=group)  # type: ignore[arg-type]


def test_a_layer_that_takes_no_part_gets_no_gradient(ranks: list[dict[str, Any]]) -> None:
    """Weight decay would act on a gradient of zero; in one process it does not."""
    for rank in ranks:
        assert rank["unused"] is None


def test_nothing_keeps_the_group_once_it_is_stopped(folder: Path) -> None:
    """Its threads would still run while Python ends, which now and then aborts the process."""
    for rank in range(2):
        assert (folder / f"rank{rank}.group").read_text() == "gone"


def test_nothing_keeps_a_group_that_began_before_the_library_was_loaded(tmp_path: Path) -> None:
    program = f"""
import sys, weakref
import torch.distributed as dist
dist.init_process_group("gloo", init_method="file://{tmp_path}/store", rank=0, world_size=1)
group = weakref.ref(dist.group.WORLD)
import anywidth as aw
from torch import nn, ones
aw.plan(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2)), ones(1, 4))
import torch.distributed.nn.functional
assert dist.group.WORLD is group()
dist.destroy_process_group()
sys.exit(group() is not None)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_one_process_is_left_alone() -> None:
    assert (distributed.rank(), distributed.world_size()) == (0, 1)
    layer = nn.Linear(2, 2)
    layer(torch.ones(1, 2)).sum().backward()
    before = layer.weight.grad.clone()  # type: ignore[union-attr]
    distributed.average([layer.weight.grad])  # type: ignore[list-item]
    assert torch.equal(layer.weight.grad, before)  # type: ignore[arg-type]
    distributed.barrier()


def test_a_device_is_chosen_or_named() -> None:
    assert distributed.local_device("cpu") == torch.device("cpu")
    with pytest.raises(aw.AnywidthError, match="'tpu'"):
        distributed.local_device("tpu")
    if not torch.cuda.is_available():
        assert distributed.local_device("auto") == torch.device("cpu")
        with pytest.raises(aw.AnywidthError, match="CUDA"):
            distributed.local_device("cuda")


def test_torchrun_trains_end_to_end(tmp_path: Path) -> None:
    run = tmp_path / "run"
    done = torchrun("-m", "anywidth", "train", *TINY_RUN, "--out", run)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("Report:") == 1
    assert done.stdout.count(f"Run: {run}") == 1
    for name in ("finished.json", "metrics.csv", "spectrum.csv", "report.html"):
        assert (run / name).is_file(), name
    rows = (run / "spectrum.csv").read_text().splitlines()
    assert sum(row[0].isdigit() for row in rows) == 37


def test_torchrun_trains_super_resolution_end_to_end(tmp_path: Path) -> None:
    """No rank may look for the finished network before the first one has written it."""
    run, size = tmp_path / "run", ("--channels", 4, "--blocks", 1, "--patch", 8, "--high", 0.5)
    steps = ("--epochs", 1, "--steps-per-epoch", 2, "--batch-size", 2, "--device", "cpu")
    done = torchrun("-m", "anywidth", "train", "sr", *size, *steps, "--out", run)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("Report:") == 1
    assert (run / "report.html").is_file()
