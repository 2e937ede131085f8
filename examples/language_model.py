"""Train a Llama-style decoder from scratch for all widths, and write with it at two of them.

    python examples/language_model.py                  # two CPU cores
    python examples/language_model.py --large --folder runs/decoder --device cuda

The network is Hugging Face's Llama, unmodified, with tied embeddings. The text is the source code
of Python's standard library, byte by byte. The script prints the perplexity of a byte in files
that were held out at five widths, and what two widths write. With `--narrow mlp` only the MLPs
narrow, as in MatFormer.

`--large` is a network of about 30 million parameters for a GPU, with networks trained alone at
0.25, 0.5 and 1.0 on the same batches for comparison; `--networks` chooses among them. With
`--folder` every network is saved as it trains, and a run that ended early goes on; the folder then
also holds the perplexities (`perplexities.json`, a CSV file per series) and their plot
(`spectrum.png`). `--tune` compares settings on other files than those of the final evaluation.
"""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from python_text import END, WORDS, Rows, python_files
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import anywidth as aw
from anywidth.files import write_atomically
from anywidth.measuring.spectra import Metric, Spectrum

WIDTHS = (0.25, 0.4, 0.5, 0.75, 1.0)
WRITTEN = (0.25, 1.0)
PROMPT = b"import os\n\n\ndef "
METRICS = {"perplexity": Metric("perplexity of a byte", 3, lower_is_better=True)}
SMALL: dict[str, Any] = {
    "hidden": 128, "layers": 3, "heads": 8, "length": 128, "batch": 16, "steps": 800,
    "rate": 3e-3, "alone": (), "alone_rates": None, "evaluated": 16, "text": 4_000_000,
}  # fmt: skip
LARGE: dict[str, Any] = {
    "hidden": 512, "layers": 9, "heads": 8, "length": 512, "batch": 32, "steps": 1_500,
    "rate": 1e-3, "alone": (0.25, 0.5, 1.0), "alone_rates": (2e-3, 2e-3, 1e-3), "evaluated": 64,
    "text": 1_000_000_000,
}  # fmt: skip


def decoder_config(options: argparse.Namespace) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=WORDS,
        hidden_size=options.hidden,
        intermediate_size=options.hidden * 11 // 4,
        num_hidden_layers=options.layers,
        num_attention_heads=options.heads,
        num_key_value_heads=options.heads,
        max_position_embeddings=2 * options.length,
        tie_word_embeddings=True,
        bos_token_id=END,
        eos_token_id=END,
        pad_token_id=END,
        use_cache=False,  # training needs none; `generate` asks for its own
    )


def slimmable(config: LlamaConfig, options: argparse.Namespace, low: float) -> nn.Module:
    """A new decoder for all widths from `low`; from 1.0, for its own width alone."""
    torch.manual_seed(options.seed)
    model = LlamaForCausalLM(config)
    tokens = torch.randint(1, WORDS, (2, 16))
    plan = aw.plan(model, input_ids=tokens)
    if options.narrow != "all":
        plan.only(*options.narrow.split(","))
    divisor = options.hidden // options.heads
    return aw.slimmable(model, plan, aw.WidthRange(low, 1.0, divisor), allow_fixed=True)


