"""A network has one width at a time: two threads use replicas, or are refused."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import pickle
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tiny_networks import batches_of, converted, images_and_labels, tiny
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import anywidth as aw

WIDTHS = [0.25, 0.5, 1.0]
IMAGES = batches_of([4], seed=3)[0]


@pytest.fixture
def network() -> Any:
    model = converted()
    aw.calibrate(model, batches_of([16]), WIDTHS)
    return model.eval()


@pytest.fixture
def hasty() -> Iterator[None]:
    """Threads take turns as often as Python allows."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


def at(model: nn.Module, width: float) -> Tensor:
    with aw.at_width(model, width), torch.no_grad():
        return model(IMAGES)


def after_setting(model: nn.Module, width: float) -> Tensor:
    aw.set_width(model, width)
    with torch.no_grad():
        return model(IMAGES)


def in_thread(function: Callable[..., Any], *arguments: Any) -> Any:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function, *arguments).result()


def compared(run: Any, networks: list[nn.Module], count: int) -> tuple[int, int]:
    """How many of the calls of three threads were answered wrongly, and how many were refused."""
    right = {width: at(networks[0], width) for width in WIDTHS}
    wrong, refused = [0] * 3, [0] * 3

    def work(number: int, model: nn.Module, width: float) -> None:
        for _ in range(count):
            try:
                wrong[number] += not torch.equal(run(model, width), right[width])
            except aw.AnywidthError as error:
                if "replica" not in str(error):
                    raise
                refused[number] += 1

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(work, range(3), networks, WIDTHS))
    return sum(wrong), sum(refused)


@pytest.mark.parametrize("run", [at, after_setting])
def test_threads_with_replicas_get_their_own_width(network: Any, run: Any, hasty: None) -> None:
    replicas = [network, aw.replica(network), aw.replica(aw.replica(network))]
    assert compared(run, replicas, 1000) == (0, 0)


@pytest.mark.parametrize("run", [at, after_setting])
def test_threads_on_one_network_are_never_answered_wrongly(
    network: Any, run: Any, hasty: None
) -> None:
    wrong, refused = compared(run, [network] * 3, 1000)
    assert wrong == 0
    assert refused > 0
    at(network, 0.5)  # and it still works


# ---- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "use",
    [
        lambda model: at(model, 0.5),
        lambda model: aw.set_width(model, 0.5),
        lambda model: model(IMAGES),
        lambda model: model[0](IMAGES),
        lambda model: aw.extract(model, 0.5),
        lambda model: aw.calibrate(model, batches_of([8]), [0.5]),
    ],
    ids=["at_width", "set_width", "pass", "layer", "extract", "calibrate"],
)
def test_a_network_inside_at_width_belongs_to_one_thread(network: Any, use: Any) -> None:
    right = at(network, 0.25)
    with aw.at_width(network, 0.25):
        with pytest.raises(aw.AnywidthError, match="replica"):
            in_thread(use, network)
        assert torch.equal(network(IMAGES), right)
    in_thread(use, network)


def test_a_width_that_another_thread_has_replaced_is_refused(network: Any) -> None:
    aw.set_width(network, 0.25)
    in_thread(at, network, 0.5)  # which gives the width back
    network(IMAGES)
    in_thread(aw.set_width, network, 0.5)
    with pytest.raises(aw.AnywidthError, match="replica"):
        network(IMAGES)
    aw.set_width(network, 0.25)
    network(IMAGES)


class Meeting(nn.Module):
    """Waits in the middle of a pass."""

    def __init__(self) -> None:
        super().__init__()
        self.reached, self.go_on = threading.Event(), threading.Event()
        self.is_on = False

    def __deepcopy__(self, memo: Any) -> Meeting:
        return Meeting()

    def forward(self, x: Tensor) -> Tensor:
        if self.is_on:
            self.reached.set()
            assert self.go_on.wait(30)
        return x


def test_no_thread_changes_the_width_of_a_pass() -> None:
    meeting = Meeting()
    model = converted(nn.Sequential(*list(tiny())[:4], meeting, *list(tiny())[4:])).eval()
    right = at(model, 1.0)
    meeting.is_on = True
    with ThreadPoolExecutor(1) as pool:
        passing = pool.submit(model, IMAGES)
        assert meeting.reached.wait(30)
        for change in (aw.set_width, at):
            with pytest.raises(aw.AnywidthError, match="replica"):
                change(model, 0.25)
        meeting.go_on.set()
        assert torch.equal(passing.result(), right)
    aw.set_width(model, 0.25)


def test_a_pass_that_failed_in_another_thread_keeps_nobody_out(network: Any) -> None:
    with pytest.raises(RuntimeError):
        in_thread(network, torch.zeros(1, 7, 5, 5))
    aw.set_width(network, 0.25)


def test_blocks_that_end_in_the_wrong_order_are_refused(network: Any) -> None:
    """As those of two generators that take turns."""
    first, second = (aw.at_width(network, width) for width in (0.25, 0.5))
    first.__enter__()
    second.__enter__()
    with pytest.raises(aw.AnywidthError, match="replica"):
        first.__exit__(None, None, None)
    second.__exit__(None, None, None)
    in_thread(at, network, 1.0)


