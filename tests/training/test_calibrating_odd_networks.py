"""Calibrating networks that use a norm twice, or not at all, or take several arguments."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from norm_moments import assert_moments, known
from tiny_networks import batches_of
from torch import Tensor, nn

import anywidth as aw

RANGE = aw.WidthRange(0.25, 1.0, 4)


class UsedTwice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(1, 16, 3, bias=False), nn.BatchNorm2d(16)
        self.second, self.head = nn.Conv2d(16, 16, 3, 2), nn.Conv2d(16, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.second(self.norm(self.first(x)))))


def test_a_norm_used_twice_averages_over_both_uses() -> None:
    torch.manual_seed(0)
    model = UsedTwice()
    aw.slimmable(model, None, RANGE, example_input=torch.randn(2, 1, 12, 12))
    batches = batches_of([8, 8, 4])
    met: list[Tensor] = []
    for width in (0.5, 1.0):
        aw.calibrate(model, batches, [width])
        assert not model.norm._forward_pre_hooks
        met.clear()
        hook = model.norm.register_forward_pre_hook(lambda _, given: met.append(given[0]))
        with aw.at_width(model, width), torch.no_grad():
            found = model.eval().norm.running_mean.clone()
            model.norm.train()  # as when it was calibrated: by the statistics of each batch
            for batch in batches:
                model(batch)
        hook.remove()
        values = torch.cat([one.transpose(0, 1).flatten(1) for one in met], dim=1)
        torch.testing.assert_close(found, values.mean(1), atol=1e-5, rtol=1e-4)


def test_norms_that_no_pass_runs_keep_what_they_know() -> None:
    class WithAuxiliary(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.norm = nn.Conv2d(1, 16, 3), nn.BatchNorm2d(16)
            self.side, self.side_norm = nn.Conv2d(16, 8, 1), nn.BatchNorm2d(8)
            self.head, self.side_head = nn.Conv2d(16, 4, 1), nn.Conv2d(8, 4, 1)

        def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
            x = self.norm(self.stem(x))
            if not self.training:
                return self.head(x)
            return self.head(x), self.side_head(self.side_norm(self.side(x)))

    model = WithAuxiliary()
    aw.slimmable(model, None, RANGE, example_input=torch.randn(2, 1, 12, 12))
    (images,) = batches_of([8])
    model.train()
    for width in (1.0, 0.25):
        with aw.at_width(model, width):
            model(images)
    before = known(model, 1.0)[1], known(model, 0.25)[1]
    aw.calibrate(model, [images], [0.25, 0.5, 1.0])
    assert_moments([known(model, 1.0)[1], known(model, 0.25)[1]], list(before))
    # And where they know nothing, the full width's.
    assert torch.equal(known(model, 0.5)[1][0], before[0][0][:4])
    assert aw.calibrated_widths(model) == [0.25, 0.5, 1.0]


def test_a_network_of_several_arguments_is_trained_and_calibrated() -> None:
    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.norm, self.head = (
                nn.Linear(8, 16),
                nn.BatchNorm1d(16),
                nn.Linear(16, 4),
            )

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return self.head(self.norm(self.layer(x) + self.layer(y)))

    model, inputs = Sum(), (torch.randn(9, 8), torch.randn(9, 8))
    aw.slimmable(model, None, RANGE, example_input=inputs)
    step = aw.SandwichStep(model, torch.optim.SGD(model.parameters(), 0.1), F.cross_entropy)
    labels = torch.randint(4, (9,))
    first = float(step(inputs, labels).losses[0])
    for _ in range(20):
        result = step(inputs, labels)
    assert float(result.losses[0]) < first
    # Two batches of which the second is one sample alone, as a data loader would give them.
    batches = [[[one[:8] for one in inputs], labels[:8]], [[one[8:] for one in inputs], labels[8:]]]
    aw.calibrate(model, batches, [0.5])
    with aw.at_width(model, 0.5), torch.no_grad():
        values = model.layer(inputs[0]) + model.layer(inputs[1])
        torch.testing.assert_close(model.norm.eval().running_mean, values.mean(0))
    with pytest.raises(aw.AnywidthError, match=r"\(5, 8\)"):
        aw.calibrate(model, [((inputs[0], inputs[1][:5]),)], [0.5])


class AssigningNorm(nn.BatchNorm2d):
    """Assigns its statistics anew, as some libraries do, instead of writing into them."""

    def forward(self, x: Tensor) -> Tensor:
        mean, var = self.running_mean, self.running_var
        if self.training:
            if mean is not None and var is not None and self.num_batches_tracked is not None:
                self.running_mean = 0.5 * mean + 0.5 * x.mean((0, 2, 3)).detach()
                self.running_var = 0.5 * var + 0.5 * x.var((0, 2, 3)).detach()
                self.num_batches_tracked = self.num_batches_tracked + 1
            mean, var = x.mean((0, 2, 3)), x.var((0, 2, 3))
        assert mean is not None
        assert var is not None
        scale = self.weight * (var + self.eps).rsqrt()
        return (x - mean.view(-1, 1, 1)) * scale.view(-1, 1, 1) + self.bias.view(-1, 1, 1)


def test_a_norm_that_assigns_its_statistics_keeps_them_by_width() -> None:
    """They went into the full width's, and the narrower width kept those of a new norm."""
    model = nn.Sequential(nn.Conv2d(1, 16, 3), AssigningNorm(16), nn.Conv2d(16, 4, 1))
    images = 3 * torch.randn(8, 1, 8, 8) + 1
    aw.slimmable(model, None, RANGE, example_input=images)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.train()
    for width in (0.25, 0.5):  # tracked, and not
        with aw.at_width(model, width):
            model(images)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]), name
    with aw.at_width(model, 0.25):
        assert model[1].num_batches_tracked == 1
        assert model[1].running_mean.all()
        model[1].running_mean = torch.ones(16)
    assert torch.equal(model[1].running_mean, torch.ones(16)), "a whole one is the full width's"


