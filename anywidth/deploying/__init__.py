"""Networks as files: saved and exported."""
