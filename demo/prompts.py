"""The demonstration's prompts: one long, one that shares its beginning, one short."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

LONG_TOKENS = 1500
SHARED_TOKENS = 1000

_LOG = """\
Log of the island ferry, day {day}. We left the north pier at {hour} with {cars} cars and {people} people. \
The wind came from the {wind} and the sea was {sea}. Halfway across, the lookout saw {seen}, and the captain \
wrote it down. The cargo was {cargo}, and every crate had a number, because a crate without a number is a \
crate that somebody will open in the wrong house. We landed at the south pier {late} minutes late.
"""
_WINDS = ("west", "east", "south", "north")
_SEAS = ("calm", "grey and slow", "rough near the rocks", "flat like glass", "high")
_SIGHTS = ("two seals", "a sailing boat without a flag", "a line of geese", "the old lighthouse, lit at noon")
_CARGOES = ("bread and letters", "a piano", "forty sheep", "glass for the school", "salt and rope")


class Tokenizer(Protocol):
    def encode(self, text: str) -> list[int]: ...

    def chat(self, messages: list[dict[str, str]]) -> list[int]: ...


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """`tokens` are sent as they are; a `question` is sent as a conversation, streamed."""

    title: str
    tokens: list[int]
    question: str | None = None


def _pages(text: Tokenizer, first_day: int, wanted: int) -> list[int]:
    tokens: list[int] = []
    day = first_day
    while len(tokens) < wanted:
        entry = _LOG.format(
            day=day,
            hour=f"{6 + day % 12}:{(day * 7) % 60:02}",
            cars=3 + day % 9,
            people=20 + day * 3 % 70,
            wind=_WINDS[day % 4],
            sea=_SEAS[day % 5],
            seen=_SIGHTS[day * 3 % 4],
            cargo=_CARGOES[day * 2 % 5],
            late=day * 5 % 13,
        )
        tokens += text.encode(entry)
        day += 1
    return tokens[:wanted]


def demo_prompts(text: Tokenizer) -> list[Prompt]:
    """Three prompts; the second shares its first 1,000 tokens with the first."""
    tail = text.encode("\nIn one sentence, this is what the log is about:")
    long = _pages(text, 1, LONG_TOKENS - len(tail)) + tail
    other = text.encode("\nThe next entry was torn out. The captain remembers that on that day")
    question = "What is the capital of France? Answer in one short sentence."
    return [
        Prompt(title="a log of 1,500 tokens", tokens=long),
        Prompt(title="the same first 1,000 tokens", tokens=long[:SHARED_TOKENS] + other),
        Prompt(
            title="a question, streamed",
            tokens=text.chat([{"role": "user", "content": question}]),
            question=question,
        ),
    ]
