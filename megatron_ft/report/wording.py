"""Numbers as a person reads them."""

from __future__ import annotations

import math
import time


def seconds(value: float) -> str:
    """`0.213 s`, `12.3 s`, `2 min 05 s`, `1 h 02 min`, `3 d 4 h`."""
    if not math.isfinite(value):
        return str(value)
    if value < 0:
        return f"-{seconds(-value)}"
    if value < 0.001:
        return f"{value * 1e6:.0f} µs" if value else "0 s"
    if value < 59.95:
        return f"{value:.3f} s" if value < 9.9995 else f"{value:.1f} s"
    whole = round(value)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02} s"
    if whole < 86400:
        return f"{whole // 3600} h {whole % 3600 // 60:02} min"
    return f"{whole // 86400} d {whole % 86400 // 3600} h"


def loss(value: float | str | None) -> str:
    """Six decimals; `summary.json` spells what is not finite as a string."""
    if value is None:
        return "-"
    return value if isinstance(value, str) else f"{value:.6f}"


def size(num_bytes: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.0f} B" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} TiB"


def clock(when: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(when))


def number(value: float) -> str:
    """Four significant digits, thousands apart."""
    if not math.isfinite(value):
        return str(value)
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
