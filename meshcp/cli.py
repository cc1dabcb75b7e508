"""The ``meshcp`` command."""

from __future__ import annotations

import typer
from rich.console import Console
from rich.table import Table

from .models import table

app = typer.Typer(help="Context parallelism for Diffusers transformers.", no_args_is_help=True, add_completion=False)


@app.callback()
def main() -> None:
    """Context parallelism for Diffusers transformers."""


@app.command()
def models(markdown: bool = typer.Option(False, help="Print the table of the README.")) -> None:
    """The models that have a plan, with their streams and limits."""
    header, *rows = table()
    if markdown:
        print("\n".join(f"| {' | '.join(row)} |" for row in (header, ["---"] * len(header), *rows)))
        return
    shown = Table(*header)
    for row in rows:
        shown.add_row(*row)
    Console().print(shown)


if __name__ == "__main__":
    app()
