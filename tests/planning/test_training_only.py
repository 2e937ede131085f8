"""Parameters that only training uses, in code that draws which layers to leave out."""

from __future__ import annotations

import pytest
import torch
import transformers
from agreement import assert_agrees, convert
from torch import Tensor, nn

import anywidth as aw

x = torch.randn(2, 6, 8)


class LayerDrop(nn.Module):
    """As speech networks train: some positions are masked, some layers left out."""

    def __init__(self, shape: list[int]) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(8, 32), nn.Linear(32, 4)
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(2))
        self.masked = nn.Parameter(torch.randn(32))
        self.shape = shape

    def forward(self, x: Tensor) -> Tensor:
        y = self.stem(x)
        if self.training:
            y = torch.where(torch.rand(*y.shape[:2], 1) < 0.5, self.masked, y)
        for layer in self.layers:
            if not self.training or torch.rand(self.shape) > 0.1:
                y = y + layer(y).relu()
        return self.head(y)


@pytest.mark.parametrize("shape", [[], [1]])
def test_what_is_drawn_leaves_no_layer_out_of_the_plan(shape: list[int]) -> None:
    model = convert(LayerDrop(shape), x)
    assert aw.plan_of(model).elastic_layers() == (3, 4)
    small = aw.extract(model, 0.5)
    assert small.masked.shape == (16,)
    small.train()(x)
    assert_agrees(model, x)
    drawn = [torch.rand([]) for _ in range(4)]
    assert len(set(map(float, drawn))) > 1  # draws are themselves again


def test_a_speech_network_narrows_its_residual_stream() -> None:
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "vocab_size": 8}
    stem = {"conv_dim": (16, 16), "conv_stride": (5, 4), "conv_kernel": (10, 4)}
    places = {"num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 4}
    config = transformers.Wav2Vec2Config(**sizes, **stem, **places, intermediate_size=64)
    model = transformers.Wav2Vec2ForCTC(config).eval()
    sound = torch.randn(2, 400)
    plan = aw.plan(model, sound)
    aw.slimmable(model, plan, aw.WidthRange(0.25, 1.0, 4), strict=True)
    elastic, layers = aw.plan_of(model).elastic_layers()
    assert layers - elastic == 1
    small = aw.extract(model, 0.25)
    assert small.wav2vec2.masked_spec_embed.shape == (8,)
    with aw.at_width(model, 0.25), torch.no_grad():
        torch.testing.assert_close(model(sound).logits, small(sound).logits)
