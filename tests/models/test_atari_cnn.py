"""The networks that play games: what they compute, and that they narrow like any other."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from agreement import assert_agrees, assert_close, assert_gradients, convert
from torch import Tensor, nn

import anywidth as aw
from anywidth.models.atari_cnn import ActorCritic
from anywidth.planning.example_inputs import example_inputs

WIDTHS = aw.WidthRange(0.25, 1.0, 8)


def pixels(count: int = 2, channels: int = 4, side: int = 84) -> Tensor:
    return torch.randint(256, (count, channels, side, side), dtype=torch.uint8)


def shaken(network: ActorCritic) -> ActorCritic:
    """With biases and a policy head that matter, which those of a new network do not."""
    for parameter in network.parameters():
        with torch.no_grad():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return network


NETWORKS = {
    "atari": (aw.models.atari_cnn, pixels),
    "minatar": (aw.models.minatar_cnn, lambda: (torch.rand(2, 4, 10, 10) < 0.2).float()),
    "mlp": (aw.models.mlp_policy, lambda: torch.randn(2, 4)),
}


@pytest.fixture(params=NETWORKS)
def network(request: pytest.FixtureRequest) -> tuple[ActorCritic, Tensor]:
    build, observations = NETWORKS[request.param]
    return shaken(build()), observations()


def test_forward_is_the_papers_network_written_out() -> None:
    network = shaken(aw.models.atari_cnn(actions=6)).double()
    observations = pixels(3)
    x = observations.double() / 255
    weights = iter(network.parameters())
    for stride in (4, 2, 1):
        x = F.conv2d(x, next(weights), next(weights), stride).clamp(min=0)
    assert x.shape == (3, 32, 7, 7)
    x = (x.reshape(3, -1) @ next(weights).T + next(weights)).clamp(min=0)
    assert x.shape == (3, 512)
    logits, value = (x @ next(weights).T + next(weights) for _ in range(2))
    found = network(observations)
    torch.testing.assert_close(found, (logits, value[:, 0]))
    assert found[0].shape == (3, 6)
    assert found[1].shape == (3,)


def test_only_whole_pixels_are_scaled() -> None:
    network = shaken(aw.models.atari_cnn())
    observations = pixels()
    assert_close(network(observations), network(observations.float() / 255))
    assert not torch.allclose(network(observations)[0], network(observations.float())[0])


SIDES = {
    "atari": {"features.0": 20, "features.2": 9, "features.4": 7},
    "minatar": {"features.0": 8},
    "mlp": {},
}


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("width", [0.25, 0.6, 1.0])
def test_multiply_adds_are_those_of_the_narrower_network(name: str, width: float) -> None:
    build, observations = NETWORKS[name]
    network = convert(build(), observations(), WIDTHS)
    small = aw.extract(network, width)
    expected = sum(
        layer.weight.numel() * SIDES[name].get(path, 1) ** 2
        for path, layer in small.named_modules()
        if isinstance(layer, nn.Conv2d | nn.Linear)
    )
    assert aw.macs(network, width) == expected


def test_multiply_adds_at_full_width() -> None:
    plan = aw.plan(aw.models.atari_cnn(), pixels())
    convolutions = 20 * 20 * 4 * 64 * 32 + 9 * 9 * 32 * 16 * 64 + 7 * 7 * 64 * 9 * 32
    assert aw.macs(plan, 1.0) == convolutions + 1568 * 512 + 512 * 4 + 512 == 7_639_552


def test_flatten_is_a_multiplicity() -> None:
    network = convert(aw.models.atari_cnn(), pixels(), WIDTHS)
    plan = aw.plan_of(network)
    assert plan.elastic_layers() == (4, 6)
    assert plan.tensors["hidden.weight"][1] == (("features.4", 49),)
    small = aw.extract(network, 0.25)
    assert small.hidden.weight.shape == (128, 8 * 49)
    assert torch.equal(small.hidden.weight, network.hidden.weight[:128, : 8 * 49])


def test_sliced_equals_extracted(network: tuple[ActorCritic, Tensor]) -> None:
    model, observations = network
    aw.slimmable(model, None, WIDTHS, example_input=observations, strict=True)
    assert_agrees(model, observations)
    assert_gradients(model, aw.plan_of(model).narrowest, observations)


def test_a_plan_alone_is_verified_on_pixels_that_differ() -> None:
    network = aw.models.atari_cnn()
    (made,) = example_inputs(network, aw.plan(network, pixels()))
    assert made.dtype == torch.uint8
    assert made.shape == (2, 4, 84, 84)
    assert len(made.unique()) > 200


def test_autocast_computes_about_the_same(network: tuple[ActorCritic, Tensor]) -> None:
    model, observations = network
    exact = model(observations)
    with torch.autocast("cpu", torch.bfloat16):
        rounded = model(observations)
    for one, other in zip(exact, rounded, strict=True):
        assert other.dtype == torch.bfloat16
        assert one.shape == other.shape
        torch.testing.assert_close(one, other.float(), rtol=0.05, atol=0.05)


def test_initialisation_is_orthogonal_with_the_gains_of_ppo() -> None:
    network = aw.models.atari_cnn()
    gains = {network.policy: 0.01, network.value: 1.0}
    for layer in network.modules():
        if isinstance(layer, nn.Conv2d | nn.Linear):
            rows = layer.weight.detach().flatten(1)
            rows = rows if len(rows) <= rows.shape[1] else rows.T
            gain = gains.get(layer, math.sqrt(2))
            torch.testing.assert_close(
                rows @ rows.T, gain**2 * torch.eye(len(rows)), rtol=1e-4, atol=1e-5
            )
            assert not layer.bias.any()
    assert (network(pixels())[0].softmax(1) - 0.25).abs().max() < 0.01


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda: aw.models.atari_cnn(actions=0), "actions"),
        (lambda: aw.models.atari_cnn(in_channels=1.5), "in_channels"),
        (lambda: aw.models.atari_cnn(image_size=35), "image_size"),
        (lambda: aw.models.minatar_cnn(board_size=2), "board_size"),
        (lambda: aw.models.minatar_cnn(channels=-8), "channels"),
        (lambda: aw.models.mlp_policy(units=0), "units"),
    ],
)
def test_bad_arguments_are_named(call, named: str) -> None:
    with pytest.raises(aw.AnywidthError, match=named):
        call()


def test_the_smallest_image_runs() -> None:
    logits, _ = aw.models.atari_cnn(image_size=36)(pixels(side=36))
    assert logits.shape == (2, 4)
