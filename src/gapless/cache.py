"""Pages of the KV cache and the tree of computed prefixes. Integers only.

A page is free, or held by requests (reference count above 0), or cached: computed, held by nobody, and found again by
its tokens. The tree's key of a page is (page before it, its own tokens): a page is in the tree only below pages that
are in it too. Who holds a page holds all pages before it, so only leaves are evicted, least recently used first.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

ROOT = -1

Key = tuple[int, tuple[int, ...]]


class PageCache:
    """``n_pages`` pages of ``page_tokens`` positions each."""

    def __init__(self, n_pages: int, page_tokens: int) -> None:
        self.n_pages = n_pages
        self.page_tokens = page_tokens
        self._free = list(range(n_pages - 1, -1, -1))
        self._references = [0] * n_pages
        self._page_of: dict[Key, int] = {}
        self._key_of: list[Key | None] = [None] * n_pages
        self._n_children = [0] * n_pages
        # Cached leaves by when they were let go; entries that no longer hold are passed over.
        self._leaves: list[tuple[int, int]] = []
        self._let_go = [0] * n_pages
        self._clock = 0
        self._n_cached = 0  # pages in the tree that nobody holds

    @property
    def n_available(self) -> int:
        """Pages that ``allocate`` could give: free ones and, after eviction, cached ones."""
        return len(self._free) + self._n_cached

    def match(self, tokens: Sequence[int], limit: int) -> tuple[int, ...]:
        """Computed pages that begin ``tokens``, covering at most ``limit`` tokens. Takes no reference."""
        size = self.page_tokens
        pages: list[int] = []
        parent = ROOT
        for start in range(0, limit - size + 1, size):
            page = self._page_of.get((parent, tuple(tokens[start : start + size])))
            if page is None:
                break
            pages.append(page)
            parent = page
        return tuple(pages)

    def hold(self, pages: Sequence[int]) -> None:
        """Take a reference on each page."""
        for page in pages:
            if self._references[page] == 0:
                self._n_cached -= 1
            self._references[page] += 1

    def release(self, pages: Sequence[int]) -> None:
        """Give back a reference on each page, in the order of their positions."""
        for page in reversed(pages):
            self._references[page] -= 1
            assert self._references[page] >= 0, "released more often than held"
            if self._references[page] == 0:
                if self._key_of[page] is None:
                    self._free.append(page)
                else:
                    self._n_cached += 1
                    self._clock += 1
                    self._let_go[page] = self._clock
                    self._offer(page)

    def allocate(self, n: int) -> tuple[int, ...] | None:
        """``n`` fresh pages with one reference each, or None where they cannot be had."""
        if n > self.n_available:
            return None
        while len(self._free) < n:
            self._evict()
        pages = tuple(self._free.pop() for _ in range(n))
        for page in pages:
            self._references[page] = 1
        return pages

    def insert(self, parent: int, tokens: tuple[int, ...], page: int) -> bool:
        """Make a computed page findable below ``parent`` (ROOT, or a page in the tree that the caller holds).

        False where other pages hold the same tokens already: the caller's page stays its own.
        """
        assert len(tokens) == self.page_tokens
        assert self._references[page] > 0
        assert self._key_of[page] is None
        key = (parent, tokens)
        if key in self._page_of:
            return False
        self._page_of[key] = page
        self._key_of[page] = key
        if parent != ROOT:
            assert self._references[parent] > 0
            self._n_children[parent] += 1
        return True

    def _offer(self, page: int) -> None:
        if self._n_children[page] == 0:
            heapq.heappush(self._leaves, (self._let_go[page], page))

    def _evict(self) -> None:
        """Free the leaf that was let go longest ago."""
        while True:
            let_go, page = heapq.heappop(self._leaves)
            key = self._key_of[page]
            if (
                key is not None
                and self._references[page] == 0
                and self._n_children[page] == 0
                and self._let_go[page] == let_go
            ):
                break
        del self._page_of[key]
        self._key_of[page] = None
        self._n_cached -= 1
        self._free.append(page)
        parent = key[0]
        if parent != ROOT:
            self._n_children[parent] -= 1
            if self._references[parent] == 0:
                self._offer(parent)

    def check(self, held: Sequence[Sequence[int]] = ()) -> None:
        """Assert that the books balance, given the pages that each request holds."""
        references = [0] * self.n_pages
        for pages in held:
            for page in pages:
                references[page] += 1
        assert references == self._references
        free = set(self._free)
        assert len(free) == len(self._free)
        cached = {p for p in range(self.n_pages) if references[p] == 0 and self._key_of[p] is not None}
        assert len(cached) == self._n_cached
        assert free | cached == {p for p in range(self.n_pages) if references[p] == 0}
        assert not free & cached
        children = [0] * self.n_pages
        for key, page in self._page_of.items():
            assert self._key_of[page] == key
            if key[0] != ROOT:
                children[key[0]] += 1
                assert self._key_of[key[0]] is not None
                assert references[key[0]] > 0 or references[page] == 0, "a held page below one that is not held"
        assert children == self._n_children
