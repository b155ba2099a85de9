# make demo   install, train a draft for the bundled model and measure it (about five minutes on two cores)
# make test   install, lint and run all tests
# make fuzz   run every command on damaged inputs, 3,230 in total, and check for tracebacks (about ten minutes)
# make properties   run the property tests (Hypothesis) on new random examples (half a minute)
# make lossless   decode with 1,000 random settings and compare every token (a minute or two)
# make kills  kill training, by one process and by several, at 20 random moments, and check that nothing is lost (minutes)
# make docs   build the documentation into build/site
# make lint   check style and formatting with ruff, and type hints with mypy
# make clean  remove the virtual environment and all build and run output
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo test fuzz properties lossless kills docs lint clean
demo: $(VENV)/installed
	$(BIN)/fledge demo --out build/demo

test: $(VENV)/installed lint
	$(BIN)/python -m pytest -q --numprocesses auto --maxprocesses 8 --dist worksteal

fuzz: $(VENV)/installed
	FUZZ_CASES=170 $(BIN)/python -m pytest -q tests/test_fuzz.py --numprocesses auto --maxprocesses 8

properties: $(VENV)/installed
	$(BIN)/python -m pytest -q -m hypothesis --hypothesis-profile default --numprocesses auto --maxprocesses 8

lossless: $(VENV)/installed
	LOSSLESS_CASES=1000 $(BIN)/python -m pytest -q tests/test_random_settings.py --numprocesses auto --maxprocesses 8

kills: $(VENV)/installed
	KILLS=20 $(BIN)/python -m pytest -q tests/test_ranks_killed.py tests/test_resume.py -k random_moments

# without --quiet, which would hide the warnings that --strict counts
docs: $(VENV)/installed
	$(BIN)/pip install --quiet --editable '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

lint: $(VENV)/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

$(VENV)/installed: pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "fledge needs Python 3.11 or newer")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --editable '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) build runs *.egg-info
