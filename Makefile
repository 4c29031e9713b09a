# pymoe: every target makes what it needs, so each works on a fresh clone. Options go through ARGS:
#     make train ARGS="--steps 200 --ffn dense"
.PHONY: help train check test test-deep test-all docs wheel release bench bench-layers bench-models bench-finetune bench-runtime bench-parallel bench-pipeline bench-distributed bench-expert-parallel bench-remote lint format clean
.DEFAULT_GOAL := help

PYTHON ?= python3
ARGS ?=
# Another torch than the pinned one gets an environment of its own.
TORCH ?=
VENV := .venv$(addprefix -torch-,$(TORCH))
RUN := $(VENV)/bin/python
# Kernels for CUDA are compiled where there is a GPU for them: elsewhere they would take three quarters of the build.
export PYMOE_CUDA ?= $(if $(wildcard /dev/nvidia0 /dev/dxg),auto,0)
# The tools of the environment come first: ninja is found also where the system has none.
export PATH := $(CURDIR)/$(VENV)/bin:$(PATH)

TRAIN_PACKAGES := $(VENV)/.train-packages
PACKAGES := $(VENV)/.packages
INSTALLED := $(VENV)/.installed
NATIVE := $(shell find csrc -name '*.h' -o -name '*.cpp' -o -name '*.cu')

help:
	@echo 'make train   train a mixture-of-experts language model (ARGS="--help" for its options); results in runs/'
	@echo 'make check   lint, types, one case of every quick Python test, C++ tests: some five minutes on two cores'
	@echo 'make test    lint, types, docs, Python and C++ tests, an installation: some 15 minutes on two cores'
	@echo 'make test-deep  what make test leaves out: grids, sanitizers, planted faults, PTX, machine code: forty minutes'
	@echo 'make test-all   both, with every case of every grid and longer stress: before a release'
	@echo '             (results of all four in build/tests/; ARGS="python types" names the steps)'
	@echo 'make docs    the documentation as web pages, with warnings as errors; in build/docs/'
	@echo 'make wheel   a wheel for the Pythons that are installed and every torch >= 2.11; in dist/'
	@echo '             (PYTHONS="python3.11 python3.13" names them; PYMOE_CUDA=1: with CUDA kernels, as version X+cuY)'
	@echo 'make release all before the upload: tree and version checked, sdist and wheels made, tried with two versions of torch; in dist/'
	@echo 'make bench   benchmark every operator; results in build/bench.json (ARGS="--help" for its options)'
	@echo 'make bench-layers    expert blocks of published models compared with transformers and the limits; in build/model_layers/'
	@echo 'make bench-models    whole models of real sizes compared with transformers and llama.cpp; in build/whole_models/'
	@echo 'make bench-finetune  steps of fine-tuning: all weights, LoRA on attention and on experts, over 16 and 4 bits; in build/finetune/'
	@echo 'make bench-runtime   many clients, one expert: requests per second compared with hivemind; results in build/runtime_load/'
	@echo 'make bench-parallel  many calls at once, forward and backward, compared with a loop and plain autograd; in build/parallel_backward/'
	@echo 'make bench-pipeline  pipeline schedules compared with torchgpipe, torch and the simulated ideal; in build/pipeline_schedules/'
	@echo 'make bench-distributed  captured models in 1, 2 and 4 processes compared with torch; in build/pipeline_distributed/'
	@echo 'make bench-expert-parallel  a layer with experts on two processes compared with one and plain torch; in build/expert_parallel/'
	@echo 'make bench-remote    experts of another process compared with hivemind and Ray; in build/remote_load/'
	@echo 'make lint    ruff, clang-format and mypy'
	@echo 'make format  lay out the sources, write the type stub again'
	@echo 'make clean   remove what was built, and the virtual environment'
	@echo
	@echo 'PYTHON names the interpreter; TORCH=2.15.0 another torch, in an environment of its own.'
	@echo 'PYMOE_CUDA=auto|0|1 says whether CUDA kernels are built (auto: if nvcc is found); without a GPU it is 0 here.'

train: $(INSTALLED)
	$(RUN) examples/train_lm.py $(ARGS)

# The targets that install system packages: cmake and doctest, where they are missing.
# INSTALL_SYSTEM_PACKAGES=0 has it name them instead.
define run_tests
	@PYTHON=$(PYTHON) INSTALL_SYSTEM_PACKAGES=$${INSTALL_SYSTEM_PACKAGES:-1} bash tests/system_packages.sh test
	@$(MAKE) --no-print-directory $(PACKAGES) $(INSTALLED)
	$(RUN) tests/run_all.py $(1) $(ARGS)
endef

check:
	$(call run_tests,--quick)

test:
	$(call run_tests)

test-deep:
	$(call run_tests,--deep)

test-all:
	$(call run_tests,--exhaustive)

# Warnings are errors: a reference that leads nowhere, a docstring that cannot be read.
docs: $(PACKAGES) $(INSTALLED)
	$(RUN) -m sphinx -W --keep-going -q -d build/doctrees docs build/docs
	@echo 'build/docs/index.html'

