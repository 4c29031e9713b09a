#!/usr/bin/env bash
# What a bare Debian or Ubuntu lacks: `build` for a compiler and the parts of Python that those systems package apart,
# `test` for cmake and doctest as well, `aarch64` for a compiler and an emulator of that architecture. Says what is
# missing and the command that installs it; installs it where INSTALL_SYSTEM_PACKAGES=1 and there is the right to. Does
# nothing where all is there, wherever it came from. PYTHON names the interpreter.
set -euo pipefail
purpose=${1:-test}
python=${PYTHON:-python3}

missing=()
command -v make >/dev/null || missing+=(make)
[[ -n ${CXX:-} ]] || command -v c++ >/dev/null || command -v g++ >/dev/null || command -v clang++ >/dev/null ||
  missing+=(g++)
if command -v "$python" >/dev/null; then
  "$python" -c 'import ensurepip, venv' 2>/dev/null || missing+=(python3-venv)
  "$python" -c 'import os, sysconfig; open(os.path.join(sysconfig.get_paths()["include"], "Python.h"))' 2>/dev/null ||
    missing+=(python3-dev)
else
  missing+=(python3 python3-venv python3-dev)
fi
if [[ $purpose == test ]]; then
  command -v cmake >/dev/null || missing+=(cmake)
  echo '#include <doctest/doctest.h>' | "${CXX:-c++}" -E -x c++ - >/dev/null 2>&1 || missing+=(doctest-dev)
fi
if [[ $purpose == aarch64 ]]; then
  command -v aarch64-linux-gnu-g++ >/dev/null || missing+=(g++-aarch64-linux-gnu)
  command -v qemu-aarch64-static >/dev/null || missing+=(qemu-user-static)
fi
((${#missing[@]})) || exit 0

as_root=()
((EUID == 0)) || as_root=(sudo -n)
if [[ ${INSTALL_SYSTEM_PACKAGES:-0} != 1 ]] || ! command -v apt-get >/dev/null ||
  { ((EUID != 0)) && ! sudo -n true 2>/dev/null; }; then
  echo "missing, by the names of Debian's packages: ${missing[*]}" >&2
  echo "install them and call again; on Debian and Ubuntu:" >&2
  echo "    sudo apt-get install ${missing[*]}" >&2
  exit 1
fi
echo "== system packages: ${missing[*]}"
"${as_root[@]}" apt-get update -qq
"${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}" \
  </dev/null >/dev/null
