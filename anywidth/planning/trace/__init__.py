"""Tracing: from a network to the groups of channels that shrink together."""

from anywidth.planning.trace.graph import plan

__all__ = ["plan"]
