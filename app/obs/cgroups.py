"""How much memory this process's control group allows."""

from __future__ import annotations

from pathlib import Path

_UNLIMITED_BYTES = 1 << 60
"""cgroup v1 writes a number near 2**63 where there is no limit."""


def cgroup_limit(
    membership: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")
) -> int | None:
    """The smallest memory limit of this process's control group and those above it, v2 or v1."""
    limits: list[int] = []
    for line in membership.read_text().splitlines() if membership.exists() else ():
        number, controllers, path = line.split(":", 2)
        if number == "0" and not controllers:
            limits += _limits_up(root, path, "memory.max")
        elif "memory" in controllers.split(","):
            limits += _limits_up(root / "memory", path, "memory.limit_in_bytes")
    return min(limits, default=None)


def _limits_up(mount: Path, path: str, name: str) -> list[int]:
    """Limits from the group up to the mount; inside a container the upper part may not be visible."""
    here, limits = mount / path.strip("/"), []
    for folder in (here, *here.parents):
        if not folder.is_relative_to(mount):
            break
        text = (folder / name).read_text().strip() if (folder / name).exists() else "max"
        if text != "max" and int(text) < _UNLIMITED_BYTES:
            limits.append(int(text))
    return limits
