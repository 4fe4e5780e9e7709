"""The table of incidents as HTML; `table.js` filters and sorts it."""

from __future__ import annotations

import html
from collections.abc import Sequence

from megatron_ft.report import wording
from megatron_ft.report.rows import TAGS, Row

# Name, title of the column, and whether it holds numbers.
_COLUMNS = (
    ("step", "step", True),
    ("time", "time", True),
    ("who", "who died", False),
    ("when", "when", False),
    ("deeds", "what was done", False),
    ("detect", "noticed after", True),
    ("repair", "repair", True),
    ("moved", "state moved", True),
    ("again", "microbatches again", True),
    ("downtime", "downtime", True),
)


def incident_table(index: int, rows: Sequence[Row], begin: float) -> str:
    """The section with the table.

    Args:
        index: number of the run on the page; row k gets the id `incident-<index>-<k>`.
        rows: see `rows_of`.
        begin: Unix seconds at which the run began.
    """
    if not rows:
        return '<section class="incidents"><h3>Incidents</h3><p class="sub">None.</p></section>'
    counts = {tag: sum(tag in row.tags for row in rows) for tag in TAGS}
    kinds = "".join(
        f'<option value="{tag}">{words} ({counts[tag]})</option>'
        for tag, words in TAGS.items()
        if counts[tag]
    )
    sorting = "".join(
        f'<option value="{at}">{title}</option>' for at, (_, title, _) in enumerate(_COLUMNS)
    )
    heads = "".join(
        f'<th scope="col" class="{"n" if numeric else ""}" aria-sort="none">'
        f'<button type="button">{title}</button></th>'
        for _, title, numeric in _COLUMNS
    )
    body = "".join(_line(index, number, row, begin) for number, row in enumerate(rows))
    return (
        f'<section class="incidents"><h3>Incidents</h3><div class="filters">'
        '<label>find&nbsp; <input type="search" data-find placeholder="slot 3"></label>'
        f'<label>show&nbsp; <select data-kind><option value="">all ({len(rows)})</option>{kinds}'
        "</select></label>"
        f'<label class="narrow">sort by&nbsp; <select data-sort>{sorting}</select></label>'
        '<output data-count></output></div><div class="wide tall">'
        f"<table><thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table></div></section>"
    )


def _line(index: int, number: int, row: Row, begin: float) -> str:
    cost = row.cost
    after = float(row.first["time"]) - begin
    again = None if row.recomputed is None else float(row.recomputed)
    shared = f"of {row.sharing} together" if row.sharing > 1 and row.downtime_s is not None else ""
    details = [
        f"{words} {wording.seconds(value)}"
        for words, value in (("restore", cost["restore_s"]), ("recompute", cost["recompute_s"]))
        if value is not None
    ]
    cells = (
        _number(0, float(row.iteration), f"{row.iteration:,}", f"epoch {row.epoch}"),
        _number(1, after, wording.seconds(after)),
        _words(2, row.who),
        _words(3, row.when),
        _words(4, row.deeds),
        _number(5, row.detect_s, _seconds(row.detect_s)),
        _number(6, cost["repair_s"], _seconds(cost["repair_s"]), *details),
        _number(7, cost["transfer_bytes"], *_moved(cost)),
        _number(8, again, "-" if again is None else f"{again:,.0f}"),
        _number(9, row.downtime_s, _seconds(row.downtime_s), shared),
    )
    return (
        f'<tr id="incident-{index}-{number}" data-tags="{" ".join(row.tags)}">{"".join(cells)}</tr>'
    )


def _moved(cost: dict[str, float | None]) -> tuple[str, ...]:
    moved, took = cost["transfer_bytes"], cost["transfer_s"]
    if moved is None:
        return (_seconds(took),)
    return (wording.size(moved), f"in {wording.seconds(took)}" if took else "")


def _seconds(value: float | None) -> str:
    return "-" if value is None else wording.seconds(value)


def _number(column: int, value: float | None, text: str, *small: str) -> str:
    below = "".join(f"<small>{html.escape(words)}</small>" for words in small if words)
    sort = "" if value is None else f"{value:.9g}"
    return (
        f'<td class="n{"" if value is not None else " none"}" data-label="{_COLUMNS[column][1]}" '
        f'data-v="{sort}">{html.escape(text)}{below}</td>'
    )


def _words(column: int, lines: Sequence[str]) -> str:
    inside = "".join(f"<div>{html.escape(line)}</div>" for line in lines) or "-"
    empty = "" if lines else ' class="none"'
    return f'<td{empty} data-label="{_COLUMNS[column][1]}">{inside}</td>'
