PYTHON ?= python3
BIN := .venv/bin
MODEL ?= smollm2-135m
ARGS ?=

.PHONY: help serve chat check test soak sanitize bench bench-pools wheel clean env-run env-dev

help:  ## say what each command does
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 12

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

test: check  ## check, then every test but the long ones
	$(BIN)/pytest -m "not soak" $(ARGS)

soak: env-dev  ## the long runs; results go to docs/results, dated
	HYPOTHESIS_PROFILE=soak $(BIN)/pytest -m soak --timeout 0 $(ARGS)

sanitize: env-dev  ## kernel tests under the address and undefined-behaviour sanitizers of GCC
	$(BIN)/cmake -S . -B build/sanitize -DBIFOLIO_SANITIZE=ON \
	  -DPython_EXECUTABLE="$(abspath $(BIN)/python)" \
	  -Dnanobind_DIR="$$($(BIN)/python -m nanobind --cmake_dir)"
	$(BIN)/cmake --build build/sanitize --target _native --parallel
	rm -rf build/sanitized && mkdir -p build/sanitized && cp -r src/bifolio build/sanitized/
	rm -f build/sanitized/bifolio/_native*.so && cp build/sanitize/_native*.so build/sanitized/bifolio/
	ASAN_OPTIONS=detect_leaks=0 PYTHONPATH=build/sanitized \
	  LD_PRELOAD="$$($(CXX) -print-file-name=libasan.so) $$($(CXX) -print-file-name=libstdc++.so)" \
	  $(BIN)/pytest -p no:cacheprovider tests/kernels -k "not idle and not environment" $(ARGS)

bench: env-run  ## kernels and engine against their ceilings; the last line is JSON
	@$(BIN)/python tools/bench.py $(ARGS)

bench-pools: env-run  ## two pools against one engine with each of their plans; the last line is JSON
	@$(BIN)/python tools/bench_pools.py $(ARGS)

wheel: env-dev  ## build a wheel into dist/
	$(BIN)/python -m build --wheel

clean:  ## remove what the commands above made, the environment included
	rm -rf .venv build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find src tests tools -name __pycache__ -type d -prune -exec rm -rf {} +
	rm -f src/bifolio/_native*.so
