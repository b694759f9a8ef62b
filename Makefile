# `make help` lists the commands. Each installs what it needs on its first run; later runs need no network.

SHELL := /bin/bash
.DEFAULT_GOAL := help
.PHONY: help serve demo observe demo-model bench experiments load-test bench-manager bench-kernels bench-codec bench-quality \
	profile-codec profile-blend profile-sparse test test-long fuzz mutants contracts lint format lock install install-bench install-dev clean

# What a shell has set for its own programs changes how these run: Ray starts with none of them. Without UTF-8 newer
# Pythons import nothing below a path with letters beyond ASCII.
unexport PYTHONHOME PYTHONINSPECT PYTHONOPTIMIZE PYTHONUTF8 PYTHONWARNINGS

VENV := .venv
RUN := $(VENV)/bin/python
# One process more than two cores have: whole servers mostly wait. tests/handing_out.py says which runs what.
IN_THREE := -n 3 --dist loadfile --no-loadscope-reorder

# What `make serve` replaces in serve_config.yaml; empty leaves the file's value.
PORT ?=
MODEL ?=
REPLICAS ?=
DEVICE_BLOCKS ?=
MAX_MODEL_LEN ?=
SCENARIO ?=
OVERRIDES = $(if $(PORT),--port '$(PORT)') $(if $(MODEL),--model '$(MODEL)') $(if $(REPLICAS),--replicas '$(REPLICAS)') \
	$(if $(DEVICE_BLOCKS),--device-blocks '$(DEVICE_BLOCKS)') $(if $(MAX_MODEL_LEN),--max-model-len '$(MAX_MODEL_LEN)') \
	$(if $(SCENARIO),--scenario '$(SCENARIO)')

help: ## List the commands
	@awk 'BEGIN { FS = ":.*## " } /^[a-z-]+:.*## / { printf "  make %-16s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@echo
	@echo '  make serve takes PORT=, MODEL= (a folder, a Hugging Face id, or a preset of configs/models),'
	@echo '  REPLICAS=, DEVICE_BLOCKS= (KV blocks per replica), MAX_MODEL_LEN= and SCENARIO= (docs/guide/scenarios.md).'
	@echo '  make demo takes PORT= and ARGS=, such as ARGS=--json.'

serve: install ## Start the server in the foreground; Ctrl-C stops it, SIGHUP restarts it
	@exec $(RUN) -m app.launch serve_config.yaml $(OVERRIDES)

demo: install ## Show on a running server what the shared cache saves
	@exec $(RUN) -m app.cli demo $(if $(PORT),--url 'http://127.0.0.1:$(PORT)') $(ARGS)

demo-model: install ## Train the embedded demo model again
	@exec $(RUN) -m models.training $(ARGS)

observe: ## Prometheus and Grafana for a running server, with Docker; PORT=, CROSSKV_METRICS_KEY=
	@export PORT='$(or $(PORT),8000)' CROSSKV_METRICS_KEY="$$CROSSKV_METRICS_KEY"; \
		exec docker compose -f configs/observe/compose.yaml up

bench: install-bench ## crosskv beside plain vLLM and Ray Serve LLM on this machine; ARGS=, such as ARGS=--quick
	@exec $(RUN) -m load_tests.bench $(ARGS)

experiments: install-bench ## What prefill costs, what KV weighs, when moving it beats computing it; ARGS=, such as ARGS=--quick
	@exec $(RUN) -m load_tests.experiments $(ARGS)

load-test: install-bench ## Conversations of many users (Locust), and a summary; URL=, PORT=, MODEL=, ARGS=
	@exec $(RUN) -m load_tests.locust $(if $(URL),--host '$(URL)') $(if $(PORT),--port '$(PORT)') \
		$(if $(MODEL),--model '$(MODEL)') $(ARGS)

bench-manager: install ## How the KV manager grows with its index, and how fast it is rebuilt; ARGS=
	@exec $(RUN) -m load_tests.micro.manager_scale $(ARGS)

bench-kernels: install ## How fast the kernels are, beside memcpy of the same bytes; ARGS=
	@exec $(RUN) -m kernels.benchmark $(ARGS)

bench-codec: install ## The codecs compared: bytes, answers kept, speed; ARGS=
	@exec $(RUN) -m load_tests.codec.table $(ARGS)

bench-quality: install-bench ## What less KV costs in answers, method by method; MODEL=, ARGS=, such as ARGS='--prompts mine.jsonl'
	@exec $(RUN) -m load_tests.quality $(if $(MODEL),--model '$(MODEL)') $(ARGS)

profile-codec: install ## Measure a model's codec profile and write it beside its weights; MODEL=, ARGS=
	@exec $(RUN) -m load_tests.codec.profile $(if $(MODEL),--model '$(MODEL)') $(ARGS)

profile-blend: install ## Find a model's check layer and ratio for blending, written beside its weights; MODEL=, DATA=, ARGS=
	@exec $(RUN) -m load_tests.blending.profile $(if $(MODEL),--model '$(MODEL)') $(if $(DATA),--data '$(DATA)') $(ARGS)

profile-sparse: install ## Find what each layer of a model may drop of its KV, written beside its weights; MODEL=, ARGS=
	@exec $(RUN) -m load_tests.sparse.profile $(if $(MODEL),--model '$(MODEL)') $(ARGS)

test: install-dev ## Run the test suite in three processes; ARGS= goes to pytest, such as ARGS="-n 0 -x"
	@exec $(RUN) -m pytest $(IN_THREE) $(ARGS)

test-long: install-dev ## The same with tests marked long, long random runs, more conversations and streams; ARGS=
	@CROSSKV_LONG=1 exec $(RUN) -m pytest $(IN_THREE) $(ARGS)

fuzz: install-dev ## Hostile requests to every route, hostile bytes to every decoder; ARGS="--cases N --seed S"
	@exec $(RUN) tests/fuzz $(ARGS)

mutants: install-dev ## Small faults in the guards, each of which must turn a test red; ARGS="--only salt", ARGS=--list
	@exec $(RUN) tests/mutants $(ARGS)

contracts: install-dev ## What another version of vLLM or Ray moves of what we lean on; WHEEL=, a file or a folder
	@exec $(RUN) tests/contracts/moved.py $(if $(WHEEL),'$(WHEEL)')

lint: install-dev ## ruff, mypy, hadolint, and whether the generated pages in docs/guide are up to date
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy
	$(RUN) -m configs.document --check
	$(RUN) -m app.document --check
	$(RUN) -m app.metrics.document --check
	$(VENV)/bin/hadolint Dockerfile

format: install-dev ## Format the code and write the generated pages in docs/guide
	$(RUN) -m ruff check --fix .
	$(RUN) -m ruff format .
	$(RUN) -m configs.document
	$(RUN) -m app.document
	$(RUN) -m app.metrics.document

lock: install-dev ## Refresh the pins; LOCK_ARGS='-P name' or LOCK_ARGS=--upgrade moves packages
	requirements/lock.sh $(VENV)/bin/uv $(LOCK_ARGS)

install:
	@requirements/install.sh server

install-bench:
	@requirements/install.sh bench

install-dev:
	@requirements/install.sh dev

clean: ## Remove the environment, caches and run folders
	rm -rf $(VENV) .crosskv .pytest_cache .mypy_cache .ruff_cache .hypothesis build *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
