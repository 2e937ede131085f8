"""The tasks of the paper, one folder each."""
