"""What the control groups of this process allow: CPU quota, cpuset, memory, and the throttling counter.

Version 1 has one tree for each controller, version 2 one tree for all; a container shows only its own part of
either. A limit of a parent holds for its children, so every folder up to the mount point is read and the
tightest value counts. Nothing here knows threads or cores.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

UNLIMITED_NBYTES = 1 << 60  # version 1 writes "no limit" as a number near 2**63


@dataclass(frozen=True)
class CgroupLimits:
    """Limits as the cgroup files state them; None is "no limit" or "not told"."""

    quota_cpus: float | None
    cpuset: str | None
    stat_file: Path | None

    def num_throttled(self) -> int | None:
        """How often the kernel has stopped this group because its quota was used up; None if not told."""
        for line in (_read(self.stat_file) or "").splitlines() if self.stat_file else ():
            name, _, value = line.partition(" ")
            if name == "nr_throttled" and value.isdigit():
                return int(value)
        return None


def read_cgroup_limits(root: str | Path = "/") -> CgroupLimits:
    """Read the limits of the calling process from ``/proc`` and ``/sys`` under ``root``."""
    root = Path(root)
    quotas: list[float] = []
    cpuset: str | None = None
    stat_file: Path | None = None
    for folder in _folders(root, "cpu"):
        quota = _quota_v2(folder) if (folder / "cpu.max").exists() else _quota_v1(folder)
        quotas += [] if quota is None else [quota]
        if stat_file is None and "nr_throttled" in (_read(folder / "cpu.stat") or ""):
            stat_file = folder / "cpu.stat"
    for folder in _folders(root, "cpuset"):
        names = ("cpuset.cpus.effective", "cpuset.effective_cpus", "cpuset.cpus")
        cpuset = cpuset or next(filter(None, (_read(folder / name) for name in names)), None)
    return CgroupLimits(min(quotas, default=None), cpuset, stat_file)


def read_memory_limit(root: str | Path = "/") -> int | None:
    """Bytes of memory that the groups of the calling process may use in all; None is no limit."""
    texts = [
        _read(folder / name)
        for folder in _folders(Path(root), "memory")
        for name in ("memory.max", "memory.limit_in_bytes")
    ]
    limits = [int(text) for text in texts if text and text.isdigit()]
    return min((limit for limit in limits if limit < UNLIMITED_NBYTES), default=None)


def _read(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None


def _quota_v2(folder: Path) -> float | None:
    quota, _, period = (_read(folder / "cpu.max") or "").partition(" ")
    return int(quota) / int(period or 100_000) if quota.isdigit() else None


def _quota_v1(folder: Path) -> float | None:
    quota, period = _read(folder / "cpu.cfs_quota_us") or "", _read(folder / "cpu.cfs_period_us") or ""
    return int(quota) / int(period) if quota.isdigit() and period.isdigit() and int(period) else None


def _folders(root: Path, controller: str) -> list[Path]:
    """Folders of the process's group for a controller, from its own up to the mount point."""
    group = _groups(root)
    folders: list[Path] = []
    for mount_point, mount_root, names in _mounts(root):
        path = group.get(controller if names else "")
        if path is None or (names and controller not in names):
            continue
        inside = _inside_mount(path, mount_root)
        folder = mount_point / inside if (mount_point / inside).is_dir() else mount_point
        folders += [folder]
        while folder != mount_point:
            folder = folder.parent
            folders += [folder]
    return folders


def _inside_mount(path: str, mount_root: str) -> str:
    """The group's path below the mount point; a group outside of what is mounted is seen as its top."""
    if mount_root != "/" and (path == mount_root or path.startswith(mount_root + "/")):
        path = path[len(mount_root) :]
    return "" if ".." in path.split("/") else path.strip("/")


def _groups(root: Path) -> dict[str, str]:
    """Path of the process's group by controller; version 2's under the empty name."""
    groups: dict[str, str] = {}
    for line in (_read(root / "proc/self/cgroup") or "").splitlines():
        _, _, rest = line.partition(":")
        names, _, path = rest.partition(":")
        groups.update(dict.fromkeys(names.split(","), path))
    return groups


def _mounts(root: Path) -> list[tuple[Path, str, tuple[str, ...]]]:
    """Mounted cgroup trees: mount point, the group at its top, its controllers (none: version 2)."""
    mounts: list[tuple[Path, str, tuple[str, ...]]] = []
    for line in (_read(root / "proc/self/mountinfo") or "").splitlines():
        before, _, after = line.partition(" - ")
        fields, (kind, *more) = before.split(), after.split() or [""]
        if kind in ("cgroup", "cgroup2") and len(fields) >= 5 and more:
            names = () if kind == "cgroup2" else tuple(more[-1].split(","))
            mounts.append((root / fields[4].lstrip("/"), fields[3], names))
    return mounts
