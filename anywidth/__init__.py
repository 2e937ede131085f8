"""One trained network, run at any width."""

from anywidth import models
from anywidth._version import __version__
from anywidth.convert import at_width, plan_of, set_width, slimmable
from anywidth.cost import latency, macs, parameter_count
from anywidth.errors import AnywidthError
from anywidth.extraction import extract
from anywidth.groups import ChannelGroup, Plan
from anywidth.trace import plan
from anywidth.width import ChannelConfig, WidthRange

__all__ = [
    "AnywidthError",
    "ChannelConfig",
    "ChannelGroup",
    "Plan",
    "WidthRange",
    "__version__",
    "at_width",
    "extract",
    "latency",
    "macs",
    "models",
    "parameter_count",
    "plan",
    "plan_of",
    "set_width",
    "slimmable",
]
