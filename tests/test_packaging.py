from __future__ import annotations

import ast
import importlib
import os
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
SETUPTOOLS = PROJECT["tool"]["setuptools"]
MOVED = {"meshcp.placements": "placements", "meshcp.models": "models"}


def packages_on_disk() -> set[str]:
    found = set()
    for directory, inner, files in os.walk(ROOT / "meshcp", followlinks=True):
        inner[:] = [name for name in inner if name != "__pycache__"]
        if any(file.endswith(".py") for file in files):
            found.add(".".join(Path(directory).relative_to(ROOT).parts))
    return found


def files_to_ship() -> list[str]:
    files = [
        path.relative_to(ROOT).as_posix()
        for package in packages_on_disk()
        for path in (ROOT / package.replace(".", "/")).glob("*.py")
    ]
    return sorted([*files, "meshcp/py.typed", "meshcp/models/README.md"])


def test_packages_list_equals_the_disk() -> None:
    assert sorted(SETUPTOOLS["packages"]) == sorted(packages_on_disk())


def test_every_package_has_an_init() -> None:
    missing = [name for name in packages_on_disk() if not (ROOT / name.replace(".", "/") / "__init__.py").exists()]
    assert not missing


@pytest.mark.parametrize(("package", "folder"), MOVED.items())
def test_top_level_folder_and_link(package: str, folder: str) -> None:
    link = ROOT / package.replace(".", "/")
    assert link.is_symlink()
    assert os.readlink(link) == f"../{folder}"
    assert (ROOT / folder).is_dir()
    assert not (ROOT / folder).is_symlink()
    table = SETUPTOOLS["package-dir"].items()
    moved = {name: path for name, path in table if f"{name}.".startswith(f"{package}.")}
    # A package below a moved one has to be moved by name as well.
    for name in SETUPTOOLS["packages"]:
        if name == package or name.startswith(package + "."):
            assert moved.pop(name) == folder + name.removeprefix(package).replace(".", "/")
    assert not moved


@pytest.mark.parametrize(("package", "folder"), MOVED.items())
def test_top_level_import_is_refused(package: str, folder: str) -> None:
    done = python("-c", f"import {folder}", cwd=ROOT)
    assert done.returncode == 1
    assert "ImportError" in done.stderr.splitlines()[-1]
    assert f"import {package}" in done.stderr.splitlines()[-1]


def python(*arguments: str, cwd: Path, path: str = "") -> subprocess.CompletedProcess[str]:
    environment = dict(os.environ, PYTHONPATH=path)
    return subprocess.run(
        [sys.executable, *arguments], cwd=cwd, env=environment, capture_output=True, text=True, check=False
    )


