"""BufferPool: exact sizes, recycled memory, bounded idle bytes, no buffer lent twice."""

from __future__ import annotations

import threading

import pytest

from ec_s3.buffers import Body, BufferPool

MIB = 1 << 20


@pytest.mark.parametrize("nbytes", [0, 1, 65_536, 65_537, 100_000, MIB, MIB + 1, 33 * MIB])
def test_view_has_the_exact_size_and_wastes_a_quarter_at_most(nbytes: int) -> None:
    view = BufferPool(0).take(nbytes)
    assert view.nbytes == nbytes
    assert not view.readonly
    assert isinstance(view.obj, bytearray)
    assert len(view.obj) <= max(nbytes * 1.25, 65_536)


def test_given_buffer_is_reused_for_similar_sizes() -> None:
    pool = BufferPool(8 * MIB)
    view = pool.take(MIB)
    buffer = view.obj
    pool.give(view)
    assert pool.idle_bytes == MIB
    again = pool.take(MIB - 1000)
    assert again.obj is buffer
    assert again.nbytes == MIB - 1000
    assert pool.idle_bytes == 0


def test_idle_bytes_are_bounded_and_the_unused_class_goes_first() -> None:
    pool = BufferPool(4 * MIB)
    old, new = [pool.take(MIB) for _ in range(4)], [pool.take(2 * MIB) for _ in range(2)]
    for view in [*old, *new]:
        pool.give(view)
        assert pool.idle_bytes <= 4 * MIB
    kept = {id(pool.take(2 * MIB).obj) for _ in range(1)}
    assert kept
    assert pool.idle_bytes == 2 * MIB


def test_buffer_larger_than_the_bound_is_never_kept() -> None:
    pool = BufferPool(MIB)
    pool.give(pool.take(2 * MIB))
    assert pool.idle_bytes == 0


def test_buffer_with_a_living_slice_is_not_lent_again() -> None:
    pool = BufferPool(8 * MIB)
    view = pool.take(MIB)
    part = view[10:20]
    pool.give(view)
    assert pool.idle_bytes == 0
    assert pool.take(MIB).obj is not part.obj


def test_exported_view_is_not_lent_again() -> None:
    pool = BufferPool(8 * MIB)
    view = pool.take(MIB)
    user = memoryview(view)
    pool.give(view)
    assert pool.idle_bytes == 0
    assert user.nbytes == MIB


def test_giving_twice_or_something_else_is_refused() -> None:
    pool = BufferPool(8 * MIB)
    view = pool.take(5)
    pool.give(view)
    with pytest.raises(ValueError, match="released"):
        pool.give(view)
    for foreign in (memoryview(b"abc"), memoryview(bytearray(70_001))):
        with pytest.raises(ValueError, match="not from a BufferPool"):
            pool.give(foreign)


def test_a_body_gives_back_after_an_error() -> None:
    pool = BufferPool(8 * MIB)
    body = Body(pool)
    body.take(MIB)
    with pytest.raises(KeyError), body:
        raise KeyError
    assert pool.idle_bytes == MIB


def test_threads_never_share_a_buffer() -> None:
    pool = BufferPool(2 * MIB)
    failures: list[int] = []

    def work(seed: int) -> None:
        for i in range(200):
            view = pool.take(50_000 + 1000 * (i % 40))
            view[:8] = seed.to_bytes(8, "big")
            view[-8:] = i.to_bytes(8, "big")
            if bytes(view[:8]) != seed.to_bytes(8, "big"):
                failures.append(seed)
            pool.give(view)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not failures
    assert pool.idle_bytes <= 2 * MIB
