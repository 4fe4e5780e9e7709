"""The page: one HTML file that holds its styles, scripts and data, and loads nothing.

Words and tables are written here and are there without scripts; the plots are drawn in the browser
(`*.js` of this folder), so that they fit any width, follow the colour scheme and tell values. Every
name and message is escaped here, or put into the document as text by the scripts.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import time
from collections.abc import Iterator, Sequence
from importlib import resources
from typing import Any

from megatron_ft.report import wording
from megatron_ft.report.compare import change, differences, side_by_side
from megatron_ft.report.data import comparison_data, run_data
from megatron_ft.report.figures import Figure, figures_of, headline, status_of, survived
from megatron_ft.report.incident_table import incident_table
from megatron_ft.report.load import RunData
from megatron_ft.report.rows import rows_of
from megatron_ft.report.timeline import Timeline
from megatron_ft.report.times import Part, parts_of

_SCRIPTS = ("draw.js", "view.js", "curves.js", "curve_plots.js", "lanes.js", "table.js", "main.js")
_STYLES = ("page.css", "tables.css", "plots.css", "legends.css", "narrow.css")
_NUM_TILES = 8


def build_page(runs: Sequence[RunData], now: float | None = None) -> str:
    """The whole page.

    Args:
        runs: one run, or several to compare; the first is the one that others are compared with.
        now: Unix seconds, for the age of a run that has not ended.
    """
    when = time.time() if now is None else now
    names = ", ".join(run.name for run in runs)
    data: dict[str, Any] = {"runs": [], "comparison": None}
    sections: list[str] = []
    if len(runs) > 1:
        data["comparison"] = comparison_data(runs)
        sections.append("".join(_comparison(runs, when)))
    for index, run in enumerate(runs):
        timeline = Timeline(run.events)
        rows = rows_of(run, timeline)
        data["runs"].append(run_data(run, rows, timeline))
        sections.append("".join(_run(index, run, rows, when, alone=len(runs) == 1)))
    script = f"(function(){{'use strict';\n{''.join(map(_resource, _SCRIPTS))}}})();"
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    return "".join(
        (
            '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            '<meta name="color-scheme" content="light dark">',
            f"<title>{_text(names)} - run report</title>",
            f"<style>{''.join(map(_resource, _STYLES))}</style></head>\n<body>",
            *sections,
            f"<footer>Made {wording.clock(when)} by megatron_ft from the run director"
            f"{'y' if len(runs) == 1 else 'ies'} "
            f"{_text(', '.join(str(run.path) for run in runs))}.</footer>",
            "<noscript><p class='note'>The plots need scripts, which are off.</p></noscript>",
            f'<script type="application/json" id="data">{_json(data)}</script>',
            f"<script>{script}</script></body></html>\n",
        )
    )


def _run(index: int, run: RunData, rows: Any, now: float, *, alone: bool) -> Iterator[str]:
    status, tone = status_of(run)
    level = "h1" if alone else "h2"
    yield f'<section class="run" id="run-{index}" data-run="{index}"><header>'
    yield f'<{level}>{_text(run.name)} <span class="status {tone}">{_text(status)}</span></{level}>'
    yield f'<p class="lead">{_text(headline(run, now))}</p>'
    through = f"{_capital(survived(run, rows))}. {_sizes(run)}"
    yield f'<p class="sub">{_text(through)}</p></header>'
    if run.notes:
        yield '<ul class="notes">'
        yield "".join(f"<li>{_text(note)}</li>" for note in run.notes)
        yield "</ul>"
    yield _tiles(figures_of(run)[:_NUM_TILES])
    yield _toolbar()
    yield _plot("curves", "Loss over steps", "curve-controls")
    yield _plot("world", "Who served which slot")
    yield _plot("shares", "Microbatches of each replica")
    yield _time(parts_of(run.events, run.accounts), run)
    yield incident_table(index, rows, Timeline(run.events).begin)
    yield _everything(run)
    yield "</section>\n"


def _toolbar() -> str:
    return (
        '<div class="toolbar"><span role="group" aria-label="horizontal axis">'
        '<button type="button" data-axis="step" aria-pressed="true">steps</button>'
        '<button type="button" data-axis="time" aria-pressed="false">time</button></span>'
        '<button type="button" data-reset hidden>whole run</button>'
        '<span class="hint">Drag over a plot to look closer.</span></div>'
    )


def _plot(kind: str, title: str, controls: str = "") -> str:
    held = f'<div class="{controls}"></div>' if controls else ""
    return (
        f'<figure class="plot" data-plot="{kind}"><figcaption><h3>{title}</h3>{held}</figcaption>'
        '<div class="canvas"></div><div class="legend"></div><p class="plot-note"></p></figure>'
    )


def _tiles(figures: Sequence[Figure]) -> str:
    tiles = "".join(
        f'<div class="tile {figure.tone}"><dt>{_text(figure.name)}</dt>{_value("dd", figure)}</div>'
        for figure in figures
    )
    return f'<dl class="tiles">{tiles}</dl>'


def _value(tag: str, figure: Figure, extra: str = "") -> str:
    """A figure as it is read, with the exact value for whoever hovers over it or takes it apart."""
    exact = _text(json.dumps(figure.raw))
    title = f' title="{exact}"' if isinstance(figure.raw, float) else ""
    data = f' data-field="{figure.field}" data-value="{exact}"' if _is_plain(figure.raw) else ""
    return f"<{tag}{data}{title}>{_text(figure.text)}{extra}</{tag}>"


def _time(parts: Sequence[Part], run: RunData) -> str:
    wall = run.summary["wall_s"]
    shown = [part for part in parts if part.seconds > 0]
    if not wall or not shown:
        return ""
    bar = "".join(
        f'<span class="part-{part.key}" style="flex-grow:{part.seconds / wall:.6f}" '
        f'title="{_text(part.label)}: {wording.seconds(part.seconds)}"></span>'
        for part in shown
    )
    lines = "".join(
        f'<tr><td><span class="swatch part-{part.key}"></span>{_text(part.label)}</td>'
        f'<td class="n">{wording.seconds(part.seconds)}</td>'
        f'<td class="n">{_share(part.seconds / wall)}</td></tr>'
        for part in shown
    )
    return (
        '<figure class="plot"><figcaption><h3>Where the time went</h3></figcaption>'
        f'<p class="sub">Goodput {run.summary["goodput"]:.1%}: committed steps are that share of '
        f"{wording.seconds(wall)}.</p>"
        f'<div class="bar" role="img" aria-label="shares of the wall time">{bar}</div>'
        f'<table class="parts"><tbody>{lines}</tbody></table></figure>'
    )


def _share(value: float) -> str:
    return f"{value:.1%}" if value >= 0.0005 else "&lt;0.1%"


def _comparison(runs: Sequence[RunData], now: float) -> Iterator[str]:
    yield f'<section class="comparison"><h1>{len(runs)} runs compared</h1>'
    yield '<ul class="runs">'
    for index, run in enumerate(runs):
        status, tone = status_of(run)
        yield (
            f'<li><span class="swatch series-{index % 8}"></span>'
            f'<a href="#run-{index}">{_text(run.name)}</a> '
            f'<span class="status {tone}">{_text(status)}</span> {_text(headline(run, now))}</li>'
        )
    yield "</ul>"
    yield _plot("losses", "Loss over steps")
    yield _plot("differences", f"Loss minus that of {_text(runs[0].name)}")
    yield '<ul class="differences">'
    for found in differences(runs):
        yield f"<li><b>{_text(found.name)}</b>: {_text(found.text)}.</li>"
    yield '</ul><h3>Key figures</h3><div class="wide"><table class="figures"><thead><tr><th></th>'
    yield "".join(f"<th>{_text(run.name)}</th>" for run in runs)
    yield "</tr></thead><tbody>"
    yield f"<tr><th>status</th>{''.join(f'<td>{_text(status_of(r)[0])}</td>' for r in runs)}</tr>"
    for line in side_by_side(runs):
        yield f"<tr><th>{_text(line[0].name)}</th>"
        for figure in line:
            changed = change(figure, line[0])
            yield _value("td", figure, f" <small>{_text(changed)}</small>" if changed else "")
        yield "</tr>"
    yield "</tbody></table></div></section>\n"


def _everything(run: RunData) -> str:
    """Every field of summary.json but the incidents, unrounded."""
    lines = []
    for name, value in run.summary.items():
        if name == "incidents" or (isinstance(value, list) and len(value) > 100):
            continue
        shown = value if isinstance(value, str) else json.dumps(value)
        lines.append(f"<tr><th>{_text(name)}</th><td>{_text(shown)}</td></tr>")
    return (
        '<details class="everything"><summary>All of summary.json, unrounded</summary>'
        f'<div class="wide"><table><tbody>{"".join(lines)}</tbody></table></div></details>'
    )


def _sizes(run: RunData) -> str:
    start = run.start
    if not start:
        return ""
    plural = "" if start["num_replicas"] == 1 else "s"
    stages = "" if start["num_stages"] == 1 else "s"
    began = wording.clock(float(run.events[0]["time"]))
    return (
        f"{start['num_processes']} processes, {start['num_slots']} slots: "
        f"{start['num_replicas']} replica{plural} of {start['num_stages']} stage{stages}; "
        f"{start['global_microbatches']} microbatches a step. Began {began}."
    )


def _capital(words: str) -> str:
    return words[:1].upper() + words[1:]


def _is_plain(value: object) -> bool:
    return value is None or isinstance(value, int | float | str)


def _text(words: str) -> str:
    return html.escape(words, quote=True)


def _json(value: Any) -> str:
    """JSON that nothing inside a script element can end."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def _resource(name: str) -> str:
    return resources.files("megatron_ft.report").joinpath(name).read_text(encoding="utf-8")
