"""From PyTorch to ONNX: how a network is called, and its graphs at many widths."""
