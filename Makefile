# `make demo` and `make test` work as the very first command in a fresh clone: what they need is installed into .venv.
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.NOTPARALLEL:

# Another Python's environment is its own. What the shell's environment says of PYTHON does not count.
PYTHON :=
VENV := .venv$(if $(PYTHON),-$(notdir $(PYTHON)))
BIN := $(VENV)/bin
CONSTRAINTS := $(wildcard constraints/py*.txt)

# The images and the extras that they hold; of `make image`, which one.
IMAGES := cpu=worker,gateway,stores,otel tpu=worker,tpu,stores,otel cuda=worker,cuda,stores,otel gateway=gateway,otel
IMAGE := cpu
RESOLVE_IMAGE = UV_PYTHON_DOWNLOADS=never $(BIN)/uv pip compile --python-version 3.12 --python-platform x86_64-manylinux_2_40 \
  --constraint constraints/py312.txt --upgrade --generate-hashes --quiet --no-annotate --no-emit-index-url --no-emit-find-links \
  --custom-compile-command "make image-requirements"

.PHONY: help demo test test-versions test-slow test-clients test-real test-prometheus test-upgrade mutants lint format types chaos bench bench-peers bench-gpu tpu-ledger docs site picture pictures \
  test-bench test-chaos test-cli test-deploy test-docs test-e2e test-engine test-examples test-gateway \
  test-local test-producer test-protocol test-serving test-worker \
  constraints image-requirements manifests sbom release image clean distclean

help:  ## show this list
	@grep -hE '^[a-z-]+:.*## ' Makefile | sed -E 's/:.*## /\t/' | expand -t 16
	@echo "With PYTHON=python3.12, say, a target runs on that Python, in .venv-python3.12."

demo: $(VENV)/worker.stamp  ## start a server, a worker with the demo model and a gateway, ask a few things, stop everything
	@$(BIN)/penstock demo

# Made for machines of two cores. There is one process more, because some tests wait for servers while others compute.
DEFAULT = not slow and not clients and not manifests and not prometheus and not real and not upgrade
MARKS = $(DEFAULT)
PYTEST = $(BIN)/python -m pytest -q -m "$(MARKS)" -n 3 --dist worksteal
test: $(VENV)/dev.stamp  ## run the tests in three processes, without the slow ones; test-engine, test-worker and the like run one folder of tests/
	@echo "running the tests; the first run compiles what the next ones find (docs/testing.md)"
	@$(PYTEST)

test-bench test-chaos test-cli test-deploy test-docs test-e2e test-engine test-examples test-gateway test-local test-producer test-protocol test-serving test-worker: $(VENV)/dev.stamp
	@$(PYTEST) tests/$(@:test-%=%)

test-versions: MARKS = versions and $(DEFAULT)
test-versions: $(VENV)/dev.stamp  ## run the tests whose results depend on the version of JAX or Python
	@$(PYTEST)

test-slow: $(VENV)/dev.stamp  ## run the slow tests: what takes minutes, more cases, new examples of properties, and every kind of Redis server
	@$(BIN)/python -m pytest -q -m "slow and not manifests"
	@$(BIN)/python -m pytest -q -m "hypothesis and not slow and not clients and not prometheus and not real and not upgrade" --hypothesis-profile anew

# Each in an environment of its own: they need other versions of the same packages.
CLIENTS = $(patsubst tests/clients/python/%.txt,%,$(wildcard tests/clients/python/*.txt)) $(patsubst tests/clients/%/package.json,%,$(wildcard tests/clients/*/package.json))
test-clients: $(VENV)/docs.stamp $(CLIENTS:%=$(VENV)/clients/%.stamp)  ## run client programs as they are (docs/clients.md, which this writes), and both pages in Chromium, against a gateway; needs npm
	@$(BIN)/python -m pytest -q -m clients

test-real: $(VENV)/dev.stamp  ## fetch SmolLM2-135M-Instruct, serve it through everything, and compare it with transformers
	@$(BIN)/python -m pytest -q -m real

test-prometheus: $(VENV)/dev.stamp  ## have Prometheus evaluate alerts and dashboards over a load; needs prometheus (Debian has it)
	@$(BIN)/python -m pytest -q -m prometheus

# Kept up by whoever releases: the tag of the last version. There is none yet, so it is a commit.
UPGRADE_FROM ?= dcbffd7600cf7b26a97c109295b6ab226058a088
UPGRADE_TREE := $(VENV)/upgrade/$(UPGRADE_FROM)
test-upgrade: $(VENV)/dev.stamp $(UPGRADE_TREE)/installed  ## run workers, gateways and clients of this version beside those of UPGRADE_FROM, a commit or tag
	@UPGRADE_TREE=$(UPGRADE_TREE) $(BIN)/python -m pytest -q -m upgrade tests/deploy

