"""What every operation does to the axes of its tensors."""
