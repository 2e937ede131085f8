"""Data sets, loaders and augmentation."""
