"""What the region's memory is made of, where it lies, and whether there is enough of it."""

from __future__ import annotations

import mmap
import multiprocessing
import re
from pathlib import Path

import pytest

from tierkv.errors import ConfigError
from tierkv.host import memory, numa
from tierkv.host.memory import Available, available, transparent_huge_pages
from tierkv.host.numa import Placement, parse_list, place, plan
from tierkv.host.region import Region, RegionHandle

SIZE = 4 * mmap.PAGESIZE

# ---- huge pages


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.mark.parametrize(
    ("overall", "sizes", "expected"),
    [
        ("always within_size [advise] never deny force", {}, True),
        ("[always] within_size advise never deny force", {}, True),
        ("always within_size advise [never] deny force", {}, False),
        ("always within_size advise never [deny] force", {"2048kB": "[always] inherit advise never"}, False),
        ("always within_size advise [never] deny force", {"2048kB": "always [inherit] advise never"}, False),
        ("always within_size advise [never] deny force", {"64kB": "always inherit [advise] never"}, True),
        ("always within_size [advise] never deny force", {"2048kB": "always [inherit] advise never"}, True),
        ("always within_size [advise] never deny force", {"2048kB": "always inherit advise [never]"}, False),
        ("", {}, False),
    ],
)
def test_the_systems_setting_says_whether_transparent_ones_are_given(
    tmp_path: Path, overall: str, sizes: dict[str, str], expected: bool
) -> None:
    write(tmp_path / "shmem_enabled", overall)
    for size, setting in sizes.items():
        write(tmp_path / f"hugepages-{size}" / "shmem_enabled", setting)
    assert transparent_huge_pages(tmp_path) is expected


def test_a_system_without_transparent_ones_gives_none(tmp_path: Path) -> None:
    assert transparent_huge_pages(tmp_path) is False


def test_off_and_auto_say_what_was_done() -> None:
    with Region.create(SIZE, huge_pages="off") as region:
        assert region.pages == memory.SMALL == f"{mmap.PAGESIZE // 1024}k"
        assert region.huge_bytes() == 0
    with Region.create(SIZE, huge_pages="auto") as region:
        assert region.pages == (memory.TRANSPARENT if transparent_huge_pages() else memory.SMALL)


def test_each_mapping_asks_for_transparent_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int]] = []

    def advise(address: int, size: int) -> bool:
        asked.append((address, size))
        return True

    monkeypatch.setattr(memory, "transparent_huge_pages", lambda: True)
    monkeypatch.setattr(memory, "advise_huge", advise)
    with Region.create(SIZE, huge_pages="auto") as region, Region.open(region.handle) as second:
        assert region.pages == second.pages == "transparent huge"
        assert asked == [(region.address, SIZE), (second.address, SIZE)]
    monkeypatch.setattr(memory, "advise_huge", lambda *_: False)
    with Region.create(SIZE, huge_pages="auto") as region, Region.open(region.handle) as second:
        assert region.pages == second.pages == memory.SMALL


def test_the_kernel_gives_transparent_ones_where_it_may() -> None:
    if not transparent_huge_pages():
        pytest.skip("this system gives no transparent huge pages to shared memory (shmem_enabled)")
    with Region.create(32 << 20, huge_pages="auto") as region:
        assert region.populate(lambda _: None).wait(60)
        assert region.pages == "transparent huge"
        assert region.huge_bytes() > 0


def write_at_the_end(handle: RegionHandle) -> None:
    with Region.open(handle) as region:
        assert region.pages == "huge"
        region.view[region.size - 1] = 7


