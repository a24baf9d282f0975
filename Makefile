# README shows `make demo` and `make test`; `make help` lists the other commands.

PYTHON ?= python3
# `make test TORCH=2.11` and `make test TORCH=latest` run the tests with that torch, in an
# environment of its own, and with what pip gives today for all else.
VENV = .venv$(addprefix -torch-,$(TORCH))
PY = $(VENV)/bin/python
DEMO_INSTALLED = $(VENV)/demo-installed
INSTALLED = $(VENV)/installed
# Of its own, because the site needs no torch.
SITE_PY = .venv-site/bin/python
SITE_INSTALLED = .venv-site/installed
# Otherwise the versions are those of the lock, whatever else pip was told.
PIP_INSTALL = $(if $(TORCH),,PIP_CONSTRAINT=requirements.lock) $(PY) -m pip install --disable-pip-version-check
WANTED_TORCH = $(patsubst %,'torch==%.*',$(filter-out latest,$(TORCH)))
# Without .venv, one of the machine's.
ANY_PYTHON = $(or $(wildcard $(PY)),$(PYTHON))

.PHONY: help demo test benchmark check update lock notebooks diff propagate site zh gpu horovod

help:
	@echo "make demo             train every stage and compare them in a table"
	@echo "make demo PY=python   the same with the Python that you name; installs nothing"
	@echo "make test             run the tests of the stages (ARGS=... is passed to pytest)"
	@echo "make test ARGS=--all  run also those around the stages, as CI does"
	@echo "make test ARGS=--release  run all cases of all tests"
	@echo "make test TORCH=2.11  run them with that version of torch, or TORCH=latest"
	@echo "make benchmark        measure the stages (ARGS=... is passed on)"
	@echo "make check            lint, format and the fast tests: half a minute"
	@echo "make update           after an edit: do all below that it made stale (RUNS=no)"
	@echo "make notebooks        run the notebooks and store their outputs (NOTEBOOKS=...)"
	@echo "make notebooks SHOW=1 only their listings, diffs and pictures"
	@echo "make diff B=05        show what a stage changes (A=NN: against that stage)"
	@echo "make propagate        carry an edit to the stages that build on it (FROM=...)"
	@echo "make site             build the pages and notebooks as a site, in docs/_build/html"
	@echo "make zh               bring the Chinese catalogs up to date; lists what waits (NEW=docs/...)"
	@echo "make gpu              run on a GPU what a CPU cannot show (PART=..., PYTHON=...)"
	@echo "make horovod          build Horovod in .venv-horovod and run its test"
	@echo "make lock             write requirements.lock: the versions that pip gives today"

# The scripts run with Python 3.10, too; the tools and the tests read stages.toml by tomllib.
is_recent = $(1) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	|| { echo "$(1) is not Python 3.11 or later; to name another: make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; exit 2; }

ifeq ($(origin PY),command line)
SITE_PY = $(PY)
# An environment of the reader's own: nothing is installed there.
.PHONY: $(DEMO_INSTALLED) $(INSTALLED) $(SITE_INSTALLED)
$(DEMO_INSTALLED) $(INSTALLED) $(SITE_INSTALLED):
	@$(call is_recent,$(PY))
else
# A virtual environment: made once, and again when the requirements change.
$(DEMO_INSTALLED): requirements.txt requirements.lock
	@$(call is_recent,$(PYTHON))
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null \
	  || { echo "Python's venv is missing; on Debian and Ubuntu: apt-get install python3-venv" >&2; exit 2; }
	$(PYTHON) -m venv $(VENV)
	$(PIP_INSTALL) $(WANTED_TORCH) -r requirements.txt
	@touch $@

$(INSTALLED): $(DEMO_INSTALLED) requirements-notebooks.txt requirements-dev.txt
	$(PIP_INSTALL) $(WANTED_TORCH) -r requirements.txt -r requirements-notebooks.txt -r requirements-dev.txt
	@touch $@

$(SITE_INSTALLED): tools/site/requirements.txt requirements.lock
	@$(call is_recent,$(PYTHON))
	$(PYTHON) -m venv .venv-site
	$(SITE_PY) -m pip install --disable-pip-version-check -r tools/site/requirements.txt -c requirements.lock
	@touch $@
endif

demo: $(DEMO_INSTALLED)
	$(PY) -m tools.demo

# Four workers on two cores: the tests often wait, for a timeout for instance.
test: $(INSTALLED)
	$(PY) -m pytest -n 4 $(ARGS)

benchmark: $(INSTALLED)
	$(PY) -m benchmarks.compare $(ARGS)

check: $(INSTALLED)
	@failed=0; \
	$(PY) -m ruff check . || failed=1; \
	$(PY) -m ruff format --check . || failed=1; \
	$(PY) -m pytest -q -m "not slow" \
	  $(addprefix tests/*/test_,registry.py chain.py tools.py notebooks.py exercises.py symptoms.py) \
	  || failed=1; \
	exit $$failed

update: $(INSTALLED)
	@$(PY) -m tools.update $(if $(filter no,$(RUNS)),--no-runs)

lock: $(INSTALLED)
	$(PY) -m uv pip compile --quiet --upgrade --universal --python-version 3.11 --no-annotate \
	  --custom-compile-command "make lock" requirements*.txt tools/site/requirements.txt -o requirements.lock

notebooks: $(INSTALLED)
	$(PY) -m tools.notebooks $(if $(SHOW),--show) $(NOTEBOOKS)

diff:
	@$(ANY_PYTHON) -m tools.diff $(addprefix --from=,$(A)) $(B)

propagate: $(INSTALLED)
	@$(PY) -m tools.propagate $(FROM)

# In English, in Chinese, and what searches both. A warning is an error.
SPHINX = $(SITE_PY) -m sphinx --quiet --jobs auto -c tools/site
STRICTLY = --fail-on-warning --keep-going

site: $(SITE_INSTALLED)
	@$(SITE_PY) -c 'import myst_nb, pagefind, sphinx_book_theme, sphinx_copybutton, sphinxext.opengraph' 2>/dev/null \
	  || { echo "$(SITE_PY) has no Sphinx, or not all of what the site needs: $(SITE_PY) -m pip install -r tools/site/requirements.txt" >&2; exit 2; }
	@rm -rf docs/_build
	@echo "building the site: two minutes on two idle CPU cores"
	@$(SPHINX) $(STRICTLY) -d docs/_build/doctrees . docs/_build/html
	@$(SPHINX) $(STRICTLY) -d docs/_build/doctrees-zh -t zh . docs/_build/html/zh_CN
	@$(SITE_PY) -m pagefind --site docs/_build/html --root-selector article --exclude-selectors .headerlink --quiet
	@echo "open docs/_build/html/index.html; the search needs a server:"
	@echo "$(SITE_PY) -m http.server -d docs/_build/html"

zh: $(SITE_INSTALLED)
	@rm -rf docs/_build/gettext
	@$(SPHINX) -b gettext -d docs/_build/doctrees-gettext . docs/_build/gettext
	@tools/site/merge_catalogs.sh docs/_build/gettext $(NEW)

# Nothing is installed: the machine need not reach the internet.
gpu:
	@$(ANY_PYTHON) -m tools.gpu $(PART)

# In an environment of its own, which sees the torch that is in .venv.
.venv-horovod/installed: other_libraries/requirements-horovod.txt tools/horovod_env.sh $(INSTALLED)
	tools/horovod_env.sh $(PY)

horovod: .venv-horovod/installed
	REQUIRE_HOROVOD=1 $(PY) -m pytest --release -k horovod tests/around/test_neighbors.py $(ARGS)
