"""Layers of converted networks that run on the kernels; `anywidth.fast_layers` puts them in."""
