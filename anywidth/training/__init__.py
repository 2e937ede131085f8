"""One training step over all widths, and statistics for any width after it."""
