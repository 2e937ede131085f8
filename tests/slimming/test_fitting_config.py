"""Extracted Hugging Face networks: saved, loaded, and the same; or refused where none can be."""

from __future__ import annotations

import copy
import io
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import anywidth as aw
from anywidth.planning.model_outputs import output_leaves

WORDS = torch.arange(24).view(2, 12) % 32
IMAGES = torch.randn(2, 3, 16, 16)
WIDTHS = aw.WidthRange(0.25, 1.0, 4)
ENDS = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
BLOCKS = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
DECODER = {
    **BLOCKS,
    **ENDS,
    "vocab_size": 32,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 16,
}
GPT2 = {"vocab_size": 32, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 16, **ENDS}
VIT = {**BLOCKS, "num_attention_heads": 4, "image_size": 16, "patch_size": 8}
SWIN = {"image_size": 16, "patch_size": 2, "embed_dim": 16, "depths": [1, 1], "num_heads": [2, 4]}
T5 = {"vocab_size": 32, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}


def built(name: str, kind: str = "ForCausalLM", **sizes: Any) -> Any:
    config = getattr(transformers, f"{name}Config")(**sizes)
    return getattr(transformers, f"{name}{kind}")(config).eval()


def converted(model: Any, example: Tensor, *roles: str) -> Any:
    plan = aw.plan(model, example)
    if roles:
        plan.only(*roles)
    return aw.slimmable(model, plan, WIDTHS, allow_fixed=True)


def outputs(model: nn.Module, example: Tensor) -> list[Tensor]:
    with torch.no_grad():
        return [leaf for leaf in output_leaves(model.eval()(example)) if isinstance(leaf, Tensor)]


def assert_returns(model: Any, example: Tensor, width: float, folder: Path) -> Any:
    """Saves a width and loads it; the loaded network computes what the sliced one does."""
    small = aw.extract(model, width)
    small.save_pretrained(folder)
    again, report = type(small).from_pretrained(folder, output_loading_info=True)
    assert not any(report.values()), report
    with aw.at_width(model, width):
        sliced = outputs(model, example)
    for one, other in zip(outputs(again, example), sliced, strict=True):
        torch.testing.assert_close(one, other)
    return again.config


def test_a_decoder_is_loaded_again(tmp_path: Path) -> None:
    model = converted(built("Llama", **DECODER, tie_word_embeddings=True), WORDS)
    config = assert_returns(model, WORDS, 0.5, tmp_path)
    assert (config.hidden_size, config.intermediate_size) == (16, 24)
    heads = (config.num_attention_heads, config.num_key_value_heads, config.head_dim)
    assert heads == (4, 2, 4)
    assert model.config.hidden_size == 32, "the slimmable network keeps its own"
    assert aw.extract(model, 1.0).config.hidden_size == 32


@pytest.mark.parametrize(
    ("make", "example", "sizes"),
    [
        (lambda: built("Qwen3", **DECODER, head_dim=8), WORDS, {"head_dim": 8}),
        (lambda: built("Gemma", **DECODER, head_dim=8), WORDS, {"hidden_size": 16}),
        (lambda: built("GPT2", "LMHeadModel", **GPT2), WORDS, {"n_embd": 16, "n_head": 2}),
        (lambda: built("ViT", "ForImageClassification", **VIT), IMAGES, {"hidden_size": 16}),
        (
            lambda: built("Swin", "ForImageClassification", **SWIN, window_size=4),
            IMAGES,
            {"embed_dim": 8, "num_heads": [1, 2]},
        ),
        (lambda: transformers.T5EncoderModel(transformers.T5Config(**T5)), WORDS, {"d_ff": 24}),
    ],
    ids=["qwen3", "gemma", "gpt2", "vit", "swin", "t5"],
)
def test_other_families_are_loaded_again(
    make: Any, example: Tensor, sizes: dict[str, Any], tmp_path: Path
) -> None:
    config = assert_returns(converted(make(), example), example, 0.5, tmp_path)
    assert {key: getattr(config, key) for key in sizes} == sizes


@pytest.mark.parametrize(
    ("role", "sizes"),
    [("mlp", (32, 24, 8, 4)), ("heads", (32, 48, 4, 2)), ("hidden", (16, 48, 8, 4))],
)
def test_what_alone_narrows_alone_changes(
    role: str, sizes: tuple[int, ...], tmp_path: Path
) -> None:
    config = assert_returns(converted(built("Llama", **DECODER), WORDS, role), WORDS, 0.5, tmp_path)
    heads = (config.num_attention_heads, config.num_key_value_heads)
    assert (config.hidden_size, config.intermediate_size, *heads) == sizes


def test_a_size_that_was_left_to_the_class_is_given(tmp_path: Path) -> None:
    model = converted(built("GPT2", "LMHeadModel", **GPT2), WORDS, "mlp")
    assert model.config.n_inner is None
    assert assert_returns(model, WORDS, 0.5, tmp_path).n_inner == 64


def test_a_network_in_half_precision_is_loaded_again(tmp_path: Path) -> None:
    model = converted(built("Llama", **DECODER).to(torch.bfloat16), WORDS)
    small: Any = aw.extract(model, 0.5)
    small.save_pretrained(tmp_path)
    again = type(small).from_pretrained(tmp_path)
    assert again.config.hidden_size == 16
    assert again.dtype == torch.bfloat16


