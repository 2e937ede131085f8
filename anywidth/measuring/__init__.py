"""The cost of a width, and its accuracy."""
