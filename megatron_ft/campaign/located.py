"""YAML whose values know their line, so that a mistake in a campaign is named where it is made."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NoReturn

import yaml


class CampaignError(ValueError):
    """A campaign that cannot be run as written: file, line, field, and what to do."""


class Located:
    """One value of a YAML file.

    Args:
        file: For messages.
        path: Dotted names of the keys that lead here; empty for the whole file.
        line: From 0, where it is not the value's own: a block begins below its key.
    """

    def __init__(self, file: str, node: yaml.Node, path: str = "", line: int | None = None) -> None:
        self.file = file
        self.node = node
        self.path = path
        self.line = node.start_mark.line if line is None else line

    @classmethod
    def load(cls, path: Path) -> Located:
        """Read a file.

        Raises:
            CampaignError: There is no such file, or it is no YAML, or it is empty.
        """
        try:
            node = yaml.compose(path.read_text(), Loader=yaml.SafeLoader)
        except OSError as error:
            raise CampaignError(f"{path}: {error.strerror}: give the path of a campaign") from None
        except yaml.MarkedYAMLError as error:
            mark = error.problem_mark or error.context_mark
            line = f":{mark.line + 1}" if mark else ""
            raise CampaignError(f"{path}{line}: this is no YAML: {error.problem}") from None
        if node is None:
            raise CampaignError(f"{path}: the file is empty; docs/campaigns.md shows a campaign")
        return cls(str(path), node)

    def fail(self, problem: str) -> NoReturn:
        where = f"{self.file}:{self.line + 1}"
        raise CampaignError(f"{where}: {self.path + ': ' if self.path else ''}{problem}")

    @property
    def value(self) -> Any:
        """As `yaml.safe_load` would give it."""
        loader = yaml.SafeLoader("")
        try:
            return loader.construct_object(self.node, deep=True)
        except yaml.MarkedYAMLError as error:
            self.fail(f"{error.problem}")

    @property
    def is_empty(self) -> bool:
        return isinstance(self.node, yaml.ScalarNode) and self.value is None

    def fields(self, known: Iterable[str] | None = None) -> dict[str, Located]:
        """The values of a mapping; nothing at all counts as an empty one.

        Args:
            known: The keys that there may be; None for any.
        """
        if self.is_empty:
            return {}
        if not isinstance(self.node, yaml.MappingNode):
            self.fail(f"must be a mapping, as in `key: value`, not {self._shown()}")
        allowed = None if known is None else list(known)
        found: dict[str, Located] = {}
        for key_node, node in self.node.value:
            key = str(key_node.value)
            here = Located(self.file, key_node, self._below(key))
            if key in found:
                here.fail("is given twice; keep one")
            if allowed is not None and key not in allowed:
                near = difflib.get_close_matches(key, allowed, 1)
                here.fail(
                    f"there is no such field; {f'did you mean {near[0]}? ' if near else ''}"
                    f"There are {', '.join(allowed)}"
                )
            line = key_node.start_mark.line if isinstance(node, yaml.CollectionNode) else None
            found[key] = Located(self.file, node, self._below(key), line)
        return found

    def items(self) -> list[Located]:
        """The values of a sequence."""
        if not isinstance(self.node, yaml.SequenceNode):
            self.fail(f"must be a list, as in `[a, b]`, not {self._shown()}")
        return [
            Located(self.file, node, f"{self.path}[{i}]") for i, node in enumerate(self.node.value)
        ]

    def text(self) -> str:
        if not isinstance(self.value, str):
            self.fail(f"must be text, not {self._shown()}; put it in quotes")
        return str(self.value)

    def one_of(self, choices: Iterable[str]) -> str:
        options = list(choices)
        if self.value not in options:
            self.fail(f"{self._shown()} is none of {', '.join(options)}")
        return str(self.value)

    def integer(self, least: int = 0) -> int:
        value = self.value
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            self.fail(f"must be a whole number from {least} on, not {self._shown()}")
        return int(value)

    def number(self) -> float:
        """A number above zero. YAML reads 1e-6, which has no point, as text."""
        value = self.value
        try:
            if isinstance(value, bool) or not float(value) > 0:
                raise ValueError
        except (TypeError, ValueError):
            self.fail(f"must be a number above 0, not {self._shown()}")
        return float(value)

    def _below(self, key: str) -> str:
        return f"{self.path}.{key}" if self.path else key

    def _shown(self) -> str:
        if isinstance(self.node, yaml.ScalarNode):
            return repr(self.node.value)
        return "a list" if isinstance(self.node, yaml.SequenceNode) else "a mapping"