def rate_at(step: int, steps: int) -> float:
    """A short warm-up, then half a cosine down to a tenth of the rate."""
    warm = max(1, steps // 20)
    if step < warm:
        return (step + 1) / warm
    return 0.55 + 0.45 * math.cos(math.pi * (step - warm) / max(1, steps - warm))


def train(model: nn.Module, rows: Rows, options: argparse.Namespace, name: str) -> None:
    """Train the network; with a folder, from the last checkpoint of its name."""
    path = None if options.folder is None else options.folder / f"{name}.pt"
    device = torch.device(options.device)
    model.to(device)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=options.rate, betas=(0.9, 0.95), weight_decay=0.1
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: rate_at(step, options.steps)
    )
    # A network of one width is trained like any other: on the next byte alone.
    is_alone = aw.plan_of(model).widths.low == 1.0
    step = aw.SandwichStep(
        model,
        optimizer,
        aw.TokenLoss(shift=True),
        widths=aw.Sampling("fixed", widths=(1.0,)) if is_alone else 4,
        weights="paper" if is_alone else "balanced",
        truth=0.0 if is_alone else options.truth,
        seed=options.seed,
        autocast="auto",
        engine=options.engine,
        after_backward=lambda: nn.utils.clip_grad_norm_(model.parameters(), 1.0),
    )
    if path is not None and path.exists():
        kept = torch.load(path, map_location=device, weights_only=True)
        _check_same(kept["options"], options, path)
        model.load_state_dict(kept["model"])
        optimizer.load_state_dict(kept["optimizer"])
        schedule.load_state_dict(kept["schedule"])
        step.load_state_dict(kept["step"])
    while step.count < options.steps:
        tokens, targets = rows.batch(step.count, options.batch, options.seed)
        result = step({"input_ids": tokens.to(device)}, targets.to(device))
        schedule.step()
        is_last = step.count == options.steps
        if step.count % max(1, options.steps // 10) == 0 or is_last:
            losses = zip(result.fractions, result.losses, strict=True)
            shown = ", ".join(f"{loss.item():.2f} at {width:.2f}" for width, loss in losses)
            print(f"{name}: step {step.count} of {options.steps}, loss {shown}", flush=True)
        if path is not None and (step.count % options.save_every == 0 or is_last):
            state = {"model": model, "optimizer": optimizer, "schedule": schedule, "step": step}
            kept = {key: part.state_dict() for key, part in state.items()}
            kept["options"] = _shaping(options)
            write_atomically(path, partial(torch.save, kept))


def _shaping(options: argparse.Namespace) -> dict[str, Any]:
    """What a run must have in common with the one that it continues."""
    names = ("hidden", "layers", "heads", "length", "batch", "steps", "rate", "narrow", "seed")
    names += ("tune", "text", "truth")
    return {name: getattr(options, name) for name in names}


def _check_same(before: dict[str, Any], options: argparse.Namespace, path: Path) -> None:
    other = {name: value for name, value in _shaping(options).items() if before[name] != value}
    if other:
        raise SystemExit(f"{path} was trained with other options than {other}: use another folder")


@torch.no_grad()
def perplexity(model: nn.Module, rows: Rows, options: argparse.Namespace) -> dict[str, float]:
    """Of a byte of the held-out files."""
    loss, total, count = aw.TokenLoss(shift=True), 0.0, 0
    for tokens, targets in rows.spread(options.evaluated, options.batch):
        kept = int((targets[:, 1:] >= 0).sum())
        targets = targets.to(options.device)
        total += loss(model(input_ids=tokens.to(options.device)), targets).item() * kept
        count += kept
    return {"perplexity": math.exp(total / count)}


def write(model: Any, options: argparse.Namespace, count: int = 80) -> str:
    """What the network writes after the prompt at its present width."""
    torch.manual_seed(options.seed)
    prompt = torch.tensor([list(PROMPT)], device=options.device)
    written = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=min(count, 2 * options.length - len(PROMPT)),
        do_sample=True,
        temperature=0.8,
        use_cache=True,
    )
    return bytes(written[0].tolist()).replace(b"\0", b"").decode("utf-8", "replace")


