# make demo               train four small GPTs on this machine and compare them: runs/demo/
# make demo-layouts       train one small GPT under every layout: runs/demo-layouts/
# make demo-deepspeed     the same GPT with DeepSpeed's ZeRO stages and replicas: runs/demo-deepspeed/
# make demo-elastic       replicas that are killed and come back, and a small storm: runs/demo-elastic/
# make convergence-quick  losses and bytes of every method: runs/quick/report
# make test               formatting, types and every test
# make test-quick         formatting, and a choice of tests from each room: about a minute
# make test-gpu           the fused operations and steps on an NVIDIA GPU
# make test-plain         every test without compiled operations
# make test-torch TORCH=2.11.0  the tests without frameworks, with that release of torch
# make headroom           how much of each tolerance is used, over kernels and seeds
# make docs               the documentation site: site/index.html
# make clean              remove the environment and whatever was built or run

PYTHON ?= python3
BIN := .venv/bin

# Several processes share the cores; more threads than cores make each of them slower.
export OMP_NUM_THREADS := 1

# Three files at a time, in the order of tests/conftest.py: two cores would often be idle with two,
# because some tests have one process, and some wait for replicas that die.
PYTEST := $(BIN)/python -m pytest -q -n 3 --dist loadfile --no-loadscope-reorder

# torch reads its own templates in the locale's encoding, which may be none that holds them.
export PYTHONUTF8 := 1

.PHONY: demo demo-layouts demo-deepspeed demo-elastic convergence-quick test types suite test-quick \
	test-gpu test-plain test-torch headroom docs clean

# Benchmarks import the examples by the names that they have for each other.
BENCHMARK := PYTHONPATH=kernels:examples:examples/gpt $(BIN)/python -m benchmarks
SMALL_STORM := --replicas 4 --steps 300 --step-seconds 0.1 --period 25 --kills 6 --freezes 2 \
	--cuts 2 --waves 0 --heartbeat-timeout 1

demo: .venv/installed
	$(BIN)/python examples/demo.py

demo-layouts: .venv/installed
	$(BIN)/python examples/demo_layouts.py

demo-deepspeed: .venv/installed
	$(BIN)/python examples/demo_deepspeed.py

demo-elastic: .venv/installed
	$(BIN)/python examples/demo_elastic.py
	RUST_LOG=warn $(BENCHMARK).elastic.storm $(SMALL_STORM) --out runs/demo-elastic/storm.json
	$(BENCHMARK).elastic.storm_picture runs/demo-elastic/storm.json runs/demo-elastic/storm.gif

convergence-quick: .venv/installed
	$(BENCHMARK).losses.train_processes --grid quick --out runs/quick
	$(BENCHMARK).losses.process_report --runs runs/quick --out runs/quick/report

test: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(MAKE) --no-print-directory -j 2 types suite

# Without a cache mypy takes 20 seconds of a core, which the tests do not need all the time.
types: .venv/installed
	$(BIN)/mypy

suite: .venv/installed
	$(PYTEST)

# Of each room the files that find most in little time, those that start ranks first.
QUICK := $(addprefix tests/, \
	integrations/test_ddp.py layout/test_matrix_views.py sync/test_meeting.py \
	sync/test_own_sync.py sync/test_quantized_edges.py comm/test_collectives.py \
	layout/test_states_of_shards.py optim/test_torch_contract.py \
	$(addprefix sync/test_,low_rank_reference.py codec.py corrections.py fragments.py opening.py) \
	$(addprefix optim/test_,dion_reference.py composition.py errors.py param_groups.py) \
	$(addprefix update/test_,polar.py polar_factor.py orthonormalize.py scalar.py) \
	$(addprefix update/test_,parameter_state.py state_table.py) \
	$(addprefix ops/test_,ops.py codes.py page.py) $(addprefix metering/test_,report.py wire.py) \
	$(addprefix docs/test_,pages.py architecture.py) examples/test_dion_in_one_file.py \
	benchmarks/test_simulation.py $(addprefix test_,gates.py division.py rooms.py))

# Without mypy, which takes longer than 15 seconds when it has no cache.
test-quick: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(PYTEST) $(QUICK)

test-gpu: .venv/installed
	CURVADION_TEST_GPU=1 $(PYTEST) $(addprefix tests/ops/test_,gpu.py ops.py codes.py backends.py)

test-plain: .venv/installed
	CURVADION_BACKEND=torch $(PYTEST)

# Frameworks pin torch, so this environment has none of them. Triton's interpreter before 3.7 needs
# numpy 2.3.
TORCH ?= 2.11.0
WITHOUT_FRAMEWORKS := tests/update tests/optim tests/layout tests/ops tests/sync tests/comm tests/metering tests/test_gates.py

test-torch: .venv-$(TORCH)/installed
	.venv-$(TORCH)/bin/python -m pytest -q -n 3 --dist loadfile $(WITHOUT_FRAMEWORKS)

.venv-$(TORCH)/installed: constraints.txt setup.py
	$(PYTHON) -m venv .venv-$(TORCH)
	(grep -vE '^(torch|triton|setuptools|numpy)==' constraints.txt; \
		echo 'torch==$(TORCH)'; echo 'numpy<2.4') > .venv-$(TORCH)/constraints.txt
	.venv-$(TORCH)/bin/python -m pip install --quiet -c .venv-$(TORCH)/constraints.txt -e '.[test]'
	touch $@

TESTS ?= tests

headroom: .venv/installed
	$(BIN)/python tests/headroom.py $(if $(EVERY),--every) $(TESTS)

docs: .venv/installed
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

# torch goes first and alone, so that a CPU build offered locally is taken without resolving the rest.
.venv/installed: constraints.txt requirements-torchtitan.txt setup.py pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet -c constraints.txt torch
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[train,test,docs,deepspeed,test-frameworks]'
	$(BIN)/python -m pip install --quiet --no-deps -r requirements-torchtitan.txt
	touch $@

clean:
	rm -rf .venv .venv-* build dist runs site *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
