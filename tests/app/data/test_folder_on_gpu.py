"""Image folders on a GPU: the same images as on a CPU."""

from pathlib import Path

import pytest
import torch

from anywidth.app.data.folder import FolderLoader
from anywidth.app.data.folder_augment import FolderAugmentation
from anywidth.app.data.image_files import scan_split

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


@pytest.mark.parametrize("augmentation", [None, FolderAugmentation(lighting=0.1)])
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_gpu_augments_as_a_cpu_does(
    image_folder: Path, augmentation: FolderAugmentation | None
) -> None:
    files = scan_split(image_folder, "train")
    options = {"batch_size": 5, "size": 16, "resize": 20, "workers": 1, "shuffle": True}
    on_cpu, on_gpu = (
        FolderLoader(files, augmentation=augmentation, device=device, **options).epoch(2)
        for device in ("cpu", "cuda")
    )
    for (images, labels), (others, other_labels) in zip(on_cpu, on_gpu, strict=True):
        assert torch.equal(labels, other_labels.cpu())
        torch.testing.assert_close(others.cpu(), images, rtol=0, atol=1e-4)