def build(kind: str, tree: Path, output: Path) -> Path:
    """Build in a copy: setuptools leaves folders in the tree, and would ship what an earlier build has left there."""
    output.mkdir()
    done = python("-c", f"from setuptools import build_meta; print(build_meta.build_{kind}({str(output)!r}))", cwd=tree)
    assert done.returncode == 0, done.stdout + done.stderr
    (built,) = output.iterdir()
    return built


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    copy = tmp_path_factory.mktemp("tree")
    for name in ("pyproject.toml", "MANIFEST.in", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    for name in ("meshcp", "placements", "models", "tests"):
        shutil.copytree(ROOT / name, copy / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    return copy


@pytest.fixture(scope="module")
def sdist(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The unpacked source distribution."""
    directory = tmp_path_factory.mktemp("sdist")
    with tarfile.open(build("sdist", tree, directory / "built")) as archive:
        # The argument `filter` does not exist before Python 3.11.4, and 3.12 warns where no filter is chosen.
        archive.extraction_filter = lambda member, path: member
        archive.extractall(directory)
    return directory / f"meshcp-{PROJECT['project']['version']}"


def test_sdist_holds_sources_once_and_no_tests(sdist: Path) -> None:
    files = {path.relative_to(sdist).as_posix() for path in sdist.rglob("*") if path.is_file()}
    expected = set()
    for file in files_to_ship():
        moved = any(file.startswith(f"meshcp/{folder}/") for folder in MOVED.values())
        expected.add(file.removeprefix("meshcp/") if moved else file)
    assert expected | {"pyproject.toml", "README.md", "LICENSE"} <= files
    assert not any(path.is_symlink() for path in sdist.rglob("*"))
    assert not (sdist / "meshcp/models").exists()
    assert not (sdist / "tests").exists()


@pytest.mark.parametrize("source", ["tree", "sdist"])
def test_wheel_holds_each_file_once(source: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    wheel = build("wheel", request.getfixturevalue(source), tmp_path / "built")
    assert wheel.name == f"meshcp-{PROJECT['project']['version']}-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (metadata,) = (archive.read(name).decode() for name in names if name.endswith(".dist-info/METADATA"))
    assert sorted(name for name in names if ".dist-info/" not in name) == files_to_ship()
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)
    assert "License-Expression: Apache-2.0" in metadata


def test_wheel_imports(sdist: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(build("wheel", sdist, tmp_path / "built")) as archive:
        archive.extractall(tmp_path / "installed")
    script = "import meshcp, meshcp.placements, meshcp.models; print(meshcp.__file__, meshcp.models.__file__)"
    done = python("-c", script, cwd=tmp_path, path=str(tmp_path / "installed"))
    assert done.returncode == 0, done.stderr
    package = tmp_path / "installed/meshcp"
    assert done.stdout.split() == [str(package / "__init__.py"), str(package / "models/__init__.py")]


def test_console_scripts_exist() -> None:
    for target in PROJECT["project"]["scripts"].values():
        module, name = target.split(":")
        assert callable(getattr(importlib.import_module(module), name))


PLACEMENTS_MAY_IMPORT = {"torch.distributed.device_mesh", "torch.distributed.tensor"}


@pytest.mark.parametrize("file", sorted((ROOT / "placements").rglob("*.py")), ids=lambda file: file.name)
def test_placements_import_no_collectives(file: Path) -> None:
    """Import-linter sees only that torch is imported, not which part of it."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module == "torch":
            names = [f"torch.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
        else:
            continue
        for name in names:
            assert not name.startswith("torch.distributed") or name in PLACEMENTS_MAY_IMPORT, f"line {node.lineno}"
            assert name.split(".")[0] != "diffusers", f"line {node.lineno}"


def private_names(source: str) -> list[str]:
    """What the source names of torch or diffusers that begins with an underscore: imports, ``torch.a._b``."""
    found, roots = [], {"torch", "diffusers"}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            module = getattr(node, "module", None) or ""
            for alias in node.names:
                path = f"{module}.{alias.name}".lstrip(".").split(".")
                if path[0] in ("torch", "diffusers") and not getattr(node, "level", 0):
                    roots.add(alias.asname or alias.name.partition(".")[0])
                    found += [".".join(path)] if any(part.startswith("_") for part in path) else []
    for node in ast.walk(ast.parse(source)):
        path, inner = [], node
        while isinstance(inner, ast.Attribute):
            path.insert(0, inner.attr)
            inner = inner.value
        if isinstance(inner, ast.Name) and inner.id in roots:
            found += [".".join([inner.id, *path])] if any(p.startswith("_") and p[1:2] != "_" for p in path) else []
    return found


@pytest.mark.parametrize(
    "file",
    [file for folder in ("meshcp", "placements", "models") for file in sorted((ROOT / folder).rglob("*.py"))],
    ids=lambda file: str(file.relative_to(ROOT)),
)
def test_private_names_are_in_one_file(file: Path) -> None:
    found = private_names(file.read_text())
    assert bool(found) == (file.name == "_compat.py"), found


def test_private_names_are_found() -> None:
    source = (
        "import torch.a as b\nfrom torch.x import _y\nfrom diffusers import z\nb._c\ntorch.ops.aten._d()\nz.e.__doc__"
    )
    assert private_names(source) == ["torch.x._y", "b._c", "torch.ops.aten._d"]
