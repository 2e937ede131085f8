"""Every table and figure of the paper, repeated by `anywidth study NAME`."""