# pymoe._ops serves every Python, pymoe._runtime is compiled for each: the wheel holds one for every Python of PYTHONS.
# auditwheel refuses what needs a newer glibc than torch's wheels do; torch's libraries are torch's own wheel's. Times in the
# archive are those of the last commit, so that the same sources give the same bytes. make drops what a shell function has
# printed if its last command was not found, such as python3.14: hence `true`.
PYTHONS ?= $(shell for version in 3.10 3.11 3.12 3.13 3.14; do python$$version -c \
	'import os, sysconfig; os.stat(sysconfig.get_paths()["include"] + "/Python.h")' 2>/dev/null && echo python$$version; done; true)
USE_RUNTIME := import _runtime; pool = _runtime.WorkerPool(1); assert pool.submit(int, 3).result() == 3; pool.shutdown(True)
wheel: export PYMOE_PYTHONS = $(PYTHONS)
wheel: export SOURCE_DATE_EPOCH ?= $(shell git log -1 --format=%ct 2>/dev/null || date -r CHANGELOG.md +%s)
wheel: $(PACKAGES)
	rm -rf build/wheel build/lib* build/bdist* && mkdir -p build/wheel dist
	$(RUN) -m pip wheel --quiet --disable-pip-version-check --no-build-isolation --no-deps --wheel-dir build/wheel .
	$(RUN) -m auditwheel repair --only-plat --plat manylinux_2_28_$$($(RUN) -c "import platform; print(platform.machine())") --wheel-dir build/wheel/repaired --exclude 'libtorch*' --exclude 'libc10*' build/wheel/*.whl
	$(RUN) -m zipfile -e build/wheel/repaired/*.whl build/wheel/unpacked
	set -e; cd build/wheel/unpacked/pymoe; for python in "$(CURDIR)/$(RUN)" $(PYTHONS); do "$$python" -c '$(USE_RUNTIME)'; done
	mv build/wheel/repaired/*.whl dist

# Up to the upload. Each wheel is tried in two new environments, with the oldest torch that pyproject.toml promises and the
# newest of which pymoe does not warn. There run README's blocks and one case of each test of the operators, layers, runtime
# and parallel calls, in the tree of the sdist without its sources of `pymoe`. The wheel with CUDA kernels is for all
# generations of GPUs, whatever this machine has.
RELEASE := build/release
RELEASE_TORCHES ?= $(shell sed -n 's/^dependencies = .*"torch>=\([0-9.]*\)".*/\1/p' pyproject.toml) \
	$(shell sed -n 's/^NEWEST_TESTED = "\([0-9.]*\)"/\1/p' pymoe/_torch_versions.py)
