"""The tables of options in ``checked_backend/docs``, written from the options themselves.

    python -m tests.docs            # say which pages are out of date
    python -m tests.docs --write    # write their tables anew

A table stands between ``<!-- options: BACKEND -->`` or ``<!-- verb: VERB -->`` and ``<!-- end -->``.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import typer

from checked_backend.cli import verbs
from checked_backend.options import AotOptions, BackendOptions, CheckOptions, InterpreterOptions, MetadataCheck

FOLDER = Path(__file__).parents[1] / "checked_backend" / "docs"

BACKENDS: Mapping[str, type[BackendOptions]] = {
    "numcheck": CheckOptions,
    "debug_interpreter": InterpreterOptions,
    "graph_dumper": AotOptions,
}

_TABLE = re.compile(r"(<!-- (options|verb): (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def main(words: Sequence[str] | None = None) -> int:
    """Compare the pages with the options, or write them. The exit code is 1 if one is out of date."""
    write = "--write" in (sys.argv[1:] if words is None else words)
    old = dict(out_of_date())
    for page, text in old.items():
        if write:
            page.write_text(text, encoding="utf-8")
        print(f"{page.name}: {'written' if write else 'out of date; python -m tests.docs --write'}")
    return int(bool(old) and not write)


def out_of_date() -> Iterator[tuple[Path, str]]:
    """The pages whose tables are not those of today, with the text that they should have."""
    for page in sorted(FOLDER.glob("*.md")):
        text = page.read_text("utf-8")
        wanted = _TABLE.sub(lambda found: found[1] + "\n".join(_table(found[2], found[3])) + "\n" + found[4], text)
        if wanted != text:
            yield page, wanted


def _table(what: str, name: str) -> Iterator[str]:
    yield ""
    if what == "options":
        yield from _rows(("option", "default", "meaning"), _options(BACKENDS[name]))
    else:
        yield from _rows((f"`checked-backend {name}`", "default", ""), _parameters(name))
    yield ""


def _options(options: type[BackendOptions]) -> Iterator[tuple[str, str, str]]:
    for name, field in options.model_fields.items():
        default = field.get_default(call_default_factory=True)
        if default == get_args(MetadataCheck) or (name == "graphs" and default):
            shown = "all"
        else:
            shown = "" if default is None else f"`{default}`"
        yield f"`{name}`", shown, str(field.description)


def _parameters(verb: str) -> Iterator[tuple[str, str, str]]:
    found: Any = typer.main.get_command(verbs.app)
    for parameter in found.commands[verb].params:
        names = [*parameter.opts, *parameter.secondary_opts]
        is_option = parameter.param_type_name == "option"
        value = "" if getattr(parameter, "is_flag", False) else f" {parameter.metavar or parameter.name.upper()}"
        shown = ", ".join(f"`{name}{value}`" for name in names) if is_option else f"`{value.strip()}`"
        default = parameter.default
        yield shown, "" if default is None or isinstance(default, bool) else f"`{default}`", str(parameter.help)


def _rows(head: Sequence[str], rows: Iterator[tuple[str, str, str]]) -> Iterator[str]:
    for cells in (head, ["---"] * len(head), *rows):
        yield "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


if __name__ == "__main__":
    sys.exit(main())
