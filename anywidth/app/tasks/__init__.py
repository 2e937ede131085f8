"""The tasks of the paper: one file a task that reads from top to bottom."""
