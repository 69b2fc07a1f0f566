"""Pages of the KV cache and the tree of computed prefixes. Integers only.

A page is free, or held by requests (reference count above 0), or cached: computed, held by nobody, and found again by
its tokens. The tree's key of a page is (page before it, its own tokens), so equal tokens after another beginning are
another page. Only full pages are in the tree, and only below pages that are in it too.

Who holds a page holds all pages before it, and they are let go last page first. So a cached page was always let go
after those below it: the one let go longest ago is a leaf, and eviction in that order keeps the tree whole.
"""

from __future__ import annotations

from collections import OrderedDict
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
        self._cached: OrderedDict[int, None] = OrderedDict()  # by when they were let go, the longest ago first

    @property
    def n_available(self) -> int:
        """Pages that ``allocate`` could give: free ones and, after eviction, cached ones."""
        return len(self._free) + len(self._cached)

    def pages_for(self, n_positions: int) -> int:
        """How many pages hold that many positions."""
        return -(-n_positions // self.page_tokens)

    def match(self, tokens: Sequence[int], limit: int) -> tuple[int, ...]:
        """Computed pages that begin ``tokens``, covering at most ``limit`` tokens. Takes no reference."""
        size = self.page_tokens
        pages: list[int] = []
        parent = ROOT
        for start in range(0, min(limit, len(tokens)) - size + 1, size):
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
                del self._cached[page]
            self._references[page] += 1

    def release(self, pages: Sequence[int]) -> None:
        """Give back a reference on each page, given in the order of their positions."""
        for page in reversed(pages):
            self._references[page] -= 1
            assert self._references[page] >= 0, "released more often than held"
            if self._references[page] > 0:
                continue
            if self._key_of[page] is None:
                self._free.append(page)
            else:
                self._cached[page] = None

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

        False where another page holds the same tokens already: the caller's page stays its own.
        """
        assert len(tokens) == self.page_tokens
        assert self._references[page] > 0
        assert self._key_of[page] is None
        assert parent == ROOT or (self._references[parent] > 0 and self._key_of[parent] is not None)
        key = (parent, tokens)
        if key in self._page_of:
            return False
        self._page_of[key] = page
        self._key_of[page] = key
        return True

    def forget(self) -> None:
        """Empty the tree, while nobody holds a page: what the pages hold is not to be trusted (any more)."""
        assert self.n_available == self.n_pages
        while self._cached:
            self._evict()

    def _evict(self) -> None:
        """Free the page that was let go longest ago, which is a leaf."""
        page, _ = self._cached.popitem(last=False)
        key = self._key_of[page]
        assert key is not None
        del self._page_of[key]
        self._key_of[page] = None
        self._free.append(page)

    def check(self, held: Sequence[Sequence[int]] = ()) -> None:
        """Assert that the books balance, given the pages that each request holds."""
        references = [0] * self.n_pages
        for pages in held:
            assert len(set(pages)) == len(pages)
            for page in pages:
                references[page] += 1
        assert references == self._references
        in_tree = {page for page, key in enumerate(self._key_of) if key is not None}
        assert len(set(self._free)) == len(self._free)
        assert set(self._cached) == {page for page in in_tree if references[page] == 0}
        assert set(self._free) == {page for page in range(self.n_pages) if references[page] == 0} - in_tree
        assert len(self._page_of) == len(in_tree)
        let_go = {page: order for order, page in enumerate(self._cached)}
        for key, page in self._page_of.items():
            assert self._key_of[page] == key
            parent = key[0]
            if parent != ROOT:
                assert parent in in_tree, "a page below one that is not in the tree"
                assert references[parent] >= references[page], "held without the page before it"
                assert parent not in let_go or let_go[page] < let_go[parent], "a page would go before those below it"
