"""The slow model of a page allocator: a set of free pages that is walked over for each answer."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class PageModel:
    """Pages first..first+pages-1 of one lane; `held` maps a holder to the pages reserved for it."""

    pages: int
    first: int = 0
    free: set[int] = field(default_factory=set)
    taken: set[int] = field(default_factory=set)
    held: dict[int, list[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.free = set(range(self.first, self.first + self.pages))

    def extents(self) -> list[range]:
        """Maximal free stretches, ascending."""
        found: list[range] = []
        for page in sorted(self.free):
            if found and found[-1].stop == page:
                found[-1] = range(found[-1].start, page + 1)
            else:
                found.append(range(page, page + 1))
        return found

    def largest(self) -> int:
        return max(map(len, self.extents()), default=0)

    def choose(self, count: int) -> list[range] | None:
        """The smallest extent that fits, lowest of equals; else the largest, highest of equals, then what fits."""
        if count > len(self.free):
            return None
        extents, chosen = self.extents(), []
        while count:
            fitting = [e for e in extents if len(e) >= count]
            if fitting:
                best = min(fitting, key=lambda e: (len(e), e.start))
            else:
                best = max(extents, key=lambda e: (len(e), e.start))
            extents.remove(best)
            chosen.append(best[:count])
            count -= len(chosen[-1])
        return chosen

    def allocate(self, count: int) -> list[int] | None:
        chosen = self.choose(count)
        if chosen is None:
            return None
        pages = [page for run in chosen for page in run]
        self.free.difference_update(pages)
        self.taken.update(pages)
        return pages

    def release(self, pages: list[int]) -> None:
        self.taken.difference_update(pages)
        self.free.update(pages)

    def reserve(self, holder: int, count: int) -> list[int] | None:
        pages = self.allocate(count)
        if pages is not None:
            self.taken.difference_update(pages)
            self.held.setdefault(holder, []).extend(pages)
        return pages

    def commit(self, holder: int) -> None:
        self.taken.update(self.held.pop(holder, []))

    def roll_back(self, holder: int) -> None:
        self.free.update(self.held.pop(holder, []))
