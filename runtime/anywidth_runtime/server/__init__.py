"""Serve a bundle over HTTP: the Open Inference Protocol, pictures, metrics and a page."""