def measured(
    options: argparse.Namespace, train_rows: Rows, test_rows: Rows
) -> tuple[nn.Module, list[Spectrum]]:
    """The slimmable network, and the perplexities of it and of those trained alone."""

    def evaluate(network: nn.Module) -> dict[str, float]:
        return perplexity(network, test_rows, options)

    config = decoder_config(options)
    model = slimmable(config, options, WIDTHS[0])
    parameters = sum(p.numel() for p in model.parameters())
    share = aw.plan_of(model).elastic_share()
    print(f"{parameters:,} parameters; {share:.0%} of the multiply-adds narrow")
    spectra = []
    if options.networks != "alone":
        train(model, train_rows, options, "slimmable")
        spectra.append(aw.spectrum(model, evaluate, WIDTHS, name="slimmable", progress=False))
    rates = options.alone_rates or [options.rate] * len(options.alone)
    pairs = [] if options.networks == "slimmable" else zip(options.alone, rates, strict=True)
    for width, rate in pairs:
        # The configuration of the extracted network builds one of the same sizes.
        small: Any = aw.extract(model, width)
        alone = slimmable(LlamaConfig(**small.config.to_dict()), options, 1.0)
        own = argparse.Namespace(**{**vars(options), "rate": rate})
        train(alone, train_rows, own, f"alone at {width}")
        one = aw.spectrum(alone, evaluate, [1.0], name="alone", kind="i", progress=False)
        spectra.append(replace(one, points=(replace(one.points[0], width=width),)))
    return model, [replace(one, described=METRICS) for one in spectra]


def show(spectra: list[Spectrum], folder: Path | None) -> None:
    print("network     width  parameters  perplexity")
    for spectrum in spectra:
        for point in spectrum.points:
            value = point.metrics["perplexity"]
            print(f"{spectrum.name:10}  {point.width:<5}  {point.parameters:>10,}  {value:.3f}")
    if folder is None:
        return
    from anywidth.app.showing.plots import plot_spectra
    from anywidth.measuring.spectra import joined

    data = json.dumps([spectrum.to_json() for spectrum in spectra], indent=1)
    (folder / "perplexities.json").write_text(data)
    for series in joined(spectra):
        series.to_csv(folder / f"{series.name}.csv")
    plot_spectra(spectra, folder / "spectrum.png", title="A decoder of Python source code")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--large", action="store_true", help="the defaults of the GPU run")
    parser.add_argument("--narrow", default="all", help="all, or roles such as mlp or heads,mlp")
    parser.add_argument("--alone", type=float, nargs="*", help="widths to train alone")
    parser.add_argument("--networks", default="both", choices=["both", "slimmable", "alone"])
    parser.add_argument(
        "--tune", action="store_true", help="evaluate on other files, which training leaves out"
    )
    parser.add_argument("--folder", type=Path, help="keeps checkpoints and results")
    parser.add_argument(
        "--truth", type=float, default=0.0, help="share of true labels for narrower widths"
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--engine", default="eager", choices=["eager", "graphs", "auto"])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save-every", type=int, default=500, help="steps between checkpoints")
    for name in ("hidden", "layers", "heads", "length", "batch", "steps", "evaluated", "text"):
        parser.add_argument(f"--{name}", type=int)
    parser.add_argument("--rate", type=float, help="the highest learning rate")
    parser.add_argument(
        "--alone-rates", type=float, nargs="*", help="those of --alone, if they are not --rate"
    )
    options = parser.parse_args(arguments)
    if options.alone is not None and options.alone_rates is None:
        options.alone_rates = []  # the defaults are those of other widths
    for name, value in (LARGE if options.large else SMALL).items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    if options.alone_rates and len(options.alone_rates) != len(options.alone):
        parser.error(
            f"--alone-rates has {len(options.alone_rates)} rates and --alone has "
            f"{len(options.alone)} widths: give one rate for each width"
        )
    if options.folder is not None:
        options.folder.mkdir(parents=True, exist_ok=True)
    train_files, test_files = python_files(options.text, options.tune)
    size = sum(map(len, train_files)) / 1e6
    print(f"{len(train_files)} files ({size:.1f} MB) to train on, {len(test_files)} held out")
    rows = (Rows(train_files, options.length), Rows(test_files, options.length))
    model, spectra = measured(options, *rows)
    show(spectra, options.folder)
    if options.networks == "alone":
        return
    model.eval()
    for width in WRITTEN:
        with aw.at_width(model, width):
            print(f"\nwidth {width} writes:\n{write(model, options)}")


if __name__ == "__main__":
    main()
