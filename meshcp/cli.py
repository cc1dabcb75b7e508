"""The ``meshcp`` command."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from .models import table

app = typer.Typer(help="Context parallelism for Diffusers transformers.", no_args_is_help=True, add_completion=False)


@app.callback()
def main() -> None:
    """Context parallelism for Diffusers transformers."""


@app.command()
def models(
    markdown: Annotated[bool, typer.Option(help="Print the table of the README.")] = False,
    write: Annotated[
        Path | None, typer.Option(help="Put the table between the markers of this file (README.md).")
    ] = None,
) -> None:
    """The models that have a plan, with their streams and limits; then those that have none, and why."""
    header, *rows = table()
    text = _markdown(header, rows)
    if write is not None:
        write.write_text(between_markers(write.read_text(), text))
        return
    if markdown:
        print(text)
        return
    shown = Table(*header)
    for row in rows:
        shown.add_row(*row)
    Console().print(shown)


BEGIN, END = "<!-- models -->\n", "<!-- /models -->"


def _markdown(header: list[str], rows: list[list[str]]) -> str:
    cells = ([cell.replace("|", "\\|") for cell in row] for row in (header, ["---"] * len(header), *rows))
    return "\n".join(f"| {' | '.join(row)} |" for row in cells)


def between_markers(page: str, text: str) -> str:
    """``page`` with ``text`` between its two markers."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise typer.BadParameter(
            f"no {BEGIN.strip()} ... {END} in the file; put these two lines where the table belongs"
        )
    return f"{before}{BEGIN}{text}\n{END}{after}"


if __name__ == "__main__":
    app()
