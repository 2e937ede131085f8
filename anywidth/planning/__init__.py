"""From a network to its plan."""
