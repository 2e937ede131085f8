"""One trained network, run at any width."""

from anywidth import models
from anywidth._version import __version__
from anywidth.convert import at_width, plan_of, set_width, slimmable
from anywidth.cost import Latency, latency, macs, parameter_count
from anywidth.distillation import soft_cross_entropy
from anywidth.errors import AnywidthError
from anywidth.extraction import extract
from anywidth.groups import ChannelGroup, Plan
from anywidth.sampling import Sampling, sample_widths
from anywidth.saving import load, save
from anywidth.spectra import Spectrum, spectrum
from anywidth.statistics import calibrate, calibrated_widths
from anywidth.step import SandwichStep, StepResult
from anywidth.trace import plan
from anywidth.width import ChannelConfig, WidthRange

__all__ = [
    "AnywidthError",
    "ChannelConfig",
    "ChannelGroup",
    "Latency",
    "Plan",
    "Sampling",
    "SandwichStep",
    "Spectrum",
    "StepResult",
    "WidthRange",
    "__version__",
    "at_width",
    "calibrate",
    "calibrated_widths",
    "extract",
    "latency",
    "load",
    "macs",
    "models",
    "parameter_count",
    "plan",
    "plan_of",
    "sample_widths",
    "save",
    "set_width",
    "slimmable",
    "soft_cross_entropy",
    "spectrum",
]
