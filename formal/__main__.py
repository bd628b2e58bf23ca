"""`python -m formal`: explore everything, the wider bounds too. `python -m formal tables`: print tables.pml."""

from __future__ import annotations

import sys

from formal.check import SEARCHES, WIDER, WRONG, explore
from formal.tables import promela


def main() -> int:
    if sys.argv[1:] == ["tables"]:
        sys.stdout.write(promela())
        return 0
    bad = 0
    for name, macros in {**SEARCHES, **WIDER}.items():
        outcome = explore(macros, timeout_s=3600.0)
        bad += bool(outcome.error) or not outcome.complete
        print(f"{name}: {outcome.states:,} states in {outcome.seconds:.0f} s, {outcome.error or 'no error'}")
    for name, (macros, expected) in WRONG.items():
        outcome = explore(macros, timeout_s=3600.0)
        bad += expected not in outcome.error
        print(f"{name}: found after {outcome.states:,} states: {outcome.error or 'NOTHING FOUND'}")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
