#!/usr/bin/env bash
# Builds a wheel with compiled kernels into dist/, and tries it where there is no compiler. Usage: tests/wheel.sh PYTHON
# PYTHON's environment has genbatch's requirements and the default model; the wheel is installed over it elsewhere.
set -euo pipefail
python=$1
case $python in /*) ;; *) python=$PWD/$python ;; esac
root=$(cd "$(dirname "$0")/.." && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work" "$root/nif/native/packaged"' EXIT

tag=$("$python" "$root/tests/wheel_kernels.py" "$root/nif/native/packaged")
"$python" -m build --quiet --wheel --no-isolation --outdir "$root/dist" --config-setting=--build-option="--plat-name=$tag" \
    "$root" > "$work/build.log" 2>&1 || { cat "$work/build.log"; exit 1; }
rm -rf "$root/nif/native/packaged" "$root/build"
wheel=$(ls -t "$root"/dist/genbatch-*"$tag".whl | head -1)
echo "wheel: $wheel"

"$python" -m venv --without-pip "$work/venv"
"$python" -m pip --disable-pip-version-check --quiet --python "$work/venv/bin/python" install --no-deps "$wheel"
"$python" -c 'import sys, site; print(*site.getsitepackages(), *(p for p in sys.path if p.endswith("site-packages")), sep="\n")' \
    > "$work/requirements.pth"
mv "$work/requirements.pth" "$(echo "$work"/venv/lib/python*/site-packages)/requirements.pth"

cd "$work"
export GENBATCH_CACHE="$work/cache"
CC=/missing PATH="$work/venv/bin" "$work/venv/bin/genbatch" generate --model smollm2 "What is the capital of France?" \
    --max-tokens 16 | tee answer
grep -q "Paris" answer
CC=/missing PATH="$work/venv/bin" "$work/venv/bin/python" "$root/tests/wheel_bits.py" packaged > packaged.txt
"$work/venv/bin/python" "$root/tests/wheel_bits.py" compiled > compiled.txt
cmp packaged.txt compiled.txt
echo "wheel: it answers without a compiler, and its kernels give the bits of those compiled here"
