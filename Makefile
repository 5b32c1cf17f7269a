# Each target works on a fresh clone: the first call makes .venv, later ones reuse it at once.

PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
STAMP := $(VENV)/.installed
SOURCES := pyproject.toml constraints.txt setup.py $(wildcard src/dla/ops/cpu/*.cpp)
ONE_THREAD := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1

.PHONY: install demo test test-all lint format bench study clean

install: $(STAMP)

# The constraints go with every pip call: an unpinned torch pulls gigabytes.
$(STAMP): $(SOURCES)
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet -e '.[dev]' -c constraints.txt
	touch $@

demo: $(STAMP)
	$(PY) -m dla.cli demo

test: $(STAMP)
	$(ONE_THREAD) $(PY) -m pytest -n 2 -m "not slow"

test-all: $(STAMP)
	$(ONE_THREAD) $(PY) -m pytest -n 2

lint: $(STAMP)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

format: $(STAMP)
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

bench: $(STAMP)
	$(PY) -m dla.cli bench figures --out benchmarks/figures.json

# The final tables of docs/study.md from new runs, in out/study/study.md: hours on two cores, goes on where it was ended.
STUDY := recall pairs longer needle ablation backbones $(if $(DLA_DATA),text text_mamba2)
study: $(STAMP)
	for grid in $(STUDY); do $(PY) -m dla.cli lab run study/$$grid.toml --out out/study/$$grid || exit 1; done
	$(PY) -m dla.cli lab tables docs/study.md --results out/study --skip-missing --out out/study/study.md

clean:
	rm -rf build out .pytest_cache .mypy_cache .ruff_cache src/*.egg-info