def test_tasks_of_asyncio_are_kept_apart(network: Any) -> None:
    right = {width: at(network, width) for width in WIDTHS}

    async def answer(model: nn.Module, width: float) -> Tensor:
        with aw.at_width(model, width):
            await asyncio.sleep(0)
            return await asyncio.to_thread(model, IMAGES)

    async def both(*models: nn.Module) -> list[Any]:
        answers = map(answer, models, WIDTHS)
        return await asyncio.gather(*answers, return_exceptions=True)

    first, *others = asyncio.run(both(network, network, network))
    assert torch.equal(first, right[0.25])
    assert all("replica" in str(other) for other in others)
    found = asyncio.run(both(network, aw.replica(network)))
    assert all(torch.equal(y, right[width]) for y, width in zip(found, WIDTHS, strict=False))


# ---- what is not ---------------------------------------------------------------------------------


def test_one_thread_nests_blocks(network: Any) -> None:
    right = {width: at(network, width) for width in WIDTHS}
    with aw.at_width(network, 0.5):
        assert torch.equal(at(network, 0.25), right[0.25])
        aw.set_width(network, 1.0)
        assert torch.equal(network(IMAGES), right[1.0])
    assert torch.equal(at(network, 0.5), right[0.5])


def test_threads_use_a_network_one_after_the_other(network: Any) -> None:
    right = {width: at(network, width) for width in WIDTHS}
    for width in WIDTHS:
        assert torch.equal(in_thread(at, network, width), right[width])
        aw.set_width(network, width)
        assert torch.equal(in_thread(network, IMAGES), right[width])


def test_threads_share_a_network_at_one_width(network: Any, hasty: None) -> None:
    right = after_setting(network, 0.5)
    with torch.no_grad(), ThreadPoolExecutor(4) as pool:
        assert all(torch.equal(y, right) for y in pool.map(network, [IMAGES] * 200))


@pytest.mark.parametrize("reentrant", [True, False])
def test_backward_in_another_thread(reentrant: bool) -> None:
    """As on a GPU: the pass that backward repeats has the width of its forward pass."""
    images, labels = images_and_labels(8)
    model = converted()
    gradients = []
    for run in (lambda loss: loss.backward(), lambda loss: in_thread(loss.backward)):
        model.zero_grad()
        with aw.at_width(model, 0.5):
            x = images.clone().requires_grad_()
            loss = F.cross_entropy(checkpoint(model, x, use_reentrant=reentrant), labels)
        with aw.at_width(model, 0.25) if not reentrant else contextlib.nullcontext():
            run(loss)
        gradients.append([p.grad.clone() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_copies_are_used_while_the_original_is(network: Any) -> None:
    right = at(network, 0.25)
    with aw.at_width(network, 0.5):
        for twin in (copy.deepcopy(network), pickle.loads(pickle.dumps(network))):
            assert torch.equal(in_thread(at, twin, 0.25), right)


# ---- replicas ------------------------------------------------------------------------------------


def test_a_replica_has_no_memory_of_its_own(network: Any) -> None:
    twin: Any = aw.replica(network)
    for mine, its in zip(twin.parameters(), network.parameters(), strict=True):
        assert mine is its
    assert all(mine is its for mine, its in zip(twin.buffers(), network.buffers(), strict=True))
    aw.set_width(twin, 0.25)
    twin.train()
    assert network[0].weight.shape[0] == 16
    assert not network.training


def test_replicas_share_statistics(network: Any) -> None:
    twin = aw.replica(network)
    aw.calibrate(twin, batches_of([8], seed=5), [0.75, 0.5, 1.0])
    assert aw.calibrated_widths(network) == [0.25, 0.5, 0.75, 1.0]
    for width in (0.25, 0.5, 0.75, 1.0):
        assert torch.equal(at(network, width), at(twin, width))
    state = aw.statistics_state(twin)
    other = aw.replica(network)
    aw.load_statistics_state(other, state)
    assert torch.equal(at(network, 0.75), at(twin, 0.75))


@pytest.mark.parametrize("fused", [False, True])
def test_weights_trained_in_one_make_the_statistics_of_all_uncalibrated(
    network: Any, fused: bool
) -> None:
    twin = aw.replica(network)
    at(twin, 0.5)
    optimizer = torch.optim.SGD(network.parameters(), 0.1, fused=fused)
    aw.SandwichStep(network, optimizer, F.cross_entropy)(*images_and_labels(8))
    with pytest.raises(aw.AnywidthError, match="calibrate"):
        at(twin, 0.5)
    at(twin, 0.25)  # tracked
    aw.calibrate(network, batches_of([8]), [0.5])
    assert torch.equal(at(twin, 0.5), at(network.eval(), 0.5))


def test_weights_loaded_into_one_are_those_of_all(network: Any) -> None:
    twin = aw.replica(network)
    network.load_state_dict(converted().state_dict())
    assert torch.equal(at(twin, 1.0), at(network, 1.0))
    for model in (network, twin):
        with pytest.raises(aw.AnywidthError, match="calibrate"):
            at(model, 0.5)


def test_a_replica_of_a_network_converted_in_part() -> None:
    model = nn.Sequential(converted(), nn.BatchNorm1d(10))
    aw.calibrate(model, batches_of([8]), [0.25, 1.0])
    twin = aw.replica(model.eval())
    right = at(model, 0.25)
    with aw.at_width(model, 1.0):
        assert torch.equal(in_thread(at, twin, 0.25), right)
    assert twin[1].running_mean is model[1].running_mean


def test_only_a_converted_network_has_replicas() -> None:
    with pytest.raises(aw.AnywidthError, match="slimmable"):
        aw.replica(tiny())