def test_reserved_ones_are_used_by_all_processes() -> None:
    page = memory.huge_page_bytes()
    if not page or memory.huge_page_counts()[1] < 2:
        pytest.skip("no two huge pages are reserved here (/proc/sys/vm/nr_hugepages)")
    with Region.create(page + mmap.PAGESIZE, huge_pages="on") as region:
        assert (region.pages, region.size, len(region.view)) == ("huge", 2 * page, 2 * page)
        process = multiprocessing.get_context("spawn").Process(target=write_at_the_end, args=(region.handle,))
        process.start()
        process.join(60)
        assert process.exitcode == 0
        assert region.view[region.size - 1] == 7
        seen: list[int] = []
        assert region.populate(seen.append, piece_bytes=page).wait(60)
        assert seen == [page, 2 * page] and region.huge_bytes() == 2 * page
        assert sum(region.view) == 7


def test_too_few_reserved_ones_are_an_error_that_says_how_to_get_them() -> None:
    if not memory.huge_page_bytes():
        pytest.skip("this system knows no reserved huge pages")
    total, free = memory.huge_page_counts()
    wanted = free + 1000
    with pytest.raises(ConfigError, match=f"{wanted} huge pages .* {free} are free") as error:
        Region.create(wanted * memory.huge_page_bytes(), huge_pages="on")
    assert error.value.field == "huge_pages"
    assert f"vm.nr_hugepages={total + 1000} " in error.value.accepted


def test_a_system_without_reserved_ones_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "huge_page_bytes", lambda: 0)
    with pytest.raises(ConfigError, match="huge_pages: this system has no reserved huge pages"):
        Region.create(SIZE, huge_pages="on")


def test_another_word_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"huge_pages: 'maybe' .* off, auto, on"):
        Region.create(SIZE, huge_pages="maybe")


# ---- NUMA


@pytest.mark.parametrize(
    ("text", "nodes", "here", "expected"),
    [
        ("off", [0, 1], 1, Placement((), "off")),
        ("interleave", [0, 2, 3], 2, Placement((0, 2, 3))),
        ("local", [0, 1], 1, Placement((1,))),
        ("1", [0, 1], 0, Placement((1,))),
        ("3,0", [0, 1, 3], 0, Placement((0, 3))),
        ("0-2", [0, 1, 2, 3], 0, Placement((0, 1, 2))),
    ],
)
def test_what_the_field_means(text: str, nodes: list[int], here: int, expected: Placement) -> None:
    assert plan(text, nodes, here) == expected


@pytest.mark.parametrize("text", ["interleave", "local", "0"])
@pytest.mark.parametrize("nodes", [[0], []])
def test_one_node_leaves_nothing_to_do(text: str, nodes: list[int]) -> None:
    placement = plan(text, nodes, 0)
    assert placement.nodes == () and "one node" in placement.reason


