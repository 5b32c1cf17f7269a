# Each target works on a fresh clone: the first call makes .venv, later ones reuse it at once.

PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
STAMP := $(VENV)/.installed
SOURCES := pyproject.toml constraints.txt setup.py $(wildcard src/dla/ops/cpu/*.cpp src/dla/ops/cpu/*.h)
ONE_THREAD := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1

.PHONY: install demo test test-all lint format web bench gpu-resources docs fuzz sanitize study clean

install: $(STAMP)

# The constraints go with every pip call: an unpinned torch pulls gigabytes.
$(STAMP): $(SOURCES)
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet -e '.[dev]' -c constraints.txt
	touch $@

demo: $(STAMP)
	$(PY) -m dla demo

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

# The script of inspect's page, from its modules, and their tests; needs node and nothing else.
web:
	node web/bundle.mjs
	cd web && node --test

# The documentation as a site, in site/; a dead link is an error.
docs: $(STAMP)
	$(PY) -m pip install --quiet -e '.[dev,docs]' -c constraints.txt
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict --quiet

bench: $(STAMP)
	$(PY) -m dla bench figures --out benchmarks/figures.json

# What the Triton kernels take of an A100 and an H100, compiled ahead of time, and what they should take: docs/gpu.md.
gpu-resources: $(STAMP)
	$(PY) benchmarks/gpu_resources.py
	$(PY) -m benchmarks.gpu_tables
	$(PY) benchmarks/gpu_memory.py
	$(PY) -m benchmarks.gpu_memory_operator

# The final tables of docs/study.md from new runs, in out/study/study.md: hours on two cores, goes on where it was ended.
STUDY := recall pairs longer needle ablation backbones $(if $(DLA_DATA),text text_mamba2)
study: $(STAMP)
	for grid in $(STUDY); do $(PY) -m dla lab run study/$$grid.toml --out out/study/$$grid || exit 1; done
	$(PY) -m dla lab tables docs/study.md --results out/study --skip-missing --out out/study/study.md

# Thousands of damaged and hostile files, each of which must be loaded or refused in one line (docs/security.md).
FUZZ_SEED ?= 0
FUZZ_FILES ?= 4800
fuzz: $(STAMP)
	$(PY) -m tests.fuzz.run --seed $(FUZZ_SEED) --files $(FUZZ_FILES) $(if $(FUZZ_CASE),--repeat $(FUZZ_CASE))

# The C++ kernels under sanitizers, and as shipped. A driver includes its kernel's source, or what it drives is linked.
SANITIZE_SEED ?= 0
DRIVERS := $(wildcard tests/sanitize/*.cpp)
KERNELS := $(filter-out $(DRIVERS:tests/sanitize/%=src/dla/ops/cpu/%),$(wildcard src/dla/ops/cpu/*.cpp))
sanitize:
	mkdir -p build/sanitize
	$(call drive,address,-O1 -g -fsanitize=address$(comma)undefined -fno-sanitize-recover=all)
	$(call drive,thread,-O1 -g -fsanitize=thread)
	$(call drive,shipped,-O3)
comma := ,
define drive
$(CXX) -std=c++17 -pthread -fno-math-errno $(2) $(DRIVERS) $(KERNELS) -o build/sanitize/$(1)
build/sanitize/$(1) $(SANITIZE_SEED)
endef

clean:
	rm -rf build dist out site .pytest_cache .mypy_cache .ruff_cache src/*.egg-info
