#!/bin/sh
# Builds the native core with AddressSanitizer and UndefinedBehaviorSanitizer into build/sanitize and runs the C++
# tests and the tests of native code over it. $1: a folder with python, cmake and ninja (the virtual environment's
# bin); further arguments go to pytest, which then runs alone.
set -eu
cd "$(dirname "$0")/.."
bin=$(cd "${1:-.venv/bin}" && pwd)
[ $# -eq 0 ] || shift
PATH=$bin:$PATH
echo '#include <doctest/doctest.h>' | c++ -E -x c++ - >/dev/null 2>&1 ||
    scripts/packages.sh "what the C++ tests need" doctest-dev
cmake -S . -B build/sanitize -G Ninja -DCMAKE_BUILD_TYPE=Debug -DKVFERRY_SANITIZE=ON -DKVFERRY_TESTS=ON \
    -DPython_EXECUTABLE="$bin/python" >/dev/null
cmake --build build/sanitize --parallel 2
export ASAN_OPTIONS=strict_string_checks=1 UBSAN_OPTIONS=print_stacktrace=1
if [ $# -eq 0 ]; then
    build/sanitize/kvferry_tests
    set -- tests/native tests/property/test_native_extents.py tests/property/test_page_lane.py \
        tests/unit/test_core_lanes.py tests/unit/test_core_owners.py tests/unit/test_core_runs_and_groups.py \
        tests/unit/test_core_digests.py
fi
# The sanitizer has to be there before the interpreter's first allocation, and libstdc++ with it: exceptions are
# intercepted by name. Python's own arenas would hide overflows; its leaks at exit are its own.
exec env LD_PRELOAD="$(g++ -print-file-name=libasan.so) $(g++ -print-file-name=libstdc++.so)" \
    ASAN_OPTIONS=$ASAN_OPTIONS:detect_leaks=0 PYTHONMALLOC=malloc \
    "$bin/python" scripts/with_native.py build/sanitize -p no:cacheprovider "$@"