# The earlier version has the packages that it pins: this one may have dropped some.
$(UPGRADE_TREE)/installed:
	@mkdir -p $(UPGRADE_TREE)
	@git archive $(UPGRADE_FROM) | tar -x -C $(UPGRADE_TREE)
	@$(MAKE) --no-print-directory -C $(UPGRADE_TREE) .venv/worker.stamp PYTHON= VENV=.venv
	@touch $@

mutants: $(VENV)/dev.stamp  ## break a promise in a copy and see its tests fail, one mutant after the other; MUTANTS="name ..." chooses some
	@$(BIN)/python -m tests.mutants -m "$(DEFAULT)" $(MUTANTS)

lint: $(VENV)/dev.stamp  ## check style, format, the direction of imports, and what can be checked of the English
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/lint-imports
	@$(BIN)/python -m docs.scripts.english

format: $(VENV)/dev.stamp  ## format the code and fix what ruff can fix
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

types: $(VENV)/dev.stamp  ## check types
	@$(BIN)/mypy

chaos: $(VENV)/worker.stamp  ## kill, freeze and cut off workers for minutes, and check every token; CHAOS="--seed 1" and the like are passed on
	@$(BIN)/penstock chaos --requests 5000 --kills 100 --zombies 50 --restarts 5 --losses 200 $(CHAOS)
	@$(BIN)/penstock chaos --engine model --requests 60 --kills 6 --zombies 3 --restarts 1 --losses 10 --workers 3 $(CHAOS)

bench: $(VENV)/dev.stamp  ## measure engine, neighbours, CPU kernels, host, sampling, service and gateway; BENCH="--model qwen06 --dtype bfloat16" and the like are passed on
	@$(BIN)/python -m benchmarks.engine $(BENCH)
	@$(BIN)/python -m benchmarks.neighbours
	@$(BIN)/python -m benchmarks.cpu_kernels
	@$(BIN)/python -m benchmarks.host
	@$(BIN)/python -m benchmarks.sampling $(BENCH)
	@$(BIN)/python -m benchmarks.service $(BENCH)
	@$(BIN)/python -m benchmarks.gateway

bench-peers: $(VENV)/dev.stamp  ## measure the engine beside others, from the environments in PEERS_HOME (docs/performance.md)
	@$(BIN)/python -m benchmarks.peers.run $(BENCH)

bench-gpu: $(VENV)/dev.stamp  ## on a GPU, measure the engine's steps against what the card can do, and beside transformers (docs/gpu.md)
	@$(BIN)/python -m benchmarks.gpu $(BENCH)
	@$(BIN)/python -m benchmarks.gpu peers

tpu-ledger: $(VENV)/dev.stamp  ## compile the presets for TPU slices and write benchmarks/results/tpu_aot.md
	@$(BIN)/python -m pip install --quiet 'jax[tpu]' || echo "libtpu cannot be installed here"
	@$(BIN)/python -m benchmarks.tpu_ledger

docs: $(VENV)/docs.stamp  ## write docs/chat.md, configuration.md, metrics.md, models.md, wire.md, architecture.svg, deploy/redis/users.acl and deploy/prometheus/assets/runbook.html, and build the site into site/
	@$(BIN)/python -m docs.scripts.settings_page > docs/configuration.md
	@$(BIN)/python -m docs.scripts.metrics_page > docs/metrics.md
	@$(BIN)/python -m docs.scripts.parameters_table
	@$(BIN)/python -m tests.engine.models.models_page
	@$(BIN)/python -m tests.engine.text.formats_page
	@$(BIN)/python -m docs.scripts.architecture > docs/architecture.svg
	@$(BIN)/python -m docs.scripts.users_acl > deploy/redis/users.acl
	@$(BIN)/python -m docs.scripts.runbook_page > deploy/prometheus/assets/runbook.html
	@$(MAKE) --no-print-directory site

site: $(VENV)/docs.stamp  ## build the site of docs/ into site/; a link that leads nowhere, or a page that loads from elsewhere, fails
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet
	@echo "the site begins at site/index.html"

picture: $(VENV)/worker.stamp  ## draw docs/top.svg: the screen of `penstock top` over a small load, while a worker dies
	@$(BIN)/python -m docs.scripts.terminal_view

pictures: $(VENV)/docs.stamp $(VENV)/clients/chromium.stamp  ## draw every screen into build/pictures/ (light, dark, narrow, phone; full, empty, broken), and say what is cut off or hard to read; needs npm
	@$(BIN)/python -m pytest -q -m clients tests/clients/test_pictures.py
	@echo "look at build/pictures/*.png"

clean:  ## remove caches and build outputs
	rm -rf build dist site .cache .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find penstock protocol producer serving engine worker gateway local tools cli tests benchmarks examples -name __pycache__ -prune -exec rm -rf {} +

distclean: clean  ## also remove the virtual environments
	rm -rf .venv .venv-*

