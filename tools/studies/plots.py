"""Figures of the studies, in matplotlib (the extra ``report``)."""

from __future__ import annotations

import statistics
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .statistics import Curve

# Okabe and Ito: told apart with colour-blind eyes too.
COLOURS = ("#000000", "#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#8B6F00")
SIZE = (7.2, 4.4)


def figure() -> tuple[Any, Any]:
    """An empty figure and its axes; drawn without a screen."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    drawn, axes = pyplot.subplots(figsize=SIZE, layout="constrained")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#e4e4e4", linewidth=0.8)
    axes.set_axisbelow(True)
    return drawn, axes


def finish(drawn: Any, path: Path) -> None:
    from matplotlib import pyplot

    # Without a date and a version the same numbers give the same file.
    drawn.savefig(path, dpi=130, metadata={"Software": None})
    pyplot.close(drawn)


def curves(
    path: Path,
    series: Mapping[str, Sequence[Curve]],
    *,
    title: str,
    xlabel: str,
    ylabel: str,
    logarithmic: bool = False,
    target: float | None = None,
) -> None:
    """A line for each method: the mean of its seeds, and each seed thin behind it."""
    from matplotlib.ticker import LogLocator, NullFormatter

    drawn, axes = figure()
    for colour, (name, seeds) in zip(_colours(len(series)), series.items(), strict=True):
        for curve in seeds if len(seeds) > 1 else ():
            axes.plot(*zip(*curve, strict=True), color=colour, linewidth=0.7, alpha=0.3)
        mean = mean_curve(seeds)
        axes.plot(*zip(*mean, strict=True), color=colour, linewidth=1.8, label=name)
    if target is not None:
        axes.axhline(target, color="#777777", linewidth=1, linestyle=":", label="target")
    if logarithmic:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 1.5, 2, 3, 5, 7)))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set(title=title, xlabel=xlabel, ylabel=ylabel)
    _legend(drawn, axes)
    finish(drawn, path)


def mean_curve(seeds: Sequence[Curve]) -> list[tuple[float, float]]:
    """The mean at the places that all seeds have."""
    tables = [dict(curve) for curve in seeds]
    places = sorted(set.intersection(*(set(table) for table in tables)))
    return [(at, statistics.fmean(table[at] for table in tables)) for at in places]


def bars(
    path: Path,
    groups: Sequence[str],
    series: Mapping[str, Sequence[Sequence[float]]],
    *,
    title: str,
    ylabel: str,
    xlabel: str = "",
    marks: Mapping[str, float] | None = None,
    baseline: tuple[str, float] | None = None,
    from_zero: bool = True,
) -> None:
    """Bars in groups: a mean, its standard deviation, and a dot for each seed.

    Args:
        groups: Under the axis.
        series: Name -> for each group the values of the seeds, none where there are none.
        marks: What a paper has, by group, as diamonds.
        baseline: The name of a level to compare with, and the level, as a dashed line.
        from_zero: Whether the axis begins at zero. Otherwise there are no bars, whose lengths would
            mislead, but the means alone.
    """
    drawn, axes = figure()
    width = 0.8 / max(1, len(series))
    for number, (colour, (name, values)) in enumerate(
        zip(_colours(len(series)), series.items(), strict=True)
    ):
        shown = {group: seeds for group, seeds in enumerate(values) if seeds}
        places = [group + (number - (len(series) - 1) / 2) * width for group in shown]
        means = [statistics.fmean(seeds) for seeds in shown.values()]
        if from_zero:
            axes.bar(places, means, width * 0.9, color=colour, alpha=0.75, label=name)
        else:
            axes.scatter(places, means, s=60, marker="_", linewidth=3, color=colour, label=name)
        spreads = [statistics.stdev(s) if len(s) > 1 else 0.0 for s in shown.values()]
        axes.errorbar(places, means, spreads, fmt="none", ecolor=colour, capsize=3, zorder=2)
        for at, seeds in zip(places, shown.values(), strict=True):
            axes.scatter([at] * len(seeds), seeds, s=12, color="white", edgecolor=colour, zorder=3)
    if marks:
        groups_of = [groups.index(name) for name in marks]
        values_of = list(marks.values())
        axes.scatter(groups_of, values_of, marker="D", color="#D55E00", zorder=4, label="paper")
    if baseline is not None:
        name, level = baseline
        axes.axhline(level, color="#777777", linewidth=1, linestyle="--", label=name)
    axes.set_xticks(range(len(groups)), [textwrap.fill(name, 14) for name in groups])
    axes.set(title=title, ylabel=ylabel, xlabel=xlabel)
    if len(series) > 1 or marks or baseline is not None:
        _legend(drawn, axes)
    finish(drawn, path)


def _legend(drawn: Any, axes: Any) -> None:
    """Below the axes, where it covers nothing."""
    handles, labels = axes.get_legend_handles_labels()
    drawn.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False, fontsize=9)


def _colours(count: int) -> list[str]:
    return [COLOURS[number % len(COLOURS)] for number in range(count)]
