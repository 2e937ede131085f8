"""The zoo: plain networks that know nothing about widths."""

from anywidth.models.atari_cnn import atari_cnn, minatar_cnn, mlp_policy
from anywidth.models.mobilenet_v1 import mobilenet_v1
from anywidth.models.mobilenet_v2 import mobilenet_v2
from anywidth.models.wdsr import wdsr

__all__ = ["atari_cnn", "minatar_cnn", "mlp_policy", "mobilenet_v1", "mobilenet_v2", "wdsr"]