@pytest.mark.parametrize(
    ("text", "nodes", "message"),
    [
        ("4", [0, 1], r"numa: node 4 is not here.*there are here: 0, 1"),
        ("0,7", [0, 1], r"numa: node 7"),
        ("1", [0], r"numa: node 1 .*here: 0"),
        ("1", [], r"numa: node 1 .*here: none"),
        ("all", [0, 1], r"numa: 'all' is not understood"),
        ("", [0, 1], r"numa: ''"),
        ("0,", [0, 1], r"numa: '0,'"),
        ("-1", [0, 1], r"numa: '-1'"),
    ],
)
def test_what_cannot_be_is_an_error_that_lists_what_can(text: str, nodes: list[int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        plan(text, nodes, 0)


def test_a_node_that_this_machine_lacks_is_refused() -> None:
    with pytest.raises(ConfigError, match="numa: node 999"):
        Region.create(SIZE, numa="999")


def test_a_region_says_where_its_pages_lie() -> None:
    nodes = numa.nodes_with_memory()
    with Region.create(SIZE) as region:
        assert region.numa == "off"
    with Region.create(SIZE, numa="interleave") as region:
        assert region.numa.startswith("nothing" if len(nodes) < 2 else "interleaved on nodes 0, ")
    assert not nodes or numa.this_node() in range(max(nodes) + 1)


def policy(region: Region) -> str:
    """By the kernel's word."""
    found = re.search(rf"^{region.address:x} (\S+)", Path("/proc/self/numa_maps").read_text(), re.MULTILINE)
    assert found is not None
    return found[1]


def test_the_kernel_takes_the_policy_and_keeps_it_for_others() -> None:
    nodes = numa.nodes_with_memory()
    with Region.create(SIZE) as region:
        try:
            numa.bind(region.address, region.size, nodes[:1] or [0])
        except OSError as error:
            pytest.skip(f"no NUMA policies here: {error}")
        assert policy(region) == f"prefer:{nodes[0]}"
        with Region.open(region.handle) as second:
            second.view[0] = 1
            assert policy(second) == f"prefer:{nodes[0]}"
        assert place(region.address, region.size, Placement((nodes[0],))) == f"on node {nodes[0]}"
        # A node in the second word of the mask: of several, the kernel takes those that there are.
        place(region.address, region.size, Placement((nodes[0], 127)))
        assert policy(region).startswith(f"interleave:{nodes[0]}")
        assert place(region.address, region.size, Placement((127,))) == "nothing was done: Invalid argument (mbind)"


@pytest.mark.skipif(len(numa.nodes_with_memory()) < 2, reason="this machine has one NUMA node")
def test_pages_lie_on_the_nodes_in_turn() -> None:
    with Region.create(64 * SIZE, numa="interleave") as region:
        assert region.populate(lambda _: None).wait(60)
        line = re.search(rf"^{region.address:x} .*", Path("/proc/self/numa_maps").read_text(), re.MULTILINE)
        assert line is not None and len(re.findall(r" N\d+=", line[0])) == len(numa.nodes_with_memory())


def test_a_machine_without_the_call_does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "vax")
    assert place(0, SIZE, Placement((0, 1))) == "nothing was done: no call is known for vax (mbind)"


def test_lists_of_nodes() -> None:
    assert parse_list("0-2,5") == [0, 1, 2, 5]
    assert parse_list("3") == [3] and parse_list("") == []


# ---- how much there is


def test_the_least_of_machine_and_cgroups_counts(tmp_path: Path) -> None:
    proc, groups = tmp_path / "proc", tmp_path / "groups"
    assert available(proc, groups) is None
    write(proc / "meminfo", "MemTotal: 900 kB\nMemAvailable:      500 kB\nHugePages_Total:  0\n")
    assert available(proc, groups) == Available(500 << 10, "the machine")
    write(proc / "self" / "cgroup", "0::/a/b\n")
    write(groups / "a" / "b" / "memory.max", "max\n")
    write(groups / "a" / "b" / "memory.current", "1000\n")
    assert available(proc, groups) == Available(500 << 10, "the machine")
    write(groups / "a" / "memory.max", "9000\n")
    write(groups / "a" / "memory.current", "5000\n")
    write(groups / "a" / "memory.stat", "active_file 7\ninactive_file 1500\n")
    assert available(proc, groups) == Available(5500, str(groups / "a"))
    write(groups / "a" / "memory.current", "20000\n")
    assert available(proc, groups) == Available(0, str(groups / "a"))


def test_the_first_version_of_cgroups_in_a_container(tmp_path: Path) -> None:
    """Where the path is one of the host and the container sees its own group at the root."""
    proc, groups = tmp_path / "proc", tmp_path / "groups"
    write(proc / "meminfo", "MemAvailable: 500 kB\n")
    write(proc / "self" / "cgroup", "3:cpuset:/x\n4:memory:/docker/1234\n0::/\n")
    write(groups / "memory" / "memory.limit_in_bytes", "8000\n")
    write(groups / "memory" / "memory.usage_in_bytes", "6000\n")
    write(groups / "memory" / "memory.stat", "total_inactive_file 100\n")
    assert available(proc, groups) == Available(2100, str(groups / "memory"))


def test_a_region_larger_than_memory_is_made_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with Region.create(SIZE):
        assert caplog.records == []
    with Region.create(1 << 42) as region:
        assert region.size == 1 << 42
    (record,) = caplog.records
    assert f"{1 << 42} bytes" in record.getMessage() and "cpu_bytes_to_use" in record.getMessage()
