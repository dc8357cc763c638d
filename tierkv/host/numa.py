"""On which NUMA nodes the pages of the host region lie: mbind(2), before the first page is there.

The policy belongs to the memory file, not to a mapping: it holds for whichever process makes a page present. It is a
preference: where a node is full, pages come from others. A strict policy would have a process killed for memory while
other nodes have some.
"""

from __future__ import annotations

import ctypes
import os
import platform
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from tierkv.errors import ConfigError
from tierkv.host.memory import LIBC

_FIELD = "numa"
# Of mbind(2), which the C library has no function for.
_CALL = {"x86_64": 237, "aarch64": 235}
_PREFERRED = 1
_INTERLEAVE = 3

_NODES = Path("/sys/devices/system/node")
_CPUS = Path("/sys/devices/system/cpu")


class Placement(NamedTuple):
    """Where pages shall lie: turn by turn on ``nodes``, or on the one node.

    nodes: numbers, ascending; empty: wherever the kernel likes. reason: why it is empty.
    """

    nodes: tuple[int, ...]
    reason: str = ""


def plan(numa: str, nodes: Sequence[int], here: int) -> Placement:
    """What the field ``numa`` means on a machine.

    Args:
        nodes: those that have memory which this process may use. here: the one that this thread runs on.

    Raises:
        ConfigError: it means nothing, or names a node that is not one of ``nodes``.
    """
    accepted = f"off, interleave, local, or a list of nodes, of which there are here: {_text(nodes) or 'none'}"
    if numa == "off":
        return Placement((), "off")
    if numa in ("interleave", "local"):
        wanted = list(nodes) if numa == "interleave" else [here]
    elif re.fullmatch(r"\d+(-\d+)?(,\d+(-\d+)?)*", numa):
        wanted = parse_list(numa)
        missing = sorted(set(wanted) - set(nodes or [0]))
        if missing:
            raise ConfigError(_FIELD, f"node {missing[0]} is not here, or not for this process", accepted)
    else:
        raise ConfigError(_FIELD, f"{numa!r} is not understood", accepted)
    if len(nodes) < 2:
        return Placement((), "nothing to do: the machine has one node")
    return Placement(tuple(wanted))


def place(address: int, size: int, placement: Placement) -> str:
    """Let the pages of a mapping, none of which is present yet, lie as planned. Says, for people, what was done."""
    if not placement.nodes:
        return placement.reason
    name = "interleaved on nodes" if len(placement.nodes) > 1 else "on node"
    try:
        bind(address, size, placement.nodes)
    except OSError as error:
        return f"nothing was done: {error.strerror} (mbind)"
    return f"{name} {_text(placement.nodes)}"


def bind(address: int, size: int, nodes: Sequence[int]) -> None:
    """mbind(2): pages lie on ``nodes`` turn by turn, or on the one node.

    Raises:
        OSError: this system has no such call, or it may not be used here.
    """
    number = _CALL.get(platform.machine())
    if number is None:
        raise OSError(0, f"no call is known for {platform.machine()}")
    words = (ctypes.c_ulong * (max(nodes) // 64 + 1))()
    for node in nodes:
        words[node // 64] |= 1 << node % 64
    mode = _INTERLEAVE if len(nodes) > 1 else _PREFERRED
    # The kernel takes one less than it is given for the number of bits.
    arguments = (address, size, mode, ctypes.addressof(words), len(words) * 64 + 1, 0)
    if LIBC.syscall(ctypes.c_long(number), *map(ctypes.c_ulong, arguments)):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


def nodes_with_memory() -> list[int]:
    """The nodes that have memory which this process may use; empty where the system knows no nodes."""
    try:
        present = parse_list((_NODES / "has_memory").read_text().strip())
        allowed = re.search(r"^Mems_allowed_list:\s*(\S+)$", Path("/proc/self/status").read_text(), re.MULTILINE)
    except (OSError, ValueError):
        return []
    return [node for node in present if allowed is None or node in parse_list(allowed[1])]


def this_node() -> int:
    """The node of the processor that the calling thread runs on now; 0 where that is not known."""
    found = [path.name for path in (_CPUS / f"cpu{LIBC.sched_getcpu()}").glob("node[0-9]*")]
    return int(found[0].removeprefix("node")) if found else 0


def parse_list(text: str) -> list[int]:
    """``0-2,5`` → 0, 1, 2, 5.

    Raises:
        ValueError: it is not such a list.
    """
    found: set[int] = set()
    for part in text.split(",") if text else ():
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return sorted(found)


def _text(nodes: Sequence[int]) -> str:
    return ", ".join(map(str, nodes))