# torch is pinned in pyproject.toml alone: resolved here, it would pull in its CUDA packages.
constraints: $(VENV)/deploy.stamp  ## resolve the newest versions of everything into constraints/
	@for version in $(patsubst constraints/py3%.txt,3.%,$(CONSTRAINTS)); do \
	  UV_PYTHON_DOWNLOADS=never $(BIN)/uv pip compile pyproject.toml constraints/torch-needs.in --override constraints/without-torch.in \
	    --python-version $$version --extra worker --extra gateway --extra tpu --extra stores --extra parquet --extra bench --extra deploy --extra docs --extra dev --upgrade --quiet --no-annotate \
	    --no-emit-index-url --no-emit-find-links --custom-compile-command "make constraints" \
	    --output-file constraints/py$$(echo $$version | tr -d .).txt && echo "resolved for Python $$version" || exit 1; \
	done

# Without torch and without what is for development; with the hash of every file that pip may take.
image-requirements: $(VENV)/deploy.stamp  ## resolve what the images hold, from constraints/py312.txt, into constraints/image-*.txt
	@for image in $(IMAGES); do \
	  extras=$$(echo $$image | sed 's/.*=//; s/,/ --extra /g'); \
	  $(RESOLVE_IMAGE) pyproject.toml --extra $$extras --output-file constraints/image-$${image%%=*}.txt || exit 1; \
	done
	@echo hatchling | $(RESOLVE_IMAGE) - --output-file constraints/image-build.txt

manifests: $(VENV)/deploy.stamp  ## render the manifests of deploy/kubernetes and hold them against Kubernetes's own schemas
	@$(BIN)/python -m pytest -q -m manifests tests/deploy

sbom: $(VENV)/deploy.stamp  ## write what the images hold into build/sbom/*.cdx.json (CycloneDX), and docs/licenses.md
	@$(BIN)/python deploy/image/sbom.py build/sbom

release: $(VENV)/dev.stamp $(VENV)/release.stamp  ## make sdist, wheels with kernels (for aarch64 with g++-aarch64-linux-gnu, tried in qemu-user), notes and a tag, and upload nothing; RELEASE=--rehearse makes no tag
	@TWINE=$(VENV)/release/bin/twine $(BIN)/python deploy/release/release.py $(RELEASE)

image:  ## build the container image for CPUs; IMAGE=tpu, cuda or gateway builds another one
	docker build --tag penstock$(if $(filter-out cpu,$(IMAGE)),:$(IMAGE)) --build-arg IMAGE=$(IMAGE) \
	  --build-arg VERSION=$$(sed -n 's/^__version__ = "\(.*\)"/\1/p' protocol/version.py) \
	  --build-arg REVISION=$$(git rev-parse HEAD) --build-arg CREATED=$$(git log -1 --format=%cI) .

$(VENV)/release.stamp: deploy/release/twine.txt $(VENV)/dev.stamp
	@$(BIN)/python -m venv --clear --without-pip $(VENV)/release
	@$(BIN)/python -m pip --python $(VENV)/release/bin/python install --quiet --disable-pip-version-check --no-input --requirement $<
	@touch $@

# A worker with its extras is as here; other programs come as they are published.
$(VENV)/clients/stores.stamp: pyproject.toml $(CONSTRAINTS)
$(VENV)/clients/stores.stamp: PINS = --constraint constraints/$$($(BIN)/python -c 'import sys; print("py%d%d" % sys.version_info[:2])').txt

$(VENV)/clients/%.stamp: tests/clients/python/%.txt | $(VENV)/dev.stamp
	@echo "installing $* into $(VENV)/clients/$*; this takes a minute"
	@$(BIN)/python -m venv --clear --without-pip $(VENV)/clients/$*
	@$(BIN)/python -m pip --python $(VENV)/clients/$*/bin/python install --quiet --disable-pip-version-check --no-input --requirement $< $(PINS)
	@touch $@

$(VENV)/clients/%.stamp: tests/clients/%/package.json | $(VENV)/dev.stamp
	@echo "installing $* into $(VENV)/clients/$*; this takes a minute"
	@mkdir -p $(VENV)/clients/$*
	@cp $< $(VENV)/clients/$*/
	@npm install --prefix $(VENV)/clients/$* --silent --no-audit --no-fund --no-package-lock
	@touch $@

$(VENV)/worker.stamp: pyproject.toml $(CONSTRAINTS)
	@.ci/venv worker,gateway $(VENV) $(PYTHON)
	@touch $@

$(VENV)/dev.stamp: pyproject.toml $(CONSTRAINTS)
	@.ci/venv worker,gateway,dev $(VENV) $(PYTHON)
	@touch $(VENV)/worker.stamp $@

$(VENV)/docs.stamp: pyproject.toml $(CONSTRAINTS)
	@.ci/venv worker,gateway,dev,docs $(VENV) $(PYTHON)
	@touch $(VENV)/worker.stamp $(VENV)/dev.stamp $@

$(VENV)/deploy.stamp: pyproject.toml $(CONSTRAINTS)
	@.ci/venv worker,gateway,dev,deploy $(VENV) $(PYTHON)
	@touch $(VENV)/worker.stamp $(VENV)/dev.stamp $@
