"""What leaves the process: saved and exported networks."""
