"""Language models: what would be wrong without a word, if nobody looked."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import nn

import anywidth as aw

WORDS = torch.randint(3, 32, (2, 12), generator=torch.Generator().manual_seed(1))
WRITING = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None}
SIZES = {
    "vocab_size": 32,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 32,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
    "tie_word_embeddings": True,
}


@pytest.fixture(scope="module")
def plan() -> aw.Plan:
    return aw.plan(llama(), WORDS)


def llama(**sizes: Any) -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**{**SIZES, **sizes})
    return transformers.LlamaForCausalLM(config).eval()


def decoder(plan: aw.Plan, *roles: str, **sizes: Any) -> Any:
    model, own = llama(**sizes), plan.copy()
    if roles:
        own.only(*roles)
    widths = aw.WidthRange(0.25, 1.0, 4)
    return aw.slimmable(model, own, widths, verified=False, allow_fixed=True)


def stepping(model: nn.Module, loss: Any = None, **options: Any) -> aw.SandwichStep:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return aw.SandwichStep(model, optimizer, loss or aw.TokenLoss(shift=True), **options)


# ---- the loss --------------------------------------------------------------------------------


def test_the_loss_is_the_one_that_the_network_computes_itself(plan: aw.Plan) -> None:
    model = decoder(plan)
    labels = WORDS.clone()
    labels[0, 5:] = -100
    with torch.no_grad():
        output = model(WORDS, labels=labels)
    torch.testing.assert_close(aw.TokenLoss(shift=True)(output, labels), output.loss)


@pytest.mark.parametrize("shift", [True, False])
def test_narrower_widths_learn_over_classes_at_the_same_positions(shift: bool) -> None:
    output, full = torch.randn(2, 2, 5, 32).unbind()
    targets = torch.randint(0, 32, (2, 5))
    targets[:, 3:] = -1
    kept = 2 if shift else 3
    loss = aw.TokenLoss(shift=shift, ignore_index=-1)
    first = slice(0, kept)
    soft = full[:, first].softmax(-1)
    expected = -(soft * output[:, first].log_softmax(-1)).sum(-1).mean()
    torch.testing.assert_close(loss.distill(output, full, targets=targets), expected)
    truth = targets[:, 1 : kept + 1] if shift else targets[:, first]
    hard = F.cross_entropy(output[:, first].flatten(0, 1), truth.flatten())
    torch.testing.assert_close(loss(output, targets), hard)


def test_padding_changes_no_gradient_at_any_width(plan: aw.Plan) -> None:
    """Two rows of different lengths: whatever stands where the mask is 0 must not matter."""
    gradients = []
    mask = torch.ones_like(WORDS)
    mask[0, 7:] = 0
    labels = WORDS.masked_fill(mask == 0, -100)
    for filler in (0, 9):
        model = decoder(plan)
        words = WORDS.masked_fill(mask == 0, filler)
        stepping(model).backward({"input_ids": words, "attention_mask": mask}, labels)
        # The filler's own embedding is tied to its row in the head, so compare all rows.
        gradients.append([p.grad for p in model.parameters()])
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other)


def test_targets_that_the_shift_does_not_fit_are_refused(plan: aw.Plan) -> None:
    model = decoder(plan)
    following = F.pad(WORDS[:, 1:], (0, 1), value=-100)
    with pytest.raises(aw.AnywidthError, match="repeat"):
        stepping(model, aw.TokenLoss(shift=False))(WORDS, WORDS)
    with pytest.raises(aw.AnywidthError, match="already"):
        stepping(model)({"input_ids": WORDS}, following)
    first = stepping(model, aw.TokenLoss(shift=False))(WORDS, following).losses[0]
    again = stepping(decoder(plan))(WORDS, WORDS).losses[0]
    torch.testing.assert_close(first, again)


def test_one_token_repeated_is_not_refused(plan: aw.Plan) -> None:
    same = torch.full_like(WORDS, 5)
    stepping(decoder(plan))(same, same)


@pytest.mark.parametrize("output", [{"scores": 1}, (), torch.zeros(3), object()])
def test_an_output_without_logits_is_refused(output: Any) -> None:
    with pytest.raises(aw.AnywidthError, match="logits"):
        aw.TokenLoss(shift=False)(output, WORDS)


def test_targets_of_another_shape_are_refused() -> None:
    with pytest.raises(aw.AnywidthError, match=r"\(2, 12\)"):
        aw.TokenLoss(shift=True)(torch.randn(2, 11, 32), WORDS)


# ---- the network -----------------------------------------------------------------------------


def test_tied_embeddings_stay_tied(plan: aw.Plan) -> None:
    model = decoder(plan)
    step = stepping(model)
    step(WORDS, WORDS)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    small = aw.extract(model, 0.5)
    assert small.lm_head.weight is small.model.embed_tokens.weight
    assert tuple(small.lm_head.weight.shape) == (32, 16)


@pytest.mark.parametrize("return_dict", [True, False])
def test_a_step_keeps_no_caches_alive(plan: aw.Plan, return_dict: bool) -> None:
    """They hold keys and values with their gradients until the next step."""
    inputs = {"input_ids": WORDS, "return_dict": return_dict}
    result = stepping(decoder(plan))(inputs, WORDS)
    for output in result.outputs:
        kept = list(output.values() if return_dict else output)
        assert [type(item).__name__ for item in kept if item is not None] == ["Tensor"]
        assert not kept[0].requires_grad


def test_gradient_checkpointing_changes_no_gradient(plan: aw.Plan) -> None:
    gradients = []
    for is_checkpointed in (False, True):
        model = decoder(plan, use_cache=False)
        if is_checkpointed:
            model.activation_checkpointing_enable()
        stepping(model).backward(WORDS, WORDS)
        gradients.append([p.grad for p in model.parameters()])
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_rows_are_the_extracted_network_s(plan: aw.Plan, side: str) -> None:
    model = decoder(plan)
    mask = torch.ones_like(WORDS)
    mask[0, :5] = 0
    mask = mask if side == "left" else mask.flip(1)
    with torch.no_grad(), aw.at_width(model, 0.5):
        sliced = model(WORDS, attention_mask=mask).logits
        small = aw.extract(model, 0.5)(WORDS, attention_mask=mask).logits
    torch.testing.assert_close(sliced[mask == 1], small[mask == 1])


def test_rotary_tables_that_grow_are_the_same_at_every_width(plan: aw.Plan) -> None:
    """Dynamic tables are computed again for a text longer than those before."""
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    model = decoder(plan, rope_parameters=rope, max_position_embeddings=8)
    text = torch.cat([WORDS, WORDS], dim=1)
    fresh = decoder(plan, rope_parameters=rope, max_position_embeddings=8)
    with torch.no_grad():
        with aw.at_width(model, 0.25):
            model(text)
        longer = model(text).logits
        torch.testing.assert_close(longer, fresh(text).logits)
        with aw.at_width(model, 0.5):
            torch.testing.assert_close(model(text).logits, aw.extract(fresh, 0.5)(text).logits)


def test_a_step_trains_and_an_evaluation_drops_nothing(plan: aw.Plan) -> None:
    model = decoder(plan, attention_dropout=0.5)
    with torch.no_grad():
        before = model(WORDS).logits
        assert torch.equal(model(WORDS).logits, before)
    step = stepping(model)
    step.backward(WORDS, WORDS)
    assert model.training
    model.zero_grad()
    with torch.no_grad():
        assert not torch.equal(model(WORDS).logits, before)
        assert torch.equal(model.eval()(WORDS).logits, before)


def test_calibrating_a_network_without_batch_norm_does_nothing_and_says_so(plan: aw.Plan) -> None:
    model = decoder(plan)
    before = copy.deepcopy(model.state_dict())
    with pytest.warns(UserWarning, match="batch norm"):
        aw.calibrate(model, [WORDS], [0.5, 1.0])
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


# ---- the cache -------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [0.25, 1.0])
def test_what_is_written_with_a_cache_is_what_is_written_without(
    plan: aw.Plan, width: float
) -> None:
    model = decoder(plan)
    small = aw.extract(model, width)
    prompt = WORDS[:1, :5]
    with aw.at_width(model, width):
        cached = model.generate(prompt, **WRITING)
        assert torch.equal(cached, model.generate(prompt, use_cache=False, **WRITING))
        static = model.generate(
            prompt, cache_implementation="static", disable_compile=True, **WRITING
        )
    assert torch.equal(cached, small.generate(prompt, **WRITING))
    assert torch.equal(cached, static)


@pytest.mark.parametrize("roles", [("mlp",), ()], ids=["of_one_shape", "of_two_shapes"])
@torch.no_grad()
def test_a_cache_of_another_width_is_refused(plan: aw.Plan, roles: tuple[str, ...]) -> None:
    """Where the MLP alone narrows, keys have the same shape, and would be mixed."""
    model = decoder(plan, *roles)
    with aw.at_width(model, 0.25):
        cache = model(WORDS[:, :6]).past_key_values
        model(WORDS[:, 6:7], past_key_values=cache)
    for given in (cache, copy.deepcopy(cache)):
        with pytest.raises(aw.AnywidthError, match="another width"):
            model(WORDS[:, 7:8], past_key_values=given)
    own = transformers.DynamicCache(config=model.config)
    model(WORDS[:, :6], past_key_values=own)
    with aw.at_width(model, 0.25), pytest.raises(aw.AnywidthError, match="another width"):
        model(WORDS[:, 6:7], past_key_values=own)


@torch.no_grad()
def test_a_cache_serves_one_width_after_the_other_if_it_was_emptied_or_released(
    plan: aw.Plan,
) -> None:
    model = decoder(plan, "mlp")
    cache = transformers.DynamicCache(config=model.config)
    with aw.at_width(model, 0.25):
        model(WORDS[:, :6], past_key_values=cache)
    del cache.made_at
    model(WORDS[:, 6:7], past_key_values=cache)
    cache.crop(-7)
    with aw.at_width(model, 0.25):
        model(WORDS[:, :6], past_key_values=cache)


def test_an_extracted_network_knows_nothing_of_caches(plan: aw.Plan) -> None:
    small = aw.extract(decoder(plan), 0.5)
    assert not small._forward_pre_hooks
    assert not small._forward_pre_hooks_with_kwargs
    assert not small._forward_hooks
    with torch.no_grad():
        assert not hasattr(small(WORDS).past_key_values, "made_at")
