"""What the kernel is asked about memory, and of it: huge pages, pages that are present, and how much is left."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import re
from pathlib import Path
from typing import NamedTuple

#: A handle of the C library, whose calls run without the GIL.
LIBC = ctypes.CDLL(None, use_errno=True)
LIBC.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)

#: What ``Region.pages`` says: the usual size, or one of the two kinds of huge pages.
SMALL = f"{mmap.PAGESIZE >> 10}k"
TRANSPARENT = "transparent huge"
HUGE = "huge"

# Of madvise(2); Python's mmap module lacks the second.
_HUGEPAGE = 14
_POPULATE_WRITE = 23

# Transparent ones and reserved ones, which are "private" while one process alone maps them.
_HUGE_IN_SMAPS = ("ShmemPmdMapped:", "FilePmdMapped:", "Shared_Hugetlb:", "Private_Hugetlb:")

_PROC = Path("/proc")
_CGROUPS = Path("/sys/fs/cgroup")
_TRANSPARENT = Path("/sys/kernel/mm/transparent_hugepage")


class Available(NamedTuple):
    """How much memory can be used before something has to go, and what bounds it.

    nbytes: bytes, 0 or above. bound: for people: ``the machine``, or the cgroup's path.
    """

    nbytes: int
    bound: str


def populate(address: int, size: int) -> None:
    """Make the pages of ``size`` bytes from ``address`` on present and writable; their content does not change.

    The calling thread runs without the GIL, and holds the process's lock on its address space (read) meanwhile.

    Raises:
        OSError: ``EINVAL`` where the kernel cannot do this (before 5.14); ``ENOMEM``, ``EFAULT``, ``EHWPOISON``:
            there is no memory, or no sound memory, for some page. Pages before that one are present.
    """
    while LIBC.madvise(address, size, _POPULATE_WRITE):
        code = ctypes.get_errno()
        if code != errno.EINTR:
            raise OSError(code, os.strerror(code))


def advise_huge(address: int, size: int) -> bool:
    """Ask for transparent huge pages; whether the kernel took the advice."""
    return not LIBC.madvise(address, size, _HUGEPAGE)


def transparent_huge_pages(settings: Path = _TRANSPARENT) -> bool:
    """Whether a memory file that asks for transparent huge pages may get them, of whatever size."""
    overall = _chosen(settings / "shmem_enabled")
    # Since 6.10 each size has a setting of its own, which may be ``inherit``.
    sizes = [_chosen(path) for path in settings.glob("hugepages-*/shmem_enabled")] or ["inherit"]
    found = {overall if size == "inherit" else size for size in sizes}
    return overall != "deny" and not found.isdisjoint(("always", "within_size", "advise", "force"))


def huge_bytes(address: int) -> int:
    """How many bytes of the mapping that starts at ``address`` are mapped by huge pages in this process now.

    The kernel walks the whole mapping: milliseconds per GB if it has small pages.
    """
    found, start = 0, f"{address:x}-"
    within = False
    with (_PROC / "self" / "smaps").open() as lines:
        for line in lines:
            if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
                within = line.startswith(start)
            elif within and line.startswith(_HUGE_IN_SMAPS):
                found += int(line.split()[1]) << 10
    return found


def huge_page_bytes() -> int:
    """The default size of reserved huge pages; 0 where there are none."""
    return _meminfo().get("Hugepagesize", 0)


def huge_page_counts() -> tuple[int, int]:
    """How many huge pages of the default size the machine has, and how many of them nobody uses or has reserved."""
    found = _meminfo()
    return found.get("HugePages_Total", 0), found.get("HugePages_Free", 0) - found.get("HugePages_Rsvd", 0)


def available(proc: Path = _PROC, cgroups: Path = _CGROUPS) -> Available | None:
    """What is left of memory: the least of the machine's and that of each cgroup this process is in.

    None where the system does not say. Page cache that nobody used lately counts as available.
    """
    found = []
    machine = _meminfo(proc).get("MemAvailable")
    if machine is not None:
        found.append(Available(machine, "the machine"))
    for group in _memory_cgroups(proc, cgroups):
        left = _left_in_cgroup(group)
        if left is not None:
            found.append(Available(left, str(group)))
    return min(found, default=None)


def _memory_cgroups(proc: Path, cgroups: Path) -> list[Path]:
    """The folders of this process's cgroup for memory and of all above it, of version 1 or 2."""
    folders = []
    for line in _read(proc / "self" / "cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        root = cgroups / "memory" if controllers else cgroups
        # In a container the path may be one of the host, which is not there: then what is above it is.
        inner = root / path.lstrip("/")
        folders += [folder for folder in (inner, *inner.parents) if folder == root or root in folder.parents]
    return folders


def _left_in_cgroup(group: Path) -> int | None:
    for limit, usage, reclaimable in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        allowed, used = _read(group / limit).strip(), _read(group / usage).strip()
        if allowed.isdigit() and used.isdigit():  # version 2 says "max" where there is no limit
            stat = re.search(rf"^{reclaimable} (\d+)$", _read(group / "memory.stat"), re.MULTILINE)
            return max(0, int(allowed) - int(used) + int(stat[1] if stat else 0))
    return None


def _meminfo(proc: Path = _PROC) -> dict[str, int]:
    """Bytes, or for what has no unit, counts."""
    found = re.findall(r"^(\w+): +(\d+)( kB)?$", _read(proc / "meminfo"), re.MULTILINE)
    return {name: int(number) << (10 if unit else 0) for name, number, unit in found}


def _chosen(setting: Path) -> str:
    """``b`` of a setting that reads ``a [b] c``; empty when there is no such setting."""
    match = re.search(r"\[(\w+)\]", _read(setting))
    return match[1] if match else ""


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
