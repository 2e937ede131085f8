"""Super-resolution."""
