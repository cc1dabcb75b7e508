"""The registry, `meshcp models` and the table of the README say the same."""

from __future__ import annotations

from pathlib import Path

import diffusers
import pytest
from torch import nn
from typer.testing import CliRunner

import meshcp
from meshcp.cli import app
from meshcp.models import PLANS, REFUSED, plan_for, table

README = Path(__file__).parent.parent / "README.md"


def _run(*arguments: str) -> str:
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == 0, result.output
    return result.output


def test_the_readme_has_the_table_of_the_registry(tmp_path: Path) -> None:
    page = README.read_text()
    between = page.partition("<!-- models -->\n")[2].partition("<!-- /models -->")[0]
    assert between == _run("models", "--markdown"), "run: meshcp models --write README.md"
    copy = tmp_path / "README.md"
    copy.write_text(page.replace(between, "| old |\n"))
    _run("models", "--write", str(copy))
    assert copy.read_text() == page


def test_a_page_without_markers_is_refused(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("nothing here")
    assert CliRunner().invoke(app, ["models", "--write", str(page)]).exit_code
    assert page.read_text() == "nothing here"


def test_the_command_lists_every_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "400")
    said = _run("models")
    for name in [*PLANS, *REFUSED]:
        assert name in said
    header, *rows = table()
    assert header == ["class", "streams", "limits"]
    assert [row[0] for row in rows] == [*sorted(PLANS), *sorted(REFUSED)]
    assert all(row[1] and row[2] for row in rows)


def test_every_class_of_the_registry_exists_in_diffusers() -> None:
    assert not [name for name in [*PLANS, *REFUSED] if not hasattr(diffusers, name)]
    assert not PLANS.keys() & REFUSED.keys()


def test_a_subclass_has_the_plan_of_its_base() -> None:
    class Mine(diffusers.FluxTransformer2DModel):
        pass

    assert plan_for(Mine.__new__(Mine)) is PLANS["FluxTransformer2DModel"]


def test_a_class_without_a_plan_names_the_closest_and_the_guide() -> None:
    class FluxTransformer3DModel(nn.Module):
        pass

    with pytest.raises(
        meshcp.PlanError, match=r"no plan for FluxTransformer3DModel.*closest is the plan of Flux.*models/README.md"
    ):
        plan_for(FluxTransformer3DModel())


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_a_class_that_is_left_out_says_why(name: str) -> None:
    model = type(name, (nn.Module,), {})()
    with pytest.raises(meshcp.PlanError) as error:
        plan_for(model)
    assert REFUSED[name] in str(error.value)
