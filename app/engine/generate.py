"""From a prompt to tokens: prefill chunk by chunk, then steps that a draft may lengthen.

    rows in the target's cache   0 .. position-1          the token at `position` is chosen and not yet a row
    rows in the draft's cache    0 .. position-1          row p holds the token at p+1, so it is one token ahead

    a step      propose  d1 d2 ..  by the draft           (d1 from its last logits, further ones chained)
                verify   [token d1 d2 ..] in one forward  rows position .. position+proposed
                accept   the longest prefix that the model chooses itself, and its own next token
                draft    over the accepted rows with true hidden states; this overwrites chained rows
                crop     the next step starts at position + accepted + 1: rejected rows are written over

The service and `run_locally` both run this code, so what they compare differs in the transfer alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt
import torch

from app.core.chunks import ChunkPlan
from app.core.ids import PageArray
from app.engine.base import DraftModel, DraftStep, Engine, ForwardStep, LayerHooks
from app.engine.digests import logits_digest
from app.engine.sampling import Sampler
from app.errors import BadInput

TOP_K = 8
"""The draft's best next tokens that go from prefill to decode."""


def _no_ids() -> npt.NDArray[np.int32]:
    return np.empty(0, dtype=np.int32)


def _no_floats() -> npt.NDArray[np.float32]:
    return np.empty(0, dtype=np.float32)


@dataclass(frozen=True, kw_only=True, eq=False)
class Handover:
    """What decode needs beside the pages: the first token, and the draft's output for the last prompt row.

    `hidden` is that row in the draft's width, `top_ids` are the draft's best tokens to follow `token`, best
    first. Without a draft there is no hidden state and no such token. `logits` are those that the token was
    chosen from, and `draft_logits` the draft's, where they were computed here; they do not travel.
    """

    token: int
    log_probability: float
    logits: torch.Tensor | None = None
    draft_logits: torch.Tensor | None = None
    hidden: npt.NDArray[np.float32] | None = None
    top_ids: npt.NDArray[np.int32] = field(default_factory=_no_ids)
    top_log_probabilities: npt.NDArray[np.float32] = field(default_factory=_no_floats)


@dataclass(frozen=True, kw_only=True)
class Chosen:
    """An output token; digests of the logits it was chosen from, and of the draft's behind it, when asked for.

    `draft_logits` is on the last token of a step only: the draft's proposal for the token after it.
    """

    token: int
    log_probability: float
    logits: str | None = None
    draft_logits: str | None = None


@dataclass(frozen=True, kw_only=True)
class StepOut:
    """One step's tokens: `accepted` of the `proposed` ones, and the model's own."""

    tokens: tuple[Chosen, ...]
    proposed: int
    accepted: int


def prefill_chunk(
    engine: Engine,
    prompt: Sequence[int],
    plan: ChunkPlan,
    pages: PageArray,
    hooks: LayerHooks,
    sampler: Sampler,
    *,
    drafts: bool,
) -> Handover | None:
    """Forward one chunk through the target and, with `drafts`, through its draft. None unless it is the last.

    The draft's row p takes the token p+1, so a chunk's last draft row takes the next chunk's first token, or
    the token that has just been chosen. Rows of a cached prefix must come from a prompt that agrees with this
    one a token further: otherwise the prefix's last draft row is another prompt's.
    """
    target = engine.forward(
        ForwardStep(
            tokens=prompt[plan.start : plan.end],
            start=plan.start,
            pages=pages,
            logits="last" if plan.is_last else "none",
        ),
        hooks,
    )
    following, log_probability = None, 0.0
    if target.logits is not None:
        following, log_probability = sampler.choose(target.logits[0])
    draft = engine.draft if drafts else None
    proposal = None
    if draft is not None:
        assert target.hidden is not None
        after = prompt[plan.end] if following is None else following
        proposal = draft.forward(
            DraftStep(
                tokens=[*prompt[plan.start + 1 : plan.end], after],
                start=plan.start,
                pages=pages,
                hidden=target.hidden,
            ),
            hooks,
        )
    if following is None:
        return None
    assert target.logits is not None
    if proposal is None:
        return Handover(token=following, log_probability=log_probability, logits=target.logits[0])
    assert proposal.logits is not None and proposal.hidden is not None
    best = torch.log_softmax(proposal.logits[0], dim=-1).topk(min(TOP_K, engine.vocabulary))
    return Handover(
        token=following,
        log_probability=log_probability,
        logits=target.logits[0],
        draft_logits=proposal.logits[0],
        hidden=proposal.hidden[-1].float().cpu().numpy(),
        top_ids=best.indices.numpy().astype(np.int32),
        top_log_probabilities=best.values.numpy(),
    )


