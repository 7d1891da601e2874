PYTHON ?= python3
BIN := .venv/bin
MODEL ?= smollm2-135m
JOBS ?= 2
ARGS ?=

.PHONY: help serve chat check test quick soak sanitize sanitize-threads bench bench-pools wheel clean \
  env-run env-dev

help:  ## say what each command does
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 18

env-run:
	@$(PYTHON) tools/bootstrap.py run

env-dev:
	@$(PYTHON) tools/bootstrap.py dev

serve: env-run  ## serve MODEL (default smollm2-135m) through the OpenAI API; ARGS are passed on
	@$(BIN)/bifolio serve $(MODEL) $(ARGS)

chat: env-run  ## talk to MODEL in the terminal
	@$(BIN)/bifolio chat $(MODEL) $(ARGS)

check: env-dev  ## lint, types, layers: under a minute
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/lint-imports
	$(BIN)/mypy
	$(BIN)/python tools/check_names.py
	$(BIN)/python tools/check_prose.py
	$(BIN)/python tools/make_figures.py --check

test: check  ## check, then every test but the long ones
	$(BIN)/pytest -n $(JOBS) --dist loadfile -m "not soak" $(ARGS)

quick: env-dev  ## the tests that need neither torch nor a process of their own: seconds
	$(BIN)/pytest --quick -m "not soak" --ignore tests/e2e --ignore tests/kernels \
	  --ignore tests/process $(ARGS)

soak: env-dev  ## the long runs; results go to docs/results, dated
	HYPOTHESIS_PROFILE=soak $(BIN)/pytest -m soak --timeout 0 $(ARGS)

# What configures a build with one of the sanitizers: $(call configure,address).
configure = $(BIN)/cmake -S . -B build/sanitize-$(1) -DBIFOLIO_SANITIZE=$(1) \
  -DPython_EXECUTABLE="$(abspath $(BIN)/python)" \
  -Dnanobind_DIR="$$($(BIN)/python -m nanobind --cmake_dir)"

sanitize: env-dev sanitize-threads  ## kernel tests and the thread pool under the sanitizers of GCC
	$(call configure,address)
	$(BIN)/cmake --build build/sanitize-address --target _native --parallel "$$(nproc)"
	rm -rf build/sanitized && mkdir -p build/sanitized && cp -r src/bifolio build/sanitized/
	rm -f build/sanitized/bifolio/_native*.so
	cp build/sanitize-address/_native*.so build/sanitized/bifolio/
	ASAN_OPTIONS=detect_leaks=0 PYTHONPATH=build/sanitized \
	  LD_PRELOAD="$$($(CXX) -print-file-name=libasan.so) $$($(CXX) -print-file-name=libstdc++.so)" \
	  $(BIN)/pytest -p no:cacheprovider tests/kernels -m "not soak" --timeout 600 \
	  -k "not idle and not environment" $(ARGS)

sanitize-threads: env-dev  ## the thread pool under the thread sanitizer of GCC
	$(call configure,thread)
	$(BIN)/cmake --build build/sanitize-thread --target thread_pool_stress
	build/sanitize-thread/thread_pool_stress

bench: env-run  ## kernels and engine against their ceilings; the last line is JSON
	@$(BIN)/python tools/bench_engine.py $(ARGS)

bench-pools: env-run  ## two pools against one engine with each of their plans; the last line is JSON
	@$(BIN)/python tools/bench_pools.py $(ARGS)

wheel: env-dev  ## build a wheel into dist/
	$(BIN)/python -m build --wheel

clean:  ## remove what the commands above made, the environment included
	rm -rf .venv build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find src tests tools -name __pycache__ -type d -prune -exec rm -rf {} +
	rm -f src/bifolio/_native*.so
