"""Compare exported networks with the network they came from: error and time.

    python3 -m benchmarks.exported RUN [--out benchmarks/results/exported.json]

RUN is a finished classification run, calibrated at the widths (`anywidth calibrate RUN --widths
0.25,0.5,0.75,1.0`). Each width is written as ONNX and run by onnxruntime over the test images. Then
onnxruntime and the extracted network in PyTorch, both with folded norms, process one image at a
time on one CPU thread. They alternate, and the result is the median ratio of neighbouring passes,
so that a busy machine slows both alike.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch
from onnxruntime import InferenceSession

import anywidth as aw
from anywidth.app.tasks.classification.task import TrainedClassifier, open_trained
from anywidth.deploying.exporting import write_network
from benchmarks.records import circumstances, in_turns, median_ratio, open_session, write_record

WIDTHS = (0.25, 0.5, 0.75, 1.0)


def exported(trained: TrainedClassifier, width: float) -> InferenceSession:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "network.onnx"
        write_network(aw.extract(trained.model, width, fold=True), trained.deployment(), path)
        return open_session(path)


def error_of(trained: TrainedClassifier, session: InferenceSession) -> float:
    """Top-1 error in percent. The file normalises images, so the loader's are denormalised."""
    assert trained.data is not None
    mean, std = (torch.tensor(x).view(-1, 1, 1) for x in (trained.data.mean, trained.data.std))
    wrong = seen = 0
    for images, labels in trained.data.validation:
        pixels = (images * std + mean).contiguous()
        (logits,) = session.run(None, {"images": pixels.numpy()})
        wrong += int((torch.as_tensor(logits).argmax(1) != labels).sum())
        seen += len(labels)
    return 100 * wrong / seen


def timed(
    trained: TrainedClassifier, session: InferenceSession, width: float, repeats: int
) -> dict[str, float]:
    network = trained.deployment().wrap(aw.extract(trained.model, width, fold=True)).eval()
    image = torch.rand(1, *trained.run.state()["input_shape"])
    runs = {
        "onnxruntime_ms": lambda: session.run(None, {"images": image.numpy()}),
        "pytorch_ms": lambda: network(image),
    }
    with torch.inference_mode():
        kept = {name: times[10:] for name, times in in_turns(runs, repeats + 10).items()}
    medians = {name: statistics.median(times) for name, times in kept.items()}
    return {**medians, "ratio": median_ratio(kept["onnxruntime_ms"], kept["pytorch_ms"])}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path, help="a finished classification run")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    parser.add_argument("--repeats", type=int, default=300, help="number of timed images")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    trained = open_trained(arguments.run, "cpu")
    found: dict[str, Any] = {}
    for width in WIDTHS:
        session = exported(trained, width)
        with aw.at_width(trained.model, width):
            own = trained.evaluate(trained.model)["top1_error"]
        found[str(width)] = {
            "top1_error": own,
            "onnx_top1_error": error_of(trained, session),
            **timed(trained, session, width, arguments.repeats),
        }
        print(f"{width:<6} {json.dumps(found[str(width)])}", flush=True)
    about = {**circumstances("cpu", "onnxruntime"), "run": trained.run.settings_data}
    write_record(arguments.out, {**about, "widths": found})


if __name__ == "__main__":
    main()
