#!/usr/bin/env bash
# Make .venv-horovod, the environment of other_libraries/horovod_train.py.
#
#   tools/horovod_env.sh PYTHON
#
# It sees the packages of PYTHON's environment, torch above all, and installs only what
# other_libraries/requirements-horovod.txt names in addition. Horovod is built from
# source, for CPUs and over gloo.
set -euo pipefail
cd "$(dirname "$0")/.."
python=$1
env=$PWD/.venv-horovod
requirements=other_libraries/requirements-horovod.txt
purelib='import sysconfig; print(sysconfig.get_path("purelib"))'

pip_install() {
  "$python" -m pip --disable-pip-version-check --python "$env/bin/python" install "$@"
}

if ! command -v g++ >/dev/null; then
  echo "Horovod is built from source, and g++ is missing;" \
    "on Debian and Ubuntu: apt-get install g++" >&2
  exit 2
fi
rm -rf "$env"
"$python" -m venv --without-pip "$env"
"$python" -c "$purelib" >"$("$env/bin/python" -c "$purelib")/shared.pth"

# Its version is there; the lines without one are what building it needs.
pip_install $(grep -v -e '^#' -e '^horovod' "$requirements")
version=$(sed -n 's/^horovod==//p' "$requirements")
source=$env/horovod-$version
"$python" -m pip --disable-pip-version-check --python "$env/bin/python" download \
  --no-deps --no-binary horovod --no-build-isolation -d "$env" "horovod==$version"
tar -xzf "$source.tar.gz" -C "$env"
# torch's headers need C++20, and Horovod asks for C++14.
sed -i 's/CMAKE_CXX_STANDARD 14/CMAKE_CXX_STANDARD 20/' \
  "$source"/CMakeLists.txt "$source"/horovod/torch/CMakeLists.txt
# Otherwise it builds for CUDA wherever it finds nvcc, also without GPU operations.
sed -i '/^include(CheckLanguage)/,/^macro(ADD_CUDA)/{/^macro/!d}' \
  "$source"/CMakeLists.txt
sed -i 's/torch.version.cuda is not None/False/' \
  "$source"/cmake/Modules/FindPytorch.cmake
# CMake 4 refuses a project as old as the gloo inside, unless it is told not to.
PATH=$env/bin:$PATH CMAKE_POLICY_VERSION_MINIMUM=3.5 MAKEFLAGS=-j$(nproc) \
  HOROVOD_WITH_PYTORCH=1 HOROVOD_WITHOUT_TENSORFLOW=1 HOROVOD_WITHOUT_MXNET=1 \
  HOROVOD_WITH_GLOO=1 HOROVOD_WITHOUT_MPI=1 HOROVOD_WITHOUT_NVTX=1 \
  pip_install --no-build-isolation --no-cache-dir --no-deps "$source"
rm -rf "$source" "$source.tar.gz"
touch "$env/installed"
