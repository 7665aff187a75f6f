# One environment. `make test` takes minutes, `make test-all` runs everything; .ci/run is in between.
PYTHON ?= python3
VENV   ?= .venv
TORCH  ?= torch==2.13.0
BIN    := $(VENV)/bin
BASE   := $(VENV)/.runs
STAMP  := $(VENV)/.installed
LENT   := $(VENV)/lent/.installed
# pip compiles nothing (--no-compile): that would double its time, and Python compiles what it imports. Python must
# keep the result, or each of Ray's processes would compile all of torch again.
unexport PYTHONDONTWRITEBYTECODE
# The tests of a file, or of a group of files (tests/helpers/lanes.py), share a server or a Ray, and so a process.
PYTEST := $(BIN)/pytest -n 2 --dist loadfile --no-loadscope-reorder --durations=10 --durations-min=5
# Some tests end processes and wait for others, which other programs on the machine can disturb. At most three failed
# tests run once more, alone; what passes then must stand in tests/flaky.txt.
AGAIN  := $(BIN)/pytest --again --last-failed --last-failed-no-failures=none -rA --show-capture=no
# Runs tests, and beside them, since they often wait, the checks.
define CHECKED
@$(MAKE) --no-print-directory check >$(VENV)/check.log 2>&1 & checks=$$!; \
$(PYTEST) $(1); failed=$$?; if [ $$failed = 1 ]; then $(AGAIN) $(1); failed=$$?; fi; \
wait $$checks || failed=2; cat $(VENV)/check.log; exit $$failed
endef
PIP    := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile

# Without an NVIDIA GPU the CPU build saves gigabytes. pip gets its index only if that answers within seconds.
CPU_INDEX := https://download.pytorch.org/whl/cpu
ANSWERS   := import sys, urllib.request; urllib.request.urlopen(sys.argv[1], timeout=5)

define WITH_TORCH
@if nvidia-smi -L >/dev/null 2>&1; then index=""; \
elif $(PYTHON) -c '$(ANSWERS)' $(CPU_INDEX)/torch/ 2>/dev/null; then index="--extra-index-url $(CPU_INDEX)"; \
else index=""; fi; \
echo $(1) $$index; $(1) $$index
endef

.DEFAULT_GOAL := test
.PHONY: test test-long test-all test-ci test-clients test-processors check fast format docs run clean chaos cuts \
	first-contact newest-ray mutants gpu-dry

# TURN, a number, chooses among many similar cases (tests marked rotate): by default the number of commits.
TURN ?= $(shell git rev-list --count HEAD 2>/dev/null || echo 0)

test: $(STAMP)
	$(call CHECKED,-m "not long" --turn=$(TURN))

# Every test, before a release. It also writes how long each file takes, which test-ci and SHARD go by.
test-all: $(STAMP) test-clients newest-ray gpu-dry
	$(call CHECKED,--record)

# SHARD=2/4 runs the second quarter of the files.
test-long: $(STAMP)
	$(PYTEST) -m long $(addprefix --shard=,$(SHARD))

# What continuous integration runs: all but the long tests, the core of these, the long files that the changes since
# SINCE concern, and one shard of the rest. After DEADLINE, a Unix time, no long file begins.
test-ci: $(STAMP)
	$(call CHECKED,--core --shard=$(SHARD) --turn=$(TURN) --since=$(SINCE) --deadline=$(DEADLINE))

# Stock clients against a server, each in an environment of its own; writes build/clients.md.
test-clients: $(STAMP)
	TESTS_REQUIRE="clients npm node" $(BIN)/pytest -m long tests/api/test_clients.py

check: $(STAMP)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

fast: $(STAMP)
	$(PYTEST) -m "not slow and not long and not gpu"

# The quick tests as on processors with AMX, with only AVX2, and with neither (tests/conftest.py).
test-processors: $(STAMP)
	DIFFRAY_TEST_AUTO=bfloat16 OMP_NUM_THREADS=16 $(MAKE) fast
	DIFFRAY_TEST_AUTO=float32 OMP_NUM_THREADS=2 ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 $(MAKE) fast
	DIFFRAY_TEST_AUTO=float32 ATEN_CPU_CAPABILITY=default ONEDNN_MAX_CPU_ISA=SSE41 $(MAKE) fast

# Kills, stops and overloads a server while clients check every token, for ten minutes or more; then the faults that
# end a server, each on a new server. A full disk, the last of these, needs root. BUSY=4: beside four busy processes.
chaos: $(STAMP)
	$(BIN)/python -m tools.chaos --faults 100 --streams 64 --seed 7 --busy $(or $(BUSY),0) --report build/chaos.html
	$(BIN)/python -m tools.chaos --terminal --busy $(or $(BUSY),0)

# The same on two nodes, with network cuts; needs root.
cuts: $(STAMP)
	$(BIN)/python -m tools.chaos.cuts --faults 20 --streams 16 --seed 7

# What a new user does: a fresh clone, README's commands, every way to end a server. BUSY=4 adds four busy processes.
first-contact: $(STAMP)
	$(BIN)/python -m tools.first_contact --venv $(VENV) --busy $(or $(BUSY),0)

# Tries 100 small faults, one by one, and fails if the tests notice fewer than 85 of them. Twenty minutes.
mutants: $(STAMP)
	$(BIN)/python -m tests.mutants

# The first run on a GPU, as far as a machine without one can: with Triton and all else of a lent machine.
gpu-dry: $(LENT)
	bash benchmarks/gpu/dry_run.sh $(VENV)/lent/bin/python $(VENV)/lent/wheels build/gpu-dry

format: $(STAMP)
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

# Writes the tables of all options from the models that declare them.
docs: $(STAMP)
	$(BIN)/python -m tools.configuration_page

# The tests that start Ray, with the newest Ray.
newest-ray: $(STAMP)
	$(PIP) --upgrade --target build/newest-ray --no-deps ray
	PYTHONPATH=build/newest-ray $(BIN)/pytest -m "not gpu" tests/control tests/serve tests/system/test_serve.py \
		tests/system/test_serve_endings.py tests/system/test_jobs.py

run: $(BASE)
	$(BIN)/diffray serve

clean:
	rm -rf $(VENV) build dist diffray.egg-info .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# torch comes first, so that the packages that need it do not choose another build.
$(BASE): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=...")'
	$(PYTHON) -m venv $(VENV)
	$(call WITH_TORCH,$(PIP) $(TORCH))
	$(PIP) --editable .
	@touch $@

# The tests of the kernels need Triton, which torch's CPU build does not include.
$(STAMP): $(BASE)
	$(PIP) --editable '.[dev,triton]'
	@touch $@

# pydantic is not installed there: its wheels travel with the tree.
$(LENT):
	$(PYTHON) -m venv $(VENV)/lent
	$(call WITH_TORCH,$(subst $(BIN)/,$(VENV)/lent/bin/,$(PIP)) $(TORCH) triton==3.6.0 transformers==5.17.0 safetensors)
	$(VENV)/lent/bin/python -m pip download --quiet --disable-pip-version-check --dest $(VENV)/lent/wheels pydantic
	@touch $@
