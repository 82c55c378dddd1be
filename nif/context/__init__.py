"""The native layer's interface: a Context over a loaded Engine, and the runs of steps."""

from genbatch.nif.context.context import Context

__all__ = ["Context"]
