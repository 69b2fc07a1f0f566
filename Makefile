# Every target makes the virtual environment it needs. Wanted beforehand: python3 (3.11 to 3.13), its venv module, make.
PYTHON ?= python3
VENV   ?= .venv
MODEL  ?= smollm2-135m
# Two workers suit two cores: tests that run compute threads of their own are kept in one group.
PYTEST_WORKERS ?= 2

BIN := $(VENV)/bin
# Byte code is left to be written on first use, by what is used: it keeps the install under 250 MB.
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
INSTALL := $(PIP) install --no-compile

.PHONY: demo test test-hf test-lowest check bench size lock format clean

demo: $(VENV)/.ready
	@$(BIN)/gapless demo

test: $(VENV)/.ready-test
	$(BIN)/python -m pytest -n $(PYTEST_WORKERS) --dist loadgroup

check: $(VENV)/.ready-check
	$(BIN)/ruff check src tests bench tools
	$(BIN)/ruff format --check src tests tools
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python tools/lock.py --check

bench: $(VENV)/.ready
	$(BIN)/python bench/table.py --model $(MODEL)

# What the default install takes, in a fresh environment; 250 MB are allowed.
size:
	@rm -rf .venv-size
	@$(MAKE) --no-print-directory VENV=.venv-size .venv-size/.ready
	@size=$$(du -sm .venv-size | cut -f1); echo "the default install takes $$size MiB"; test $$size -lt 238

format: $(VENV)/.ready-check
	$(BIN)/ruff check --fix src tests tools
	$(BIN)/ruff format src tests tools

# The tests that compare with Hugging Face transformers live, in an environment of their own (torch is large).
test-hf:
	@$(MAKE) --no-print-directory VENV=.venv-hf .venv-hf/.ready-hf
	.venv-hf/bin/python -m pytest -n $(PYTEST_WORKERS) --dist loadgroup

# The suite again with the oldest version of each direct dependency that pyproject.toml admits. How large an install is
# depends on the versions: that test is for those of the lock.
test-lowest:
	@$(MAKE) --no-print-directory VENV=.venv-lowest .venv-lowest/.ready-test
	.venv-lowest/bin/python tools/lock.py --lowest > .venv-lowest/lowest.txt
	.venv-lowest/bin/python -m pip install --quiet --no-compile -r .venv-lowest/lowest.txt
	.venv-lowest/bin/python -m pytest -n $(PYTEST_WORKERS) --dist loadgroup \
	  --deselect tests/test_install.py::test_the_default_install_is_small

lock:
	$(PYTHON) tools/lock.py --write

clean:
	rm -rf .venv .venv-hf .venv-lowest .venv-size build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis

$(VENV)/.ready: pyproject.toml requirements.lock
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))' \
	  || { echo "error: $(PYTHON) is not Python 3.11 to 3.13; run: make PYTHON=python3.11 ..." >&2; exit 2; }
	@echo "setting up $(VENV) (once; downloads about 80 MB)" >&2
	@test -x $(BIN)/python || PYTHONDONTWRITEBYTECODE=1 $(PYTHON) -m venv $(VENV) \
	  || { echo "error: cannot make $(VENV); on Debian: apt install python3-venv" >&2; exit 2; }
	@PYTHONDONTWRITEBYTECODE=1 $(INSTALL) -r requirements.lock
	@PYTHONDONTWRITEBYTECODE=1 $(INSTALL) --no-deps --editable .
	@PYTHONDONTWRITEBYTECODE=1 $(PIP) uninstall --yes setuptools 2>/dev/null || true
	@find $(VENV) -name __pycache__ -prune -exec rm -rf {} +
	@touch $@

$(VENV)/.ready-test: $(VENV)/.ready requirements-test.lock
	@$(INSTALL) -r requirements-test.lock
	@touch $@

$(VENV)/.ready-check: $(VENV)/.ready-test requirements-dev.lock
	@$(INSTALL) -r requirements-dev.lock
	@touch $@

$(VENV)/.ready-hf: $(VENV)/.ready-test
	@$(INSTALL) --constraint requirements.lock 'torch>=2.5' 'transformers>=4.48'
	@touch $@
