# SPDX-License-Identifier: Apache-2.0
# Needs only Python 3.10 or later, git and make.
#
#   make demo             tune SpMM on a real matrix; MATRIX=file OP=spmm FEAT=128 SECONDS=30 OUT=folder
#   make test             lint, then a few cases of each test and an eighth of the slow ones, others at each commit; TURN=3
#   make test-all         lint, then every case; SPARSETIR_FULL=1 for all products of families
#   make test-quick       one case of each test that starts no process, within a minute
#   make fuzz             drawn cases on all fronts; SECONDS=600 SEED=1 WORKERS=1 FRONTS="einsum lazy" OUT=folder
#   make lint             ruff and mypy
#   make docs             the documentation site, in build/site
#   make bench-overhead   cost of calls, compilation and caches
#   make clean            remove everything that was built, the environment too
#
# The first run makes an environment in .venv; PYTHON=python3.12 picks the interpreter.

PYTHON ?= python3
VENV ?= .venv
JOBS ?= 2

BIN := $(VENV)/bin
TYPED := build/typed

# Bytecode is kept even where that is switched off: some forty processes load the package.
PYTEST := PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n $(JOBS) --dist worksteal

DEMO_FLAGS := $(if $(MATRIX),--matrix "$(MATRIX)") $(if $(OP),--op $(OP)) $(if $(FEAT),--feat $(FEAT)) \
              $(if $(SECONDS),--seconds $(SECONDS)) $(if $(OUT),--out "$(OUT)")

FUZZ_FLAGS := --seconds $(or $(SECONDS),60) --seed $(or $(SEED),0) --workers $(or $(WORKERS),1) \
              $(FRONTS:%=--front %) $(if $(OUT),--out "$(OUT)")

# Which cases run: others at each commit, the same ones at the same commit.
TURN ?= $(shell git rev-list --count HEAD 2>/dev/null || echo 0)

.PHONY: help demo test test-all test-quick fuzz lint docs bench-overhead clean

help:
	@sed -n 's/^#   //p' Makefile

demo: $(VENV)/.with-plot
	$(BIN)/sparsetir demo $(DEMO_FLAGS)

test: lint
	$(PYTEST) --turn $(TURN)

test-all: lint
	$(PYTEST)

test-quick: $(VENV)/.with-dev
	$(PYTEST) --quick -q

fuzz: $(VENV)/.with-dev
	$(BIN)/python -m tests.fuzzing $(FUZZ_FLAGS)

# mypy follows folders, not package-dir: show it the packages as an installed user sees them.
lint: $(VENV)/.with-dev
	$(BIN)/ruff check .
	@rm -rf $(TYPED)/sparsetir && mkdir -p $(TYPED)/sparsetir
	@ln -s "$(CURDIR)"/sparsetir/* "$(CURDIR)/schedules" "$(CURDIR)/tuning" $(TYPED)/sparsetir/
	cd $(TYPED) && "$(abspath $(BIN))/mypy" --config-file "$(CURDIR)/pyproject.toml" -p sparsetir

docs: $(VENV)/.with-docs
	rm -rf docs/generated docs/gallery build/site
	$(BIN)/python -m sphinx -q -W --keep-going -b html docs build/site
	$(BIN)/python docs/_ext/check_site.py build/site
	@echo "build/site/index.html"

bench-overhead: $(VENV)/.with-plot
	$(BIN)/sparsetir bench overhead

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/.created:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	  { echo "sparsetir needs Python 3.10 or later; try: make PYTHON=python3.12"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@touch $@

# One stamp for each extra: installed again only when pyproject.toml changes.
$(VENV)/.with-%: pyproject.toml $(VENV)/.created
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[$*]'
	@touch $@
