"""How a training step runs its widths: plainly, or as CUDA graphs."""
