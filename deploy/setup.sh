#!/bin/sh
# Makes the virtual environment: ./.venv by default, $VENV where set. A second call with nothing changed does nothing.
#
# It needs Python 3.11 or newer, a C++ compiler with Python's headers for vLLM's compiled graphs, libnuma for vLLM, and
# bubblewrap and libseccomp for the sandbox. On Debian and as root it installs missing ones. For the tests it adds
# iproute2 (network namespaces) and prometheus (rules and dashboards).
# deploy/requirements-cpu.lock pins everything; $LOCK may name another.
set -eu
cd "$(dirname "$0")/.."
VENV=${VENV:-.venv}
TORCH=2.13.0
UV=0.13.8
LOCK=${LOCK:-deploy/requirements-cpu.lock}
STAMP=$VENV/.gspo-$(cat "$LOCK" pyproject.toml deploy/setup.sh | sha256sum | cut -c1-16)

[ -e "$STAMP" ] && exit 0
say() { echo "setup: $*" >&2; }

install_missing() {
  if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    say "installing $* with apt-get"
    apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$@" >/dev/null
  else
    say "missing: $*. Install them (on Debian: apt-get install $*) and call this again"
    exit 1
  fi
}

PYTHON=${PYTHON:-python3}
"$PYTHON" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))' || {
  say "$PYTHON is $("$PYTHON" --version); Python 3.11 to 3.13 is needed. Set PYTHON to one"
  exit 1
}
command -v c++ >/dev/null || install_missing g++
HEADER='import pathlib, sysconfig, sys; sys.exit(not pathlib.Path(sysconfig.get_path("include"), "Python.h").exists())'
"$PYTHON" -c "$HEADER" || install_missing python3-dev
"$PYTHON" -c 'import ensurepip, venv' 2>/dev/null || install_missing python3-venv
# vLLM's CPU kernels are linked with it; without them vLLM starts and then lacks its ops.
"$PYTHON" -c 'import ctypes; ctypes.CDLL("libnuma.so.1")' 2>/dev/null || install_missing libnuma1

# They contain user code: without bubblewrap the sandbox falls back on Landlock, without libseccomp on less.
MISSING=
command -v bwrap >/dev/null || MISSING=bubblewrap
"$PYTHON" -c 'import ctypes; ctypes.CDLL("libseccomp.so.2")' 2>/dev/null || MISSING="$MISSING libseccomp2"
# shellcheck disable=SC2086
if [ -n "$MISSING" ]; then
  { [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null && (install_missing $MISSING); } ||
    say "missing: $MISSING. Reward functions run with less around them; the reward service logs how much"
fi

[ "$(id -u)" != 0 ] || command -v ip >/dev/null || install_missing iproute2

# Debian starts a service that it installs, unless this file says no; the tests start a Prometheus of their own.
POLICY=/usr/sbin/policy-rc.d
if [ "$(id -u)" = 0 ] && ! command -v promtool >/dev/null; then
  [ -e "$POLICY" ] || { printf '#!/bin/sh\nexit 101\n' >"$POLICY" && chmod +x "$POLICY" && trap 'rm -f "$POLICY"' EXIT; }
  install_missing prometheus
fi

say "making $VENV"
[ -x "$VENV/bin/python" ] || "$PYTHON" -m venv "$VENV"
pip() { "$VENV/bin/python" -m pip --disable-pip-version-check -q "$@"; }
pip install "uv==$UV"

# torch's CPU build: from where pip looks by itself, else from PyTorch's own index. Plain `torch` on PyPI brings
# several GB of CUDA. uv then accepts the installed one.
"$VENV/bin/python" -c "import torch; assert torch.__version__ == '$TORCH+cpu'" 2>/dev/null || {
  say "installing torch $TORCH, CPU build"
  pip install "torch==$TORCH+cpu" 2>/dev/null ||
    pip install --extra-index-url https://download.pytorch.org/whl/cpu "torch==$TORCH+cpu"
}
say "installing the locked packages"
export UV_LINK_MODE=${UV_LINK_MODE:-copy}
# With bytecode: each of the processes of a first start would compile the same modules again, for a minute in all.
"$VENV/bin/uv" pip install -q --compile-bytecode --python "$VENV/bin/python" --no-deps -r "$LOCK"
"$VENV/bin/uv" pip install -q --python "$VENV/bin/python" --no-deps -e .
rm -f "$VENV"/.gspo-*
touch "$STAMP"
say "done: $VENV"
