#!/usr/bin/env bash
# Make the environment of a library that other_libraries shows: .venv-NAME.
#
#   tools/neighbor_env.sh NAME PYTHON
#
# NAME is ray, trl or torchft. The environment sees the packages of PYTHON's environment,
# torch above all, and installs only what other_libraries/requirements-NAME.txt names
# in addition.
set -euo pipefail
cd "$(dirname "$0")/.."
name=$1 python=$2
env=$PWD/.venv-$name
requirements=other_libraries/requirements-$name.txt
purelib='import sysconfig; print(sysconfig.get_path("purelib"))'

rm -rf "$env"
"$python" -m venv --without-pip "$env"
"$python" -c "$purelib" >"$("$env/bin/python" -c "$purelib")/shared.pth"

"$python" -m pip --disable-pip-version-check --python "$env/bin/python" install -r "$requirements"
touch "$env/installed"