@pytest.mark.parametrize("role", [("heads",), ()])
def test_what_no_configuration_builds_is_not_saved(role: tuple[str, ...], tmp_path: Path) -> None:
    """GPT-2 has as many channels in its heads as in its residual; at 0.6 these round otherwise."""
    small: Any = aw.extract(converted(built("GPT2", "LMHeadModel", **GPT2), WORDS, *role), 0.6)
    for again in (small, copy.deepcopy(small)):
        with pytest.raises(aw.AnywidthError, match="GPT2Config"):
            again.save_pretrained(tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_network_whose_saved_file_lacks_a_table_is_not_saved(tmp_path: Path) -> None:
    """Marian makes its positions itself, and for a narrower network it makes others."""
    sizes = {"d_model": 32, "max_position_embeddings": 16, "vocab_size": 32, **ENDS}
    ends = {"decoder_start_token_id": 0, "encoder_layers": 1, "decoder_layers": 1}
    heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4}
    model = built("Marian", "MTModel", **sizes, **ends, **heads)
    plan = aw.plan(model, input_ids=WORDS, decoder_input_ids=WORDS)
    aw.slimmable(model, plan, WIDTHS)
    small: Any = aw.extract(model, 0.5)
    with pytest.raises(aw.AnywidthError, match="MarianConfig"):
        small.save_pretrained(tmp_path)
    aw.extract(model, 1.0).save_pretrained(tmp_path)  # type: ignore[operator]


def test_layers_of_different_widths_are_not_saved(tmp_path: Path) -> None:
    model = converted(built("Llama", **DECODER), WORDS)
    names = [g.name for g in aw.plan_of(model).elastic() if g.roles == ("mlp",)]
    uneven = aw.plan_of(model).resolve({names[0]: 0.5, names[1]: 0.25})
    small: Any = aw.extract(model, uneven)
    with pytest.raises(aw.AnywidthError, match=r"mlp\.\w+_proj\.weight"):
        small.save_pretrained(tmp_path)


def test_a_pickled_network_that_is_not_saved_needs_no_anywidth() -> None:
    small = aw.extract(converted(built("GPT2", "LMHeadModel", **GPT2), WORDS, "heads"), 0.5)
    assert b"anywidth.slimming" not in pickle.dumps(small)
    file = io.BytesIO()
    torch.save(small, file)
    file.seek(0)
    again: Any = torch.load(file, weights_only=False)
    with pytest.raises(TypeError):
        again.save_pretrained("nowhere")


class ScaledConfig(transformers.PretrainedConfig):
    model_type = "scaled"
    hidden_size: int = 32


class Scaled(transformers.PreTrainedModel):
    """Scales by a power of the size in its configuration."""

    config_class = ScaledConfig

    def __init__(self, config: ScaledConfig) -> None:
        super().__init__(config)
        self.first = nn.Linear(8, config.hidden_size)
        self.last = nn.Linear(config.hidden_size, 8)
        self.post_init()

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.last(self.first(x) * self.scale())
        return found

    def scale(self) -> float:
        return self.config.hidden_size**0.5


class ScaledByTable(Scaled):
    """Keeps the size where no attribute follows the width."""

    def __init__(self, config: ScaledConfig) -> None:
        super().__init__(config)
        self.sizes = {"hidden": config.hidden_size}

    def scale(self) -> float:
        return self.sizes["hidden"] ** 0.5


def test_a_scale_worked_out_from_the_configuration_is_loaded_again(tmp_path: Path) -> None:
    x = torch.randn(2, 8)
    small: Any = aw.extract(converted(Scaled(ScaledConfig()).eval(), x), 0.25)
    small.save_pretrained(tmp_path)
    again = Scaled.from_pretrained(tmp_path)
    assert (again.config.hidden_size, again.scale()) == (8, 8**0.5)
    torch.testing.assert_close(again(x), small(x))


def test_a_configuration_that_builds_another_function_does_not_fit() -> None:
    """All tensors would have their shapes, and the scale would be half."""
    model, x = ScaledByTable(ScaledConfig()).eval(), torch.randn(2, 8)
    with pytest.warns(UserWarning, match="power of 32"):
        aw.slimmable(model, aw.plan(model, x), WIDTHS)
    small: Any = aw.extract(model, 0.25)
    with aw.at_width(model, 0.25):
        torch.testing.assert_close(small(x), model(x))
    with pytest.raises(aw.AnywidthError, match="computes"):
        small.save_pretrained("nowhere")


class Wrapped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.decoder = built("GPT2", "LMHeadModel", **GPT2)
        self.value = nn.Linear(32, 1)

    def forward(self, words: Tensor) -> Tensor:
        value: Tensor = self.value(self.decoder(words).logits)
        return value


def test_a_network_inside_another_is_saved(tmp_path: Path) -> None:
    model = converted(Wrapped().eval(), WORDS)
    small = aw.extract(model, 0.5)
    small.decoder.save_pretrained(tmp_path)
    expected = outputs(small, WORDS)[0]
    small.decoder = transformers.GPT2LMHeadModel.from_pretrained(tmp_path)
    torch.testing.assert_close(outputs(small, WORDS)[0], expected)


@pytest.mark.parametrize("width", [0.25, 1.0])
def test_the_slimmable_network_itself_is_saved_whole(width: float, tmp_path: Path) -> None:
    model = converted(built("Llama", **DECODER), WORDS)
    with aw.at_width(model, width):
        model.save_pretrained(tmp_path)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(outputs(again, WORDS)[0], outputs(model, WORDS)[0])
