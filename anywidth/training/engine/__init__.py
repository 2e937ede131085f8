"""How a training step runs its widths: eagerly, or as CUDA graphs."""
