"""The public names of `anywidth`, loaded when the first of them is used."""

from anywidth import models
from anywidth._version import __version__
from anywidth.deploying.bundling import export_bundle
from anywidth.deploying.saving import load, save
from anywidth.errors import AnywidthError
from anywidth.measuring.cost import Latency, latency, macs, parameter_count
from anywidth.measuring.spectra import Spectrum, spectrum
from anywidth.planning.groups import ChannelGroup, Plan
from anywidth.planning.trace import plan
from anywidth.searching.budgets import Budget
from anywidth.searching.channel_search import search
from anywidth.searching.found import SearchResult
from anywidth.searching.latency_table import LatencyTable, measure_latencies
from anywidth.slimming.convert import at_width, plan_of, set_width, slimmable
from anywidth.slimming.extraction import extract
from anywidth.slimming.replicas import replica
from anywidth.slimming.sorting import sort_channels
from anywidth.training.calibration import calibrate, calibrated_widths
from anywidth.training.distillation import soft_cross_entropy
from anywidth.training.norm_tuning import tune_norms
from anywidth.training.sampling import Sampling, sample_widths
from anywidth.training.statistics_state import load_statistics_state, statistics_state
from anywidth.training.step import SandwichStep, StepResult
from anywidth.training.token_loss import TokenLoss
from anywidth.training.weight_average import WeightAverage
from anywidth.width import ChannelConfig, WidthRange

__all__ = [
    "AnywidthError",
    "Budget",
    "ChannelConfig",
    "ChannelGroup",
    "Latency",
    "LatencyTable",
    "Plan",
    "Sampling",
    "SandwichStep",
    "SearchResult",
    "Spectrum",
    "StepResult",
    "TokenLoss",
    "WeightAverage",
    "WidthRange",
    "__version__",
    "at_width",
    "calibrate",
    "calibrated_widths",
    "export_bundle",
    "extract",
    "latency",
    "load",
    "load_statistics_state",
    "macs",
    "measure_latencies",
    "models",
    "parameter_count",
    "plan",
    "plan_of",
    "replica",
    "sample_widths",
    "save",
    "search",
    "set_width",
    "slimmable",
    "soft_cross_entropy",
    "sort_channels",
    "spectrum",
    "statistics_state",
    "tune_norms",
]
