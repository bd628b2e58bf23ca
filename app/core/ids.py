"""Names for the numbers that travel through the system."""

from __future__ import annotations

from typing import Annotated, Literal, NewType

import numpy as np
import numpy.typing as npt

RoomId = NewType("RoomId", int)
"""One request's transfer between one prefill and one decode node: 0 <= room < 2**64."""

InstanceId = NewType("InstanceId", str)
"""One life of one node process; a restarted node has a new one."""

Owner = Literal["target", "draft"]
Source = Owner
"""Which model wrote a layer: the main model or its speculative layers."""

PageArray = Annotated[npt.NDArray[np.int64], "page numbers, one dimension"]

MAX_ROOM = 2**64 - 1
