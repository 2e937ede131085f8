"""torchvision's detectors around a backbone of three small stages, for images of 64 pixels."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torchvision.models.detection import FCOS, FasterRCNN, KeypointRCNN, RetinaNet
from torchvision.models.detection.anchor_utils import AnchorGenerator, DefaultBoxGenerator
from torchvision.models.detection.backbone_utils import BackboneWithFPN
from torchvision.models.detection.keypoint_rcnn import KeypointRCNNHeads, KeypointRCNNPredictor
from torchvision.models.detection.ssd import SSD, SSDHead
from torchvision.models.detection.ssdlite import SSDLiteHead
from torchvision.ops import MultiScaleRoIAlign

SIZE = 64
IMAGES = [torch.rand(3, SIZE, SIZE, generator=torch.Generator().manual_seed(n)) for n in (0, 1)]
TARGETS = [
    {
        "boxes": torch.tensor([[4.0, 5.0, 40.0, 50.0]]),
        "labels": torch.tensor([1]),
        "keypoints": torch.tensor([[[10.0, 10.0, 1.0], [30.0, 40.0, 1.0]]]),
    }
    for _ in IMAGES
]
HEADS = ["rpn.head", "roi_heads.box_roi_pool", "roi_heads.box_head", "roi_heads.box_predictor"]
POINTS = ["roi_heads.keypoint_roi_pool", "roi_heads.keypoint_head", "roi_heads.keypoint_predictor"]


def stage(before: int, after: int, stride: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(before, after, 3, stride, 1, bias=False), nn.BatchNorm2d(after), nn.ReLU()
    )


def pyramid() -> BackboneWithFPN:
    body = nn.Sequential(OrderedDict(a=stage(3, 16, 4), b=stage(16, 32, 2), c=stage(32, 48, 2)))
    return BackboneWithFPN(body, {"b": "0", "c": "1"}, [32, 48], 32)


class Features(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Sequential(stage(3, 16, 4), stage(16, 32, 2)), stage(32, 48, 2)
        self.out_channels = 48

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        y = self.first(x)
        return OrderedDict([("0", y), ("1", self.second(y))])


SCALE = {"min_size": SIZE, "max_size": SIZE}
FEW = {"rpn_pre_nms_top_n_test": 16, "rpn_post_nms_top_n_test": 8, "box_score_thresh": 0.0,
       "rpn_pre_nms_top_n_train": 16, "rpn_post_nms_top_n_train": 8}  # fmt: skip


def _anchors(shapes: int) -> AnchorGenerator:
    return AnchorGenerator(((16,), (32,), (64,)), ((0.5, 1.0, 2.0)[:shapes],) * 3)


def faster_rcnn() -> nn.Module:
    pool = MultiScaleRoIAlign(["0", "1"], 4, 2)
    return FasterRCNN(pyramid(), 3, rpn_anchor_generator=_anchors(3), box_roi_pool=pool,
                      **SCALE, **FEW)  # fmt: skip


def keypoint_rcnn() -> nn.Module:
    pools = [MultiScaleRoIAlign(["0", "1"], size, 2) for size in (4, 6)]
    return KeypointRCNN(
        pyramid(), 2, num_keypoints=None, rpn_anchor_generator=_anchors(3), box_roi_pool=pools[0],
        keypoint_roi_pool=pools[1], keypoint_head=KeypointRCNNHeads(32, (32, 32)),
        keypoint_predictor=KeypointRCNNPredictor(32, 2), **SCALE, **FEW,
    )  # fmt: skip


def retinanet() -> nn.Module:
    return RetinaNet(pyramid(), 3, anchor_generator=_anchors(3), score_thresh=0.0, **SCALE)


def fcos() -> nn.Module:
    return FCOS(pyramid(), 3, anchor_generator=_anchors(1), score_thresh=0.0, **SCALE)


def ssdlite() -> nn.Module:
    boxes = DefaultBoxGenerator([[2], [2]])
    head = SSDLiteHead([32, 48], boxes.num_anchors_per_location(), 3, nn.BatchNorm2d)
    return SSD(Features(), boxes, (SIZE, SIZE), 3, head=head, score_thresh=0.0)


def ssd() -> nn.Module:
    boxes = DefaultBoxGenerator([[2], [2]])
    head = SSDHead([32, 48], boxes.num_anchors_per_location(), 3)
    return SSD(Features(), boxes, (SIZE, SIZE), 3, head=head, score_thresh=0.0)


# How each is built, and the parts of it that narrow.
DETECTORS: dict[str, tuple[Callable[[], nn.Module], list[str]]] = {
    "Faster R-CNN": (faster_rcnn, ["backbone", *HEADS]),
    "Keypoint R-CNN": (keypoint_rcnn, ["backbone", *HEADS, *POINTS]),
    "RetinaNet": (retinanet, ["backbone", "head"]),
    "FCOS": (fcos, ["backbone", "head"]),
    "SSD": (ssd, ["backbone", "head"]),
    "SSDlite": (ssdlite, ["backbone", "head"]),
}


def built(name: str) -> nn.Module:
    torch.manual_seed(0)
    return DETECTORS[name][0]().eval()
