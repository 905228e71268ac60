"""What commands share: options that say what happens without them, and mistakes told in one line."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar

import tyro

from srl.core.errors import ConfigError

T = TypeVar("T")


def unless(value: str, **more: Any) -> Any:
    """How the help of an option says what happens without it."""
    return tyro.conf.arg(help_behavior_hint=f"(default: {value})", **more)


RunFolder = Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="RUN")]


def parse(kind: type[T], arguments: Sequence[str], command: str, default: T | None = None) -> T:
    """Parse ``arguments`` into the dataclass ``kind``; a mistake becomes a ConfigError of one line."""
    said = io.StringIO()
    given: Any = {} if default is None else {"default": default}
    try:
        with contextlib.redirect_stderr(said):
            found: T = tyro.cli(kind, args=list(arguments), prog=f"srl {command}", **given)
            return found
    except SystemExit as error:
        if not error.code:
            raise
        raise ConfigError(_one_line(said.getvalue())) from None


def _one_line(box: str) -> str:
    """The message in one of tyro's boxes, and the option it suggests."""
    sections: list[list[str]] = [[]]
    for line in box.splitlines()[1:]:  # the first line is the box's upper edge with a heading
        words = line.strip("│|╭╮╰╯+ ")
        if set(words) <= set("─-"):
            sections.append([])
        else:
            sections[-1].append(words)
    found = [section for section in sections if section]
    text = " ".join(found[0]) if found else "the command line cannot be understood"
    for section in found[1:]:
        if section[0].startswith("Perhaps you meant") and len(section) > 1:
            text += f"; did you mean {section[1].split()[0]}?"
    return text
