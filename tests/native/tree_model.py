"""A slow model of the prefix tree: one entry for each page of each prefix, and no nodes at all.

A page's entry is found by everything up to its end, so splits, hashes and lists by last use cannot show in
it. Which pages go is checked against rules, and under `lru` against the last use of each page (test_lru_order).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

Key = tuple[Any, ...]
"""Token keys from the start of a prompt to the end of one page."""

HAS_L1 = {"l1", "l1+pending", "l1+l2"}
HAS_L2 = {"l1+l2", "l2", "loading"}
HOLDS_L1 = HAS_L1 | {"loading"}
HOLDS_L2 = HAS_L2 | {"pending", "l1+pending"}
INSERTED = {"absent": "l1", "pending": "l1+pending", "l2": "l1+l2"}
ACKED = {"pending": "l2", "l1+pending": "l1+l2", "loading": "l1+l2"}
CANCELLED = {"pending": "absent", "l1+pending": "l1", "loading": "l2"}
DROPPED = {1: {"l1": "absent", "l1+l2": "l2"}, 2: {"l2": "absent", "l1+l2": "l1"}}


@dataclass
class Entry:
    state: str
    owner: int
    l1: int | None = None
    l2: int | None = None
    ticket: int = 0
    last: int = 0
    """The operation that used it last."""


@dataclass(eq=False)
class Hold:
    """A pin or a copy in flight: keeps the path to `end`, which moves when a valid tail grows."""

    end: Key


class Foreign(Exception):
    """The model's BadInput: a page that the tree holds somewhere else."""


@dataclass
class InsertOutcome:
    tokens: int
    duplicates: list[int]
    freed_l2: list[int] = field(default_factory=list)


