"""Training images of a folder, decoded by the JPEG hardware of a GPU (nvJPEG, through torchvision).

Worker processes read plain JPEG files, look at their headers and draw their crops. A thread of the
training process has whole groups decoded, and one kernel crops and resizes them. All other files
are decoded by the workers, as without a GPU.
"""

import io
from functools import cache

import torch

from anywidth.training.gpu.kernels.eligibility import triton_installed

DECODES_ON_GPU = False
"""Off, because it has never run on a GPU: neither its speed nor its safety beside CUDA graphs is
measured. `python3 -m benchmarks.loader --decode-on-gpu --workers 16` compares both ways."""


def obstacle(device: torch.device) -> str | None:
    """Why training images cannot be decoded on this device, or None."""
    return _missing(device) if DECODES_ON_GPU else "decoding on a GPU is switched off"


@cache
def _missing(device: torch.device) -> str | None:
    if device.type != "cuda":
        return f"{device} is not a CUDA device"
    if not triton_installed():
        return "Triton is not installed"
    from PIL import Image

    from anywidth.app.data.decoding_on_gpu.jpeg_batches import decode_jpegs

    file = io.BytesIO()
    Image.new("RGB", (64, 64)).save(file, "JPEG")
    torch.cuda.synchronize(device)  # see JpegBatches: the decoder waits for no stream
    try:
        decode_jpegs([torch.frombuffer(bytearray(file.getvalue()), dtype=torch.uint8)], device)
    except Exception as error:  # torchvision without nvJPEG, or a library that is missing
        return f"torchvision cannot decode on {device} ({str(error).splitlines()[0]})"
    return None