class Continuation:
    """Decoding after a handover. `position` is the count of rows in the pages: that of the handed token.

    Greedy decoding proposes up to `proposals` tokens a step. It is one token a step without a draft, without a
    draft's handover, and at a temperature above 0, where the draft is not run any more: what a draft would
    propose could not be accepted by comparing tokens. So the draft's rows end at the prompt there.
    """

    def __init__(
        self,
        engine: Engine,
        pages: PageArray,
        position: int,
        handover: Handover,
        sampler: Sampler,
        proposals: int,
        *,
        digests: bool = False,
    ) -> None:
        if proposals < 0:
            raise BadInput(f"cannot propose {proposals} tokens a step")
        self.position = position
        self._engine = engine
        self._pages = pages
        self._sampler = sampler
        self._digests = digests
        self._token = handover.token
        ready = engine.draft is not None and handover.hidden is not None and len(handover.top_ids) > 0
        self._draft: DraftModel | None = engine.draft if ready and sampler.greedy and proposals else None
        self._proposals = proposals if self._draft is not None else 0
        self._first = int(handover.top_ids[0]) if ready else 0
        self._hidden = torch.from_numpy(handover.hidden) if handover.hidden is not None else None
        rows = len(pages) * engine.geometry.page_size
        self._room = min(rows, engine.max_positions)

    def move(self, pages: PageArray) -> None:
        """Go on over another page table, which holds the same rows."""
        self._pages = pages

    def step(self, hooks: LayerHooks, *, at_most: int | None = None) -> StepOut:
        """At least one token and at most `at_most`, or as many as the pages have room for."""
        room = self._room - self.position if at_most is None else min(at_most, self._room - self.position)
        proposed = self._propose(min(self._proposals, max(room, 1) - 1), hooks)
        target = self._engine.forward(
            ForwardStep(
                tokens=[self._token, *proposed], start=self.position, pages=self._pages, logits="all"
            ),
            hooks,
        )
        assert target.logits is not None
        tokens: list[Chosen] = []
        for i, row in enumerate(target.logits):
            token, log_probability = self._sampler.choose(row)
            digest = logits_digest(row) if self._digests else None
            tokens.append(Chosen(token=token, log_probability=log_probability, logits=digest))
            if i == len(proposed) or proposed[i] != token:
                break
        if self._draft is not None:
            assert target.hidden is not None
            self._redraft(self._draft, tokens, target.hidden[: len(tokens)], hooks)
        self.position += len(tokens)
        self._token = tokens[-1].token
        return StepOut(tokens=tuple(tokens), proposed=len(proposed), accepted=len(tokens) - 1)

    def _propose(self, count: int, hooks: LayerHooks) -> list[int]:
        """The draft's tokens to follow the current one."""
        proposed: list[int] = []
        token, hidden = self._first, self._hidden
        for i in range(count):
            proposed.append(token)
            if i + 1 == count:
                break
            assert self._draft is not None and hidden is not None
            chained = self._draft.forward(
                DraftStep(
                    tokens=[token],
                    start=self.position + i,
                    pages=self._pages,
                    hidden=hidden.unsqueeze(0),
                    chained=True,
                ),
                hooks,
            )
            assert chained.logits is not None and chained.hidden is not None
            token, hidden = int(torch.argmax(chained.logits[0])), chained.hidden[0]
        return proposed

    def _redraft(
        self, draft: DraftModel, tokens: list[Chosen], hidden: torch.Tensor, hooks: LayerHooks
    ) -> None:
        """Draft rows of the accepted tokens and the model's own, out of the target's hidden states."""
        out = draft.forward(
            DraftStep(
                tokens=[chosen.token for chosen in tokens],
                start=self.position,
                pages=self._pages,
                hidden=hidden,
            ),
            hooks,
        )
        assert out.logits is not None and out.hidden is not None
        self._first, self._hidden = int(torch.argmax(out.logits[0])), out.hidden[-1]
        if self._digests:
            tokens[-1] = replace(tokens[-1], draft_logits=logits_digest(out.logits[0]))
