# Two commands do all the set-up on a machine with Python 3.11+ and make: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo serve test wheel-test lint format docs clean

# Installed again whenever the requirements change.
$(VENV)/installed: pyproject.toml
	$(PYTHON) -c "import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 15) and 'OneKV needs Python 3.11 to 3.14; try make PYTHON=python3.12')"
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade "pip>=25.1"
	$(BIN)/python -m pip install --quiet --editable '.[server,cpu]' --group dev
	touch $@

demo: $(VENV)/installed  ## fetch the default model and hold a three-turn conversation
	$(BIN)/onekv demo

serve: $(VENV)/installed  ## serve the default model on http://127.0.0.1:8000
	$(BIN)/onekv serve

# Processes with one thread each: with more, their threads fight for the cores. Three, because tests often wait: with two
# of them on two cores a quarter of the time was idle.
test: $(VENV)/installed  ## run all tests
	OPENBLAS_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses 3 --dist loadgroup

wheel-test: $(VENV)/installed  ## build the wheel, install it in a bare environment, use it
	$(BIN)/python .ci/wheel_test.py

lint: $(VENV)/installed  ## style, types, direction of imports
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(VENV)/installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(VENV)/installed  ## write the tables of settings in README.md and docs from their definitions
	$(BIN)/python docs/generate.py

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache
