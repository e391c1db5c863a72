"""Past the page cache or through it: the same bytes, from and to any memory, whatever the file system can do."""

import errno
import fcntl
import mmap
import os
import random

import numpy as np
import pytest

from hicache import registry
from hicache.data.store.base import Hit, Record, WriteOutcome
from hicache.data.store.segment import Files, SegmentStore, aligned
from hicache.data.store.segment.aligned import BLOCK, Transfer
from hicache.errors import ConfigError
from hicache.keys import Namespace
from hicache.settings import load
from hicache.spec import CacheSpec, Group, Plane
from hicache.testing.stores import chain_of, read_back

NAMESPACE = Namespace.of({"weights": "test"})
NBYTES = 5 * BLOCK + 123


def aligned_bytes(nbytes):
    return memoryview(mmap.mmap(-1, nbytes))


def address(view):
    return np.frombuffer(view, np.uint8).__array_interface__["data"][0]


@pytest.fixture
def path(tmp_path):
    (tmp_path / "segment").write_bytes(bytes(64 * BLOCK))
    return tmp_path / "segment"


def direct(fd):
    return bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT)


@pytest.fixture(params=[True, False], ids=["direct", "buffered"])
def fd(request, path):
    fd = Files(direct=request.param).open(path)
    if request.param and not direct(fd):
        pytest.skip("no direct I/O here")
    assert direct(fd) == request.param
    yield fd
    os.close(fd)


def cut(view, draw):
    """The view in pieces of random lengths, some of them nothing."""
    pieces, at = [], 0
    while at < view.nbytes:
        step = draw.choice([0, 1, 100, 512, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK, view.nbytes])
        pieces.append(view[at : at + step])
        at += step
    return pieces


@pytest.mark.parametrize("seed", range(40))
def test_any_pieces_in_any_memory_make_the_round(fd, seed):
    draw = random.Random(seed)
    nbytes = draw.choice([1, 511, BLOCK - 1, BLOCK, BLOCK + 1, 5 * BLOCK, 5 * BLOCK + 77])
    shift = draw.choice([0, 0, 1, 512])
    source, target = aligned_bytes(nbytes + shift)[shift:], aligned_bytes(nbytes + shift + 8)[shift:]
    source[:] = draw.randbytes(nbytes)
    target[nbytes:] = b"\xaa" * 8
    files, offset = Files(), draw.randrange(8) * BLOCK
    files.write(fd, cut(source, draw), offset)
    assert files.read(fd, cut(target[:nbytes], draw), offset) == nbytes
    assert target[:nbytes] == source
    assert target[nbytes:] == b"\xaa" * 8, "written behind its end"


def test_what_is_aligned_goes_straight_and_only_the_rest_by_a_detour():
    header, page = memoryview(bytes(512)), aligned_bytes(3 * BLOCK)[: 2 * BLOCK + 100]
    transfer = Transfer([header, memoryview(bytes(BLOCK - 512)), page])
    straight = [piece for piece in transfer.pieces if address(piece) == address(page)]
    assert [piece.nbytes for piece in straight] == [2 * BLOCK]
    assert sum(view.nbytes for view, _ in transfer.detours) == BLOCK + 100
    assert sum(piece.nbytes for piece in transfer.pieces) == 4 * BLOCK
    assert all(address(piece) % BLOCK == 0 and piece.nbytes % BLOCK == 0 for piece in transfer.pieces)


def test_the_last_block_is_filled_up_with_zeros_and_not_with_what_was_there_before(path):
    fd = Files().open(path)
    if not direct(fd):
        pytest.skip("no direct I/O here")
    Files().write(fd, [memoryview(b"\xff" * BLOCK)], 0)
    Files().write(fd, [memoryview(b"\x11" * 10)], 0)
    os.close(fd)
    assert path.read_bytes()[:BLOCK] == b"\x11" * 10 + bytes(BLOCK - 10)


@pytest.mark.parametrize("end", [0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 7])
def test_a_file_that_ends_early_gives_what_it_has(path, end, fd):
    path.write_bytes(os.urandom(end))
    view = aligned_bytes(4 * BLOCK)
    assert Files().read(fd, [view], 0) == end
    assert view[:end] == path.read_bytes()


@pytest.mark.parametrize("when", ["at the open", "at the transfer"])
def test_a_file_system_without_direct_io_is_used_through_the_page_cache(tmp_path, monkeypatch, when):
    real_open, real_write, real_read = os.open, os.pwritev, os.preadv
    refused = []

    def refuse(name):
        refused.append(name)
        raise OSError(errno.EINVAL, "no direct I/O")

    def opening(path, flags, *more, **named):
        if flags & os.O_DIRECT and when == "at the open":
            refuse("open")
        return real_open(path, flags, *more, **named)

    def writing(fd, views, offset):
        return refuse("write") if direct(fd) else real_write(fd, views, offset)

    def reading(fd, views, offset):
        return refuse("read") if direct(fd) else real_read(fd, views, offset)

    monkeypatch.setattr(os, "open", opening)
    monkeypatch.setattr(os, "pwritev", writing)
    monkeypatch.setattr(os, "preadv", reading)
    store = SegmentStore(tmp_path / "store", 64 * 7 * BLOCK)
    records = chain_of("a", 4, NBYTES)
    assert store.write(NAMESPACE, records) == [WriteOutcome.STORED] * 4
    assert read_back(store, NAMESPACE, records) == [True] * 4
    assert refused
    store.close()


