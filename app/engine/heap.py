"""The process's heap: what loading and forwards leave behind is given back to the system.

The C library keeps freed memory for later, per thread. A node needs it rarely: about 30 MB after loading a
model, and 90 MB after a prompt of 1,500 tokens on a small one.
"""

from __future__ import annotations

import ctypes
import gc


def settle() -> None:
    """After start-up: collect, keep what is left out of later collections, give free memory back.

    Modules and models live to the end, and a full collection that looks at them would stop every thread
    for a tenth of a second, in the middle of some request.
    """
    gc.collect()
    gc.freeze()
    give_back()


def give_back() -> None:
    """Give free memory back to the system (glibc; elsewhere nothing). Takes milliseconds; any thread may."""
    try:
        trim = ctypes.CDLL(None).malloc_trim
    except AttributeError:
        return
    trim(0)
