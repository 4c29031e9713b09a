#!/usr/bin/env bash
# Installs the system packages that `make test` needs and a bare Debian or Ubuntu lacks: compilers, cmake, doctest and
# the parts of Python that those systems package apart. Installs nothing where all are there; without the right to
# install, says what is missing and how to get it.
set -euo pipefail

wanted=(make g++ cmake ninja-build doctest-dev)
if command -v python3 >/dev/null; then
  python3 -c 'import ensurepip, venv' 2>/dev/null || wanted+=(python3-venv)
  python3 -c 'import os, sysconfig; open(os.path.join(sysconfig.get_paths()["include"], "Python.h"))' 2>/dev/null ||
    wanted+=(python3-dev)
else
  wanted+=(python3 python3-venv python3-dev)
fi

if ! command -v dpkg-query >/dev/null; then
  echo "== not Debian or Ubuntu: make sure that a C++20 compiler, cmake, ninja and doctest are installed"
  exit 0
fi
missing=()
for package in "${wanted[@]}"; do
  dpkg-query --show --showformat='${Status}' "$package" 2>/dev/null | grep -q 'ok installed' || missing+=("$package")
done
((${#missing[@]})) || exit 0

as_root=()
if ((EUID != 0)); then
  if ! sudo -n true 2>/dev/null; then
    echo "missing system packages; install them and call again:  sudo apt-get install ${missing[*]}" >&2
    exit 1
  fi
  as_root=(sudo)
fi
echo "== system packages: ${missing[*]}"
"${as_root[@]}" apt-get update -qq
"${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}" \
  </dev/null >/dev/null
