"""The native layer's door: a Context over a loaded Engine, and the runs of steps behind it."""

from genbatch.nif.context.context import Context

__all__ = ["Context"]
