# Two commands do all the set-up on a machine with Python 3.11+ and make: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo serve cluster test bench wheel-test lint format docs site clean

# Installed again whenever the requirements change.
$(VENV)/installed: pyproject.toml
	$(PYTHON) -c "import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 15) and 'OneKV needs Python 3.11 to 3.14; try make PYTHON=python3.12')"
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade "pip>=25.1"
	$(BIN)/python -m pip install --quiet --editable '.[server,cpu,events,remote,top]' --group dev
	touch $@

demo: $(VENV)/installed  ## fetch the default model and hold a three-turn conversation
	$(BIN)/onekv demo

serve: $(VENV)/installed  ## serve the default model on http://127.0.0.1:8000
	$(BIN)/onekv serve

cluster: $(VENV)/installed  ## two replicas, the store they share, a proxy (docs/scale.md); needs redis-server and caddy
	$(BIN)/python scripts/cluster.py

# Processes with one thread each: with more, their threads fight for the cores. Four, because tests often wait: on two
# cores, a quarter of the time was idle with two processes, and a fifth with three. Tests of a file stay together, with the
# servers that they share. Loops are compiled by one process first: several at once would compile the same, each for itself.
LOOPS := tests/test_products.py tests/test_program.py tests/test_prompts.py tests/test_numba_plain.py

test: $(VENV)/installed  ## run all tests
	OPENBLAS_NUM_THREADS=1 $(BIN)/python -m pytest -q $(LOOPS)
	OPENBLAS_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses 4 --dist loadfile --no-loadscope-reorder --max-worker-restart 3 --durations 15

bench: $(VENV)/installed  ## OneKV beside mlx_lm.server in all scenarios; the report is in build/bench
	$(BIN)/onekv bench all --out build/bench

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

docs: $(VENV)/installed  ## write the tables of settings in docs from their definitions
	$(BIN)/python docs/generate.py

$(VENV)/docs-installed: $(VENV)/installed
	$(BIN)/python -m pip install --quiet --group docs
	touch $@

site: $(VENV)/docs-installed  ## build the documentation as a site in build/site; any warning is an error
	$(BIN)/python docs/site.py

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache
