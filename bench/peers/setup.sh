#!/bin/sh
# Makes bench/peers/.venv, where `python -m bench core` looks for its peer. Several gigabytes; optional.
set -eu
cd "$(dirname "$0")"
"${PYTHON:-python3}" -m venv .venv
pip=".venv/bin/python -m pip --disable-pip-version-check"
$pip install -q -r requirements.txt
$pip install -q --no-deps sglang==0.5.23
echo "bench/peers: ready"
