"""Run a network at any of its widths from one file, without PyTorch."""

from anywidth_runtime import _working_folder  # noqa: F401 - before all others
from anywidth_runtime._version import __version__
from anywidth_runtime.contents import Row, TensorInfo
from anywidth_runtime.errors import BundleError, RequestError
from anywidth_runtime.governor import Governor
from anywidth_runtime.governor_limits import Ceiling
from anywidth_runtime.governor_menu import Choice
from anywidth_runtime.network import Network, open
from anywidth_runtime.ray_serving import ray_app

__all__ = [
    "BundleError",
    "Ceiling",
    "Choice",
    "Governor",
    "Network",
    "RequestError",
    "Row",
    "TensorInfo",
    "__version__",
    "open",
    "ray_app",
]
