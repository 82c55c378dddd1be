"""Ends a process whose parent has died, even if the parent had no chance to say so."""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1  # <sys/prctl.h>


def die_with_parent(parent: int) -> None:
    """Has the kernel kill this process when its parent ends; elsewhere than on Linux its sockets' ends must do.

    The kernel means the parent's thread that started this process: that must be one that lasts.

    Args:
        parent: the parent's process id, which it knew before this process could ask.
    """
    if not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it was gone before the kernel was told
        os._exit(1)


def leave_signals_to_parent() -> None:
    """Ignores what a terminal or a service manager sends to all processes: the parent says when to stop, and how."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