RELEASE_TESTS := 'tests/docs/test_code_blocks.py::test_the_blocks_of_a_page_run[README.md]' tests/ops tests/nn tests/runtime tests/parallel
release:
	@test -z "$$(git status --porcelain 2>&1)" || { echo 'release: the tree must be clean, got'; git status --short 2>&1; exit 1; }
	@version="$$(sed -n 's/^__version__ = "\([^"]*\)".*/\1/p' pymoe/__init__.py)"; first="$$(grep -m 1 '^## ' CHANGELOG.md)"; \
	  case "$$first" in "## $$version, "[0-9][0-9][0-9][0-9]-[0-9][0-9]-[0-9][0-9]) ;; *) \
	  echo "release: the first heading of CHANGELOG.md must be '## $$version, YYYY-MM-DD', got '$$first'"; exit 1;; esac
	@$(MAKE) --no-print-directory $(PACKAGES)
	rm -rf dist build/objects $(RELEASE) && mkdir -p $(RELEASE)/tree
	PYMOE_CUDA=0 $(RUN) -m build --quiet --sdist --no-isolation
	$(MAKE) --no-print-directory wheel PYMOE_CUDA=0
	@if command -v nvcc; then \
	  env -u TORCH_CUDA_ARCH_LIST CUDA_VISIBLE_DEVICES= $(MAKE) --no-print-directory wheel PYMOE_CUDA=1; else \
	  echo '== no nvcc: no wheel with CUDA kernels'; fi
	tar xf dist/*.tar.gz -C $(RELEASE)/tree --strip-components=1 && rm -r $(RELEASE)/tree/pymoe
	set -e; for wheel in dist/*.whl; do for torch in $(RELEASE_TORCHES); do \
	  echo "== $$wheel and torch $$torch in a new environment"; rm -rf $(RELEASE)/venv; \
	  $(MAKE) --no-print-directory try-wheel VENV=$(RELEASE)/venv TORCH=$$torch WHEEL=$$wheel; \
	done; done
	@ls -l dist && echo 'ready for the upload'

# One wheel and one torch; `release` names them, and a new environment.
.PHONY: try-wheel
try-wheel: $(PACKAGES)
	$(RUN) -m pip install --quiet --disable-pip-version-check $(WHEEL)
	cd $(RELEASE)/tree && env -u PYTHONPATH $(CURDIR)/$(RUN) -m pytest -n 2 --level=quick $(RELEASE_TESTS)

bench: $(INSTALLED)
	$(RUN) -m pymoe.bench run --json build/bench.json $(ARGS)

bench-layers: $(PACKAGES) $(INSTALLED)
	$(RUN) -m benchmarks.model_layers $(ARGS)

# llama.cpp comes from an npm package; where that cannot be had, its rows are left out.
bench-models: $(PACKAGES) $(INSTALLED)
	$(RUN) -m benchmarks.whole_models $(ARGS)

bench-finetune: $(PACKAGES) $(INSTALLED)
	$(RUN) -m benchmarks.finetune $(ARGS)

# hivemind lives in an environment of its own, with the same torch.
HIVEMIND := build/hivemind

bench-runtime: $(INSTALLED) $(HIVEMIND)/.packages
	$(RUN) -m benchmarks.runtime_load --hivemind $(HIVEMIND)/bin/python $(ARGS)

bench-parallel: $(INSTALLED)
	$(RUN) -m benchmarks.parallel_backward $(ARGS)

bench-pipeline: $(INSTALLED) $(VENV)/.torchgpipe
	$(RUN) -m benchmarks.pipeline_schedules $(ARGS)

bench-distributed: $(INSTALLED)
	$(RUN) -m benchmarks.pipeline_distributed $(ARGS)

bench-expert-parallel: $(INSTALLED)
	$(RUN) -m benchmarks.expert_parallel $(ARGS)

# Ray, too, lives in an environment of its own.
RAY := build/ray

bench-remote: $(PACKAGES) $(INSTALLED) $(HIVEMIND)/.packages $(RAY)/.packages
	$(RUN) -m benchmarks.remote_load --hivemind $(HIVEMIND)/bin/python --ray $(RAY)/bin/python $(ARGS)

$(RAY)/.packages: benchmarks/remote/requirements-ray.txt
	@echo '== Ray into $(RAY)'
	$(PYTHON) -m venv $(RAY)
	$(RAY)/bin/python -m pip install --quiet --disable-pip-version-check -r $<
	@touch $@

$(VENV)/.torchgpipe: benchmarks/pipeline/requirements-torchgpipe.txt $(PACKAGES)
	@echo '== torchgpipe into $(VENV)'
	$(RUN) -m pip install --quiet --disable-pip-version-check -r $<
	@touch $@

$(HIVEMIND)/.packages: benchmarks/runtime/requirements-hivemind.txt
	@echo '== hivemind into $(HIVEMIND)'
	$(PYTHON) -m venv $(HIVEMIND)
	$(HIVEMIND)/bin/python -m pip install --quiet --disable-pip-version-check -r $<
	@touch $@

lint: $(PACKAGES)
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	find csrc tests benchmarks examples -name '*.cpp' -o -name '*.h' -o -name '*.cu' | xargs $(VENV)/bin/clang-format --dry-run --Werror
	$(RUN) -m mypy

format: $(PACKAGES) $(INSTALLED)
	$(RUN) -m ruff check --fix-only --quiet .
	$(RUN) -m ruff format .
	find csrc tests benchmarks examples -name '*.cpp' -o -name '*.h' -o -name '*.cu' | xargs $(VENV)/bin/clang-format -i
	$(RUN) tests/write_stub.py

clean:
	rm -rf .venv .venv-torch-* build dist *.egg-info pymoe/*.so .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The packages of a list, with the torch that was asked for in place of the pinned one; 2.11 needs an older setuptools.
define install
	sed '$(if $(TORCH),s/^torch==.*/torch==$(TORCH)/; s/^setuptools==/setuptools<=/)' requirements-train.txt > $(VENV)/requirements-train.txt
	cp requirements-dev.txt $(VENV)/
	$(RUN) -m pip install --quiet --disable-pip-version-check -r $(VENV)/$(1)
	@touch $@
endef

$(TRAIN_PACKAGES): requirements-train.txt
	@PYTHON=$(PYTHON) bash tests/system_packages.sh build
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "the pinned packages need Python 3.11 or newer: name one with make PYTHON=...")'
	@echo '== Python packages into $(VENV)'
	$(PYTHON) -m venv $(VENV)
	$(call install,requirements-train.txt)

$(PACKAGES): requirements-dev.txt $(TRAIN_PACKAGES)
	@echo '== packages of the tests into $(VENV)'
	$(call install,requirements-dev.txt)

# Editable: what runs is what stands in the tree, and a change of Python code needs no new installation. That the
# package also works when it is really installed is what tests/packaging/ shows.
$(INSTALLED): $(TRAIN_PACKAGES) $(NATIVE) setup.py pyproject.toml
	@echo '== building pymoe'
	$(RUN) -m pip install --quiet --disable-pip-version-check --no-build-isolation --no-deps -e .
	$(RUN) -c 'import pymoe; print(*(f"   {name}: {fact}" for name, fact in pymoe.build_info().items()), sep="\n")'
	@touch $@
