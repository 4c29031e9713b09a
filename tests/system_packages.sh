#!/usr/bin/env bash
# Installs what a bare Debian or Ubuntu lacks: `build` for a compiler and the parts of Python that those systems package
# apart, `test` for cmake and doctest as well. Installs nothing where all is there, wherever it came from; without the
# right to install, says what is missing and how to get it. PYTHON names the interpreter.
set -euo pipefail
purpose=${1:-test}
python=${PYTHON:-python3}

missing=()
command -v make >/dev/null || missing+=(make)
command -v g++ >/dev/null || missing+=(g++)
if command -v "$python" >/dev/null; then
  "$python" -c 'import ensurepip, venv' 2>/dev/null || missing+=(python3-venv)
  "$python" -c 'import os, sysconfig; open(os.path.join(sysconfig.get_paths()["include"], "Python.h"))' 2>/dev/null ||
    missing+=(python3-dev)
else
  missing+=(python3 python3-venv python3-dev)
fi
if [[ $purpose == test ]]; then
  command -v cmake >/dev/null || missing+=(cmake)
  echo '#include <doctest/doctest.h>' | g++ -E -x c++ - >/dev/null 2>&1 || missing+=(doctest-dev)
fi
((${#missing[@]})) || exit 0

as_root=()
((EUID == 0)) || as_root=(sudo -n)
if ! command -v apt-get >/dev/null || { ((EUID != 0)) && ! sudo -n true 2>/dev/null; }; then
  echo "missing, by the names of Debian's packages: ${missing[*]}" >&2
  echo "install them and call again, there with: sudo apt-get install ${missing[*]}" >&2
  exit 1
fi
echo "== system packages: ${missing[*]}"
"${as_root[@]}" apt-get update -qq
"${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}" \
  </dev/null >/dev/null
