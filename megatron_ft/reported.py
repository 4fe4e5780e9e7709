"""The losses that Megatron reports of a step, where it is not the only one who sums them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron_ft.session import Session


@contextlib.contextmanager
def summed_once(session: Session) -> Iterator[None]:
    """While the transaction sums what is reported, Megatron must not sum it again.

    Megatron sums over its model's dp_cp group; meanwhile that is this slot alone.
    """
    if session.transaction is None:
        yield
        return
    places = [
        (collection, name)
        for collection in {id(c): c for c in map(_pg_collection, session.model)}.values()
        for name in ("dp_cp", "dp_cp_gtp_remat")
        if getattr(collection, name, None) is not None
    ]
    before = [getattr(collection, name) for collection, name in places]
    for collection, name in places:
        setattr(collection, name, session.loss_group)
    try:
        yield
    finally:
        for (collection, name), group in zip(places, before, strict=True):
            setattr(collection, name, group)


def _pg_collection(chunk: Any) -> Any:
    from megatron.core.utils import get_attr_wrapped_model

    return get_attr_wrapped_model(chunk, "pg_collection")


def of_an_adopted_stage(reports: list[dict[str, Any]]) -> dict[str, Any]:
    """The loss, where it is this process's adopted stage that computes it; else nothing."""
    if not reports:
        return {}
    total, count = sum(report["lm loss"] for report in reports)
    return {"lm loss": total / count}