class TreeModel:
    """The pages of one namespace. `held` says what may not go."""

    def __init__(self, page_size: int) -> None:
        self.page = page_size
        self.entries: dict[Key, Entry] = {}
        self.held: list[Hold] = []

    # --- lookups

    def parent(self, key: Key) -> Key:
        return key[: (len(key) - 1) // self.page * self.page]

    def path(self, keys: Key) -> list[Key]:
        """The entries that a walk finds: whole pages, then the longest valid tail."""
        found: list[Key] = []
        at = 0
        while len(keys) - at >= self.page and keys[: at + self.page] in self.entries:
            at += self.page
            found.append(keys[:at])
        for length in range(min(self.page - 1, len(keys) - at), 0, -1):
            if keys[: at + length] in self.entries:
                return [*found, keys[: at + length]]
        return found

    def match(self, keys: Key) -> tuple[int, int, int, list[int]]:
        """(readable tokens, of them in L1, known tokens, L1 pages)."""
        path = self.path(keys)
        l1: list[int] = []
        l1_tokens = readable = 0
        for key in path:
            entry = self.entries[key]
            if len(l1) * self.page >= readable and entry.state in HAS_L1 and readable == l1_tokens:
                assert entry.l1 is not None
                l1.append(entry.l1)
                l1_tokens = readable = len(key)
            elif entry.state in HAS_L2:
                readable = len(key)
            else:
                break
        return readable, l1_tokens, len(path[-1]) if path else 0, l1

    def is_held(self, key: Key) -> bool:
        return any(self.above(key, hold.end) for hold in self.held)

    def above(self, key: Key, end: Key) -> bool:
        """Whether the path to `end` leads through `key`: nothing hangs below a valid tail."""
        return key == end or (len(key) % self.page == 0 and end[: len(key)] == key)

    def evictable(self, tier: int) -> set[int]:
        pages = {(e.l1 if tier == 1 else e.l2) for k, e in self.entries.items() if not self.is_held(k)}
        return {page for page in pages if page is not None}

    def use(self, keys: Key, tokens: int, now: int) -> None:
        """The path of a prompt is used, up to the page in which its first `tokens` end."""
        for key in self.path(keys):
            if (len(key) - 1) // self.page * self.page < tokens:
                self.entries[key].last = now

    def leaves(self, tier: int, gone: set[Key]) -> list[Key]:
        """What may go next, after `gone`: not held, and nothing in the tier hangs below it."""
        there = {k for k, e in self.entries.items() if (e.l1 if tier == 1 else e.l2) is not None} - gone
        parents = {self.parent(key) for key in there}
        return [key for key in there - parents if not self.is_held(key)]

    def pages_of(self, tier: int) -> set[int]:
        pages = {(e.l1 if tier == 1 else e.l2) for e in self.entries.values()}
        return {page for page in pages if page is not None}

    def holder(self, keys: Key, grid: int, page: int) -> Key | None:
        """The entry that holds `page` right behind keys[:grid] with the same tokens as far as both go."""
        for key, entry in self.entries.items():
            shared = min(len(key), len(keys))
            if entry.l1 == page and self.parent(key) == keys[:grid] and key[:shared] == keys[:shared]:
                return key
        return None

    # --- changes

    def insert(self, keys: Key, pages: list[int], owners: list[int]) -> InsertOutcome:
        used = self.pages_of(1)
        path = self.path(keys)
        known = len(path[-1]) if path else 0
        duplicates: list[int] = []
        adopted: list[tuple[Key, int]] = []
        stop: int | None = None
        for i, key in enumerate(path):
            if len(key) % self.page and len(key) < len(keys):
                continue  # a tail that goes on
            entry = self.entries[key]
            if entry.state in HOLDS_L1:
                if pages[i] != entry.l1:
                    if pages[i] not in used:
                        duplicates.append(i)
                    elif self.holder(keys, i * self.page, pages[i]) is None:
                        raise Foreign(pages[i])
            elif pages[i] in used:
                if self.holder(keys, i * self.page, pages[i]) is None:
                    raise Foreign(pages[i])
                stop = i * self.page
                break
            else:
                adopted.append((key, pages[i]))
        grid = known // self.page * self.page
        first = grid // self.page
        grown: Key | None = None
        if stop is None and known < len(keys) and pages[first] in used:
            holder = self.holder(keys, grid, pages[first])
            if holder is None:
                raise Foreign(pages[first])
            shorter = len(holder) < min(grid + self.page, len(keys))
            if shorter and self.entries[holder].state in {"l1", "l1+l2"}:
                grown = holder
            else:
                stop = known
        if stop is not None:
            rest = range(-(-stop // self.page), len(pages))
            duplicates += [i for i in rest if pages[i] not in used]

        for key, page in adopted:
            entry = self.entries[key]
            entry.state, entry.l1 = INSERTED[entry.state], page
        if stop is not None:
            return InsertOutcome(min(stop, known), duplicates)
        outcome = InsertOutcome(len(keys), duplicates)
        if known < len(keys):
            owner = None
            if grown is not None:
                old = self.entries.pop(grown)
                owner = old.owner
                if old.l2 is not None:
                    outcome.freed_l2.append(old.l2)
                for hold in self.held:
                    hold.end = keys if hold.end == grown else hold.end
            for i in range(first, len(pages)):
                key = keys[: (i + 1) * self.page]
                self.entries[key] = Entry("l1", owners[i], l1=pages[i])
            if owner is not None:
                self.entries[keys[: grid + self.page]].owner = owner
        return outcome

    def reserve(self, keys: Key, first: int, pages: list[int], owners: list[int], ticket: int) -> Hold:
        for i, page in enumerate(pages):
            key = keys[: (first + i + 1) * self.page]
            self.entries[key] = Entry("pending", owners[i], l2=page, ticket=ticket)
        return self.hold(keys)

    def begin_backup(self, end: Key, keys: list[Key], pages: list[int], ticket: int) -> Hold:
        for key, page in zip(keys, pages, strict=True):
            entry = self.entries[key]
            assert entry.state == "l1"
            entry.state, entry.l2, entry.ticket = "l1+pending", page, ticket
        return self.hold(end)

    def begin_load(self, end: Key, keys: list[Key], pages: list[int], ticket: int) -> Hold:
        for key, page in zip(keys, pages, strict=True):
            entry = self.entries[key]
            assert entry.state == "l2"
            entry.state, entry.l1, entry.ticket = "loading", page, ticket
        return self.hold(end)

    def hold(self, end: Key) -> Hold:
        self.held.append(Hold(end))
        return self.held[-1]

    def release(self, hold: Hold) -> None:
        self.held.remove(hold)
        self.prune()

    def settle(self, ticket: int, hold: Hold, *, cancelled: bool) -> set[int]:
        """Ends a copy; the pages that a cancelled one gives back."""
        pages = set()
        for entry in self.entries.values():
            if entry.ticket != ticket:
                continue
            entry.ticket = 0
            if cancelled:
                tier = "l1" if entry.state == "loading" else "l2"
                pages.add(getattr(entry, tier))
                setattr(entry, tier, None)
            entry.state = (CANCELLED if cancelled else ACKED)[entry.state]
        self.release(hold)
        return pages

    def evict(self, tier: int, gone: set[int]) -> None:
        """Check that `gone` may go, and that children go before parents."""
        assert gone <= self.evictable(tier)
        keys = {k for k, e in self.entries.items() if (e.l1 if tier == 1 else e.l2) in gone}
        for key in self.entries:
            ancestors = {key[:end] for end in range(self.page, len(key), self.page)}
            entry = self.entries[key]
            stays = (entry.l1 if tier == 1 else entry.l2) is not None and key not in keys
            assert not (stays and ancestors & keys), f"{key} stays in L{tier}, a parent went"
        for key in keys:
            entry = self.entries[key]
            entry.state = DROPPED[tier][entry.state]
            if tier == 1:
                entry.l1 = None
            else:
                entry.l2 = None
        self.prune()

    def clear(self) -> tuple[set[int], set[int]]:
        gone = [key for key in self.entries if not self.is_held(key)]
        freed = self.evictable(1), self.evictable(2)
        for key in gone:
            del self.entries[key]
        return freed

    def prune(self) -> None:
        """Absent entries live only as the way to others, or while pinned."""
        alive = [key for key, entry in self.entries.items() if entry.state != "absent"]
        alive += [hold.end for hold in self.held]
        for key in [k for k, e in self.entries.items() if e.state == "absent"]:
            if not any(self.above(key, other) for other in alive):
                del self.entries[key]
