# `make demo` and `make test` need nothing but Python 3.11 or newer: they make .venv and install into it, once for each change of pyproject.toml.

PYTHON ?= $(shell for p in python3 python3.14 python3.13 python3.12 python3.11; do \
	command -v $$p >/dev/null && $$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' && echo $$p && break; done)
BIN := .venv/bin
RANKS ?= 4
ARGS ?=

.PHONY: demo test lint format clean

demo: .venv/installed-test
	$(BIN)/python -m torch.distributed.run --standalone --nproc-per-node $(RANKS) examples/digits/demo.py $(ARGS)

test: .venv/installed-test
	$(BIN)/python -m pytest $(ARGS)

lint: .venv/installed-dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

format: .venv/installed-dev
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

clean:
	rm -rf .venv build dist meshcp.egg-info .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis

.venv/installed-test: extras := test
.venv/installed-dev: extras := test,dev
.venv/installed-test .venv/installed-dev: pyproject.toml
	@command -v "$(PYTHON)" >/dev/null || { echo "meshcp needs Python 3.11 or newer: install it, or name it with make PYTHON=/path/to/python3" >&2; exit 1; }
	@"$(PYTHON)" -c 'import sys; sys.version_info >= (3, 11) or sys.exit("meshcp needs Python 3.11 or newer; $(PYTHON) is " + sys.version.split()[0])'
	@# A venv without pip is one that an earlier, interrupted run has left.
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || "$(PYTHON)" -m venv --clear .venv
	$(BIN)/python -m pip install --disable-pip-version-check -e ".[$(extras)]"
	@touch $@
