"""Does a native call release the interpreter lock?"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable


def steps_during(call: Callable[[], object]) -> int:
    """How often another thread of Python got to run while `call` ran; 0 when it holds the lock throughout.

    No thread is made to hand over the lock within a second, so that none runs between the counting and
    the call.
    """
    interval = sys.getswitchinterval()
    steps, ended = 0, threading.Event()

    def step() -> None:
        nonlocal steps
        while not ended.is_set():
            steps += 1
            time.sleep(1e-4)

    stepper = threading.Thread(target=step)
    sys.setswitchinterval(1.0)
    try:
        stepper.start()
        while steps < 2:
            time.sleep(1e-3)
        before = steps
        call()
        return steps - before
    finally:
        sys.setswitchinterval(interval)
        ended.set()
        stepper.join()
