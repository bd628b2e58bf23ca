"""The lifecycle tables of app/core/lifecycle.py as Promela: `python -m formal tables > formal/tables.pml`.

Each side gets a macro that follows its table. An event that the table does not list is an assertion: the
protocol must never raise it. What has been followed is noted outside the model's state, so that an
exhaustive run can say which entries it has used.
"""

from __future__ import annotations

from collections.abc import Mapping

from app.core.lifecycle import TABLES, Event, State, Table

Entry = tuple[str, str, str, str]
"""Side, state, event, next state."""

_HEAD = """\
/* Generated from app/core/lifecycle.py by `python -m formal tables`: do not edit. */

mtype = { %s };
mtype = { %s };

c_decl {
static unsigned char used[%d];
static void say_used(void)
{
	int entry;
	for (entry = 0; entry < %d; entry++)
		if (used[entry])
			printf("used %%d\\n", entry);
}
}

inline note_used() { c_code { atexit(say_used); } }
"""


def entries(tables: Mapping[str, Table] = TABLES) -> list[Entry]:
    """Every entry of every table; its place in the list is the number that a run reports."""
    return [
        (side, str(state), str(event), str(target))
        for side, table in tables.items()
        for (state, event), target in table.items()
    ]


def promela(tables: Mapping[str, Table] = TABLES) -> str:
    """The text of tables.pml."""
    numbered = list(enumerate(entries(tables)))
    parts = [_HEAD % (_names(State), _names(Event), len(numbered), len(numbered))]
    for side in tables:
        lines = [
            f"    :: life == {state.upper()} && event == {event.upper()} ->"
            f" c_code {{ used[{number}] = 1; }}; life = {target.upper()}"
            for number, (of, state, event, target) in numbered
            if of == side
        ]
        body = "\n".join([*lines, "    :: else -> assert(false) /* an illegal event */"])
        parts.append(f"inline advance_{side}(life, event) {{\n    if\n{body}\n    fi\n}}\n")
    return "\n".join(parts)


def _names(kind: type[State] | type[Event]) -> str:
    return ", ".join(member.name for member in kind)
