"""A run's folder: settings, checkpoints, log, progress, the loop."""
