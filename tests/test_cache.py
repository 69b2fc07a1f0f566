"""The page cache by itself: sharing, eviction, and books that balance under anything."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gapless.cache import ROOT, PageCache


def store(cache: PageCache, tokens: tuple[int, ...]) -> tuple[int, ...]:
    """Hold pages for ``tokens``, shared where they can be, and make them findable."""
    size = cache.page_tokens
    hits = cache.match(tokens, len(tokens))
    cache.hold(hits)
    fresh = cache.allocate(len(tokens) // size - len(hits))
    assert fresh is not None
    pages = hits + fresh
    for index in range(len(hits), len(pages)):
        parent = pages[index - 1] if index else ROOT
        assert cache.insert(parent, tokens[index * size : (index + 1) * size], pages[index])
    return pages


def test_a_prefix_is_found_while_held_and_after() -> None:
    cache = PageCache(8, 2)
    a = store(cache, (1, 2, 3, 4))
    b = store(cache, (1, 2, 5, 6))
    assert a[0] == b[0]
    assert a[1] != b[1]
    cache.check([a, b])
    cache.release(a)
    assert cache.match((1, 2, 3, 4), 4) == a
    assert cache.match((1, 2, 3, 4), 3) == a[:1]
    cache.release(b)
    cache.check()
    assert cache.n_available == 8


def test_the_least_recently_used_leaf_goes_first() -> None:
    cache = PageCache(4, 1)
    a, b = store(cache, (1, 2)), store(cache, (3, 4))
    cache.release(a)
    cache.release(b)
    first = cache.allocate(1)
    assert first == (a[1],)
    assert cache.match((1, 2), 2) == a[:1]
    assert cache.match((3, 4), 2) == b
    cache.hold(a[:1])
    cache.release(a[:1])
    second = cache.allocate(1)
    assert second == (b[1],)
    cache.check([first, second])


def test_tokens_alone_do_not_make_a_page_equal() -> None:
    """The same tokens after another beginning are another page."""
    cache = PageCache(8, 2)
    a, b = store(cache, (1, 2, 9, 9)), store(cache, (3, 4, 9, 9))
    assert a[1] != b[1]
    cache.check([a, b])


def test_a_page_computed_twice_stays_private() -> None:
    cache = PageCache(4, 2)
    a = store(cache, (1, 2))
    b = cache.allocate(1)
    assert b is not None
    assert not cache.insert(ROOT, (1, 2), b[0])
    cache.release(b)
    assert cache.n_available == 3
    cache.check([a])


def test_more_than_there_is_cannot_be_had() -> None:
    cache = PageCache(3, 2)
    a = cache.allocate(2)
    assert a is not None
    assert cache.allocate(2) is None
    cache.check([a])
    with pytest.raises(AssertionError, match="more often"):
        cache.release(a + a)


def test_a_page_used_again_outlives_one_that_is_not() -> None:
    """However often pages are found again, only the order in which they were last let go counts."""
    cache = PageCache(4, 1)
    a, b = store(cache, (1, 2)), store(cache, (3, 4))
    cache.release(a)
    cache.release(b)
    for _ in range(1000):
        cache.hold(a)
        cache.release(a)
    taken = cache.allocate(2)
    assert taken is not None
    assert set(taken) == set(b)
    assert cache.match((1, 2), 2) == a
    assert len(cache._cached) == 2, "bookkeeping grows with use"
    cache.check([taken])


def test_a_forgotten_tree_finds_nothing() -> None:
    cache = PageCache(8, 2)
    a = store(cache, (1, 2, 3, 4))
    with pytest.raises(AssertionError):
        cache.forget()
    cache.release(a)
    cache.forget()
    assert cache.match((1, 2, 3, 4), 4) == ()
    assert cache.n_available == 8
    cache.check()


@given(st.integers(0, 10**9), st.integers(1, 24), st.integers(1, 3))
def test_books_balance_under_random_use(seed: int, n_pages: int, page_tokens: int) -> None:
    rng = random.Random(seed)
    cache = PageCache(n_pages, page_tokens)
    held: list[tuple[int, ...]] = []
    for _ in range(60):
        if held and rng.random() < 0.5:
            cache.release(held.pop(rng.randrange(len(held))))
        else:
            tokens = tuple(rng.randrange(2) for _ in range(page_tokens * rng.randint(1, 5)))
            hits = cache.match(tokens, len(tokens))
            if len(tokens) // page_tokens - len(hits) <= cache.n_available - sum(
                cache._references[p] == 0 for p in hits
            ):
                held.append(store(cache, tokens))
        cache.check(held)
