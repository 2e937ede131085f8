"""Layers that train faster on a GPU."""
