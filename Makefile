# One environment: `make test` in minutes, and `make test-long`, what it leaves out; continuous integration runs both.
PYTHON ?= python3
VENV   ?= .venv
TORCH  ?= torch==2.13.0
BIN    := $(VENV)/bin
BASE   := $(VENV)/.runs
STAMP  := $(VENV)/.installed
CLIENTS := $(VENV)/clients/.installed
# Not compiled: that would take as long as the rest, and Python compiles what it imports. It has to keep that,
# or each of Ray's processes would compile all of torch again.
unexport PYTHONDONTWRITEBYTECODE
PYTEST := $(BIN)/pytest -n 2 --dist loadfile --durations=10 --durations-min=5
# Some tests end processes and wait for others, which another program on the machine can disturb. A test that failed is
# run once more, with nothing beside it; what passes then is listed as a test to mend. What fails again fails the run.
AGAIN  := status=$$?; [ $$status = 1 ] || exit $$status; echo "Once more, one at a time; mend what passes now:"; \
	$(BIN)/pytest -rA --show-capture=no --maxfail=1 --last-failed --last-failed-no-failures=none
PIP    := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile

# Without an NVIDIA GPU the CPU build saves gigabytes. Its index is offered to pip only where it answers within seconds.
CPU_INDEX := https://download.pytorch.org/whl/cpu
ANSWERS   := import sys, urllib.request; urllib.request.urlopen(sys.argv[1], timeout=5)

.DEFAULT_GOAL := test
.PHONY: test test-long test-clients test-processors check fast format docs run clean chaos cuts first-contact \
	newest-ray

# A file's tests share its server or its Ray, and stay in one process. Slow tests wait, so that files with such tests
# come first, and the many quick files last (tests/conftest.py).
test: check
	$(PYTEST) --no-loadscope-reorder -m "not long" || { $(AGAIN) -m "not long"; }

test-long: $(STAMP)
	$(PYTEST) -m long || { $(AGAIN) -m long; }

# The libraries for agents need older packages than the rest: an environment above that of the tests has these.
test-clients: $(CLIENTS)
	TESTS_REQUIRE=clients $(VENV)/clients/bin/python -m pytest -m long tests/api/test_agent_clients.py

check: $(STAMP)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

fast: $(STAMP)
	$(PYTEST) -m "not slow and not long and not gpu"

# The quick tests as processors with AMX, with AVX2 alone and without either would run them (tests/conftest.py).
test-processors: $(STAMP)
	DIFFRAY_TEST_AUTO=bfloat16 OMP_NUM_THREADS=16 $(MAKE) fast
	DIFFRAY_TEST_AUTO=float32 OMP_NUM_THREADS=2 ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 $(MAKE) fast
	DIFFRAY_TEST_AUTO=float32 ATEN_CPU_CAPABILITY=default ONEDNN_MAX_CPU_ISA=SSE41 $(MAKE) fast

# Kills, stops and overloads a server while clients check every token, ten minutes and more; then the faults that
# end a server, each with one of its own. A full disk, the last of these, needs root.
chaos: $(STAMP)
	$(BIN)/python -m tests.chaos --faults 100 --streams 64 --seed 7 --report build/chaos.html
	$(BIN)/python -m tests.chaos --terminal

# The same between two nodes whose network is cut as well; needs root.
cuts: $(STAMP)
	$(BIN)/python -m tests.chaos.cuts --faults 20 --streams 16 --seed 7

# What a newcomer does: a fresh clone, README's commands, every way of ending a server. BUSY=4 beside four busy processes.
first-contact: $(STAMP)
	$(BIN)/python -m tests.first_contact --venv $(VENV) --busy $(or $(BUSY),0)

format: $(STAMP)
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

# The tables of every option, from the models that declare them.
docs: $(STAMP)
	$(BIN)/python -m tests.helpers.configuration_page

# What pyproject.toml does not allow yet: the tests that start Ray, with the newest one. Raise the bound if they pass.
newest-ray: $(STAMP)
	$(PIP) --upgrade --target build/newest-ray --no-deps ray
	PYTHONPATH=build/newest-ray $(BIN)/pytest -m "not gpu" tests/control tests/serve tests/system/test_serve.py \
		tests/system/test_serve_endings.py tests/system/test_jobs.py

run: $(BASE)
	$(BIN)/diffray serve

clean:
	rm -rf $(VENV) build dist diffray.egg-info .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# torch comes first: with it installed, the packages that need torch do not choose another build.
$(BASE): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=...")'
	$(PYTHON) -m venv $(VENV)
	@if nvidia-smi -L >/dev/null 2>&1; then index=""; \
	elif $(BIN)/python -c '$(ANSWERS)' $(CPU_INDEX)/torch/ 2>/dev/null; then index="--extra-index-url $(CPU_INDEX)"; \
	else index=""; fi; \
	echo $(PIP) $(TORCH) $$index; $(PIP) $(TORCH) $$index
	$(PIP) --editable .
	@touch $@

# The kernels' tests need Triton, which torch for the CPU does not bring.
$(STAMP): $(BASE)
	$(PIP) --editable '.[dev,triton]'
	@touch $@

$(CLIENTS): $(STAMP)
	$(BIN)/python -m venv --without-pip $(VENV)/clients
	@here='import site; print(site.getsitepackages()[0])'; \
	echo "import site; site.addsitedir('$$($(BIN)/python -c "$$here")')" \
		> "$$($(VENV)/clients/bin/python -c "$$here")/tests.pth"
	$(subst $(BIN)/,$(VENV)/clients/bin/,$(PIP)) --editable '.[clients]'
	@touch $@
