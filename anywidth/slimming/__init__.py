"""From a plan to a network that narrows, and from that to plain ones."""