def test_another_error_is_not_taken_for_that(path, monkeypatch):
    fd = Files().open(path)
    if not direct(fd):
        pytest.skip("no direct I/O here")

    def broken(*_):
        raise OSError(errno.EIO, "broken")

    monkeypatch.setattr(os, "preadv", broken)
    with pytest.raises(OSError, match="broken"):
        Files().read(fd, [aligned_bytes(BLOCK)], 0)
    assert direct(fd)
    os.close(fd)


def test_a_device_that_takes_nothing_is_an_error_and_no_endless_loop(path, monkeypatch):
    monkeypatch.setattr(os, "pwritev", lambda *_: 0)
    with pytest.raises(OSError, match="less than a block"):
        Transfer([aligned_bytes(BLOCK)]).write(0, 0)


def test_short_system_calls_are_continued(path, monkeypatch):
    fd = Files().open(path)
    if not direct(fd):
        pytest.skip("no direct I/O here")
    real_write, real_read = os.pwritev, os.preadv
    monkeypatch.setattr(os, "pwritev", lambda fd, views, at: real_write(fd, [views[0][:BLOCK]], at))
    monkeypatch.setattr(os, "preadv", lambda fd, views, at: real_read(fd, [views[0][:BLOCK]], at))
    source, target = aligned_bytes(NBYTES), aligned_bytes(NBYTES)
    source[:] = os.urandom(NBYTES)
    Files().write(fd, [memoryview(bytes(100)), memoryview(bytes(BLOCK - 100)), source], 0)
    assert Files().read(fd, [aligned_bytes(BLOCK), target], 0) == BLOCK + NBYTES
    assert target == source
    os.close(fd)


@pytest.mark.parametrize("writes,reads", [(True, False), (False, True)])
def test_what_one_wrote_direct_another_reads_buffered_and_the_other_way_round(tmp_path, writes, reads):
    records = chain_of("a", 6, NBYTES)
    store = SegmentStore(tmp_path / "store", 64 * 7 * BLOCK, files=Files(direct=writes))
    store.write(NAMESPACE, records)
    store.close()
    store = SegmentStore(tmp_path / "store", 64 * 7 * BLOCK, files=Files(direct=reads))
    assert read_back(store, NAMESPACE, records) == [True] * 6
    store.check()
    store.close()


def test_pages_of_a_pool_travel_without_a_copy(tmp_path, monkeypatch):
    """Only the header and what is left of the last block go through the buffer, at writing and at reading."""
    detours = []
    real = Transfer.__init__

    def watched(self, views):
        real(self, views)
        detours.append(sum(view.nbytes for view, _ in self.detours))

    monkeypatch.setattr(aligned.Transfer, "__init__", watched)
    page, into = aligned_bytes(NBYTES), aligned_bytes(NBYTES)
    page[:] = os.urandom(NBYTES)
    store = SegmentStore(tmp_path / "store", 64 * 7 * BLOCK)
    (plain,) = chain_of("a", 1)
    record = Record(plain.key, None, "page_first", [page])
    assert store.write(NAMESPACE, [record]) == [WriteOutcome.STORED]
    assert isinstance(store.read(NAMESPACE, [record.key], [[into]])[0], Hit)
    assert into == page
    if not detours:
        pytest.skip("no direct I/O here")
    assert detours == [BLOCK + NBYTES % BLOCK] * 2
    store.close()


@pytest.mark.parametrize("said,meant", [({}, True), ({"direct": False}, False), ({"direct": True}, True)])
def test_the_setting_reaches_the_files(tmp_path, said, meant):
    settings = load(environ={}, store={"type": "segment", "path": str(tmp_path / "s"), "cap": "8MiB", **said})
    spec = CacheSpec((Group("kv", (Plane("k", 1, 16, 1, 64),)),), 16)
    store = registry.store_factory("segment")(settings.store.options(), spec)
    assert store.directory.files.direct is meant
    store.close()


def test_the_setting_may_come_from_the_environment_and_must_be_one(tmp_path):
    environ = {"HICACHE_STORE_PATH": str(tmp_path), "HICACHE_STORE_DIRECT": "false"}
    assert load(environ=environ).store.direct is False
    with pytest.raises(ConfigError, match=r"key=store.direct value=.*often"):
        load(environ={**environ, "HICACHE_STORE_DIRECT": "often"})
