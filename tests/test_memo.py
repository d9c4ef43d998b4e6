"""The bounded table."""

import sys
import threading

import pytest

from loopjit.memo import LRU


def test_another_bound():
    table = LRU(50)
    for i in range(9):
        table.put(i, i)
    table.limit(3)
    table.put(9, 9)
    assert table.values() == [7, 8, 9]


def test_freeing_a_value_may_come_back():
    """What a value does when it dies, in a garbage collection or not, may need the same table."""
    table, seen = LRU(1), []

    class Value:
        def __del__(self):
            seen.append(table.put("again", 1))

    table.put("a", Value())
    table.put("b", 2)
    assert seen == [1]


def test_get_and_put():
    table = LRU(3)
    assert table.get("a") is None and table.peek("a") is None
    assert table.put("a", 1) == 1
    assert table.put("a", 2) == 1  # the first one stays
    assert table.get("a") == table.peek("a") == 1
    assert len(table) == 1 and table.values() == [1]


def test_replace():
    table = LRU(3)
    assert table.replace("a", 1) == 1
    assert table.replace("a", 2) == 2
    assert table.get("a") == 2 and len(table) == 1


@pytest.mark.parametrize("maxsize", [1, 2, 7])
def test_bound(maxsize):
    table = LRU(maxsize)
    for i in range(50):
        table.put(i, str(i))
        assert len(table) == min(i + 1, maxsize)
    assert table.values() == [str(i) for i in range(50 - maxsize, 50)]
    assert table.evicted == 50 - maxsize
    assert table.maxsize == maxsize


def test_what_was_used_last_stays():
    table = LRU(3)
    for key in "abc":
        table.put(key, key)
    table.get("a")
    table.put("d", "d")
    assert table.get("b") is None
    table.put("c", "other")  # a use, too
    table.put("e", "e")
    assert table.get("a") is None
    assert sorted(table.values()) == ["c", "d", "e"]


def test_peek_is_no_use():
    table = LRU(2)
    table.put("a", 1)
    table.put("b", 2)
    table.peek("a")
    table.put("c", 3)
    assert table.peek("a") is None and table.peek("b") == 2


def test_clear():
    table = LRU(2)
    table.put("a", 1)
    peek = table.peek
    table.clear()
    assert len(table) == 0 and table.get("a") is None and peek("a") is None
    table.put("a", 2)
    assert peek("a") == 2  # bound once, and for good


def test_evicted_values_are_let_go():
    class Value:
        pass

    table = LRU(2)
    first = Value()
    count = sys.getrefcount(first)
    table.put(1, first)
    for i in range(2, 5):
        table.put(i, Value())
    assert sys.getrefcount(first) == count


def test_threads():
    table = LRU(16)
    errors = []
    first = {}

    def work(seed):
        try:
            for i in range(3000):
                key = (i * seed) % 40
                value = table.put(key, key)
                assert value == key
                assert table.get(key) in (None, key)
                assert len(table) <= 17
                table.values()
                if i % 500 == 0:
                    table.clear()
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(s,)) for s in range(1, 9)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(60)
    assert not errors and len(table) <= 16


def test_all_threads_get_the_value_that_was_first():
    for _ in range(20):
        table, barrier, got = LRU(4), threading.Barrier(8), []

        def work():
            barrier.wait()
            got.append(table.put("key", object()))

        threads = [threading.Thread(target=work) for _ in range(8)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        assert len(set(map(id, got))) == 1