def test_a_network_that_takes_a_dict_is_calibrated() -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.norm = nn.Linear(8, 16), nn.BatchNorm1d(16)
            self.head = nn.Linear(16, 4)

        def forward(self, batch: dict[str, Tensor]) -> Tensor:
            return self.head(self.norm(self.layer(batch["x"]) + self.layer(batch["y"])))

    whole = {"x": torch.randn(9, 8), "y": torch.randn(9, 8)}
    model = aw.slimmable(Named(), None, RANGE, example_input=(whole,))
    parts = [{name: one[cut] for name, one in whole.items()} for cut in (slice(8), slice(8, 11))]
    # The second part is one sample alone, and the third is not asked for.
    aw.calibrate(model, [((part,),) for part in (*parts, parts[0])], [0.5], samples=9)
    with aw.at_width(model, 0.5), torch.no_grad():
        values = model.layer(whole["x"]) + model.layer(whole["y"])
        torch.testing.assert_close(model.norm.eval().running_mean, values.mean(0))


def test_instance_norms_that_keep_statistics_are_calibrated() -> None:
    norm = nn.InstanceNorm2d(16, track_running_stats=True)
    model = nn.Sequential(nn.Conv2d(1, 16, 3), norm, nn.ReLU(), nn.Conv2d(16, 4, 1))
    aw.slimmable(model, None, RANGE, example_input=torch.randn(2, 1, 12, 12))
    batches = batches_of([8, 8, 4])
    aw.calibrate(model, batches, [0.5, 1.0])
    assert not norm._forward_pre_hooks
    assert aw.calibrated_widths(model.eval()) == [0.5, 1.0]
    for width, channels in ((0.5, 8), (1.0, 16)):
        with torch.no_grad(), aw.at_width(model, width):
            met = model[0](torch.cat(list(batches)))
            assert norm.running_mean.shape == (channels,)
            torch.testing.assert_close(norm.running_mean, met.mean((0, 2, 3)), atol=1e-5, rtol=1e-4)


class Graph(nn.Module):
    """Takes nodes, and beside them a mask or None, a number, and edges, which are no samples."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm, self.head = nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 4)

    def forward(self, x: Tensor, mask: Tensor | None, scale: float, edges: Tensor) -> Tensor:
        y = self.norm(self.layer(x)) * scale
        y = torch.zeros_like(y).index_add(0, edges[1], y[edges[0]])
        return self.head(y if mask is None else y * mask)


@pytest.mark.parametrize("samples", [None, 4])
@pytest.mark.parametrize("scale", [2.0, torch.tensor(2.0)])
def test_arguments_without_samples_are_passed_as_they_are(
    scale: float | Tensor, samples: int | None
) -> None:
    nodes, edges = torch.randn(6, 8), torch.tensor([[0, 1, 5, 3], [1, 2, 3, 0]])
    batch = {"x": nodes, "mask": None, "scale": scale, "edges": edges}
    model = aw.slimmable(Graph(), None, RANGE, example_input=batch)
    aw.calibrate(model, [batch], [0.5, 1.0], samples=samples)
    with aw.at_width(model, 0.5), torch.no_grad():
        torch.testing.assert_close(model.eval().norm.running_mean, model.layer(nodes).mean(0))
    wrong = {**batch, "mask": torch.ones(5, 1)}
    with pytest.raises(aw.AnywidthError, match="samples"):
        aw.calibrate(model, [wrong], [0.5])


class Neighbours(nn.Module):
    """Each node adds up its neighbours; edges are pairs of nodes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(6, 16), nn.BatchNorm1d(16)
        self.head = nn.Linear(16, 3)

    def forward(self, nodes: Tensor, edges: Tensor) -> Tensor:
        x = F.relu(self.norm(self.first(nodes)))
        return self.head(x.index_add(0, edges[1], x[edges[0]]))


def test_batches_of_a_graph_need_no_tuple_of_their_own() -> None:
    torch.manual_seed(0)
    nodes, edges = torch.randn(20, 6), torch.randint(20, (2, 30))
    model = Neighbours()
    aw.slimmable(model, None, RANGE, example_input=(nodes, edges))
    found = []
    for loader in (
        [((nodes, edges), torch.zeros(20))],
        [(nodes, edges, torch.zeros(20))],
        [[nodes, edges]],
    ):
        aw.calibrate(model, loader, [0.5])
        with aw.at_width(model, 0.5):
            found.append(model.eval().norm.running_mean.clone())
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])
    with pytest.raises(aw.AnywidthError, match="edges"):
        aw.calibrate(model, [nodes], [0.5])
