#!/usr/bin/env bash
# guidellm, a load generator of others' making, against `genbatch serve --http`: prints its table, fails if a request did.
#
#   tests/benchmarks/guidellm.sh VENV [MODEL] [STREAMS] [REQUESTS]
#
# VENV has genbatch; guidellm gets a venv of its own beside it, since its dependencies are many and its own.
set -euo pipefail

venv=$(realpath "$1")
model=${2:-smollm2}
streams=${3:-4}
requests=${4:-32}
torch=${TORCH:-torch==2.13.0}
guidellm_version=0.8.1
place=$(mktemp -d)
tools="$venv/guidellm"

if [ ! -x "$tools/bin/guidellm" ]; then
    "$venv/bin/python" -m venv "$tools"
    # torch first: guidellm would bring the newest, with gigabytes for GPUs.
    "$tools/bin/pip" install --quiet "$torch"
    "$tools/bin/pip" install --quiet "guidellm==$guidellm_version"
fi

"$venv/bin/genbatch" serve "$model" --http :0 --bind "ipc://$place/zeromq.sock" >"$place/log" 2>&1 &
service=$!
trap 'kill -TERM $service 2>/dev/null && wait $service || true; rm -rf "$place"' EXIT

until address=$(grep -o 'http://127\.0\.0\.1:[0-9]*' "$place/log" | head -1) && [ -n "$address" ]; do
    kill -0 $service 2>/dev/null || { cat "$place/log"; exit 1; }
    sleep 0.5
done

# The prompts are made of the model's own tokens, from the directory that the service runs.
tokenizer=$("$venv/bin/python" -c "
import sys
from genbatch.nif.models.model_source import resolve_model
print(resolve_model(sys.argv[1]).directory)" "$model")

HF_HUB_OFFLINE=1 "$tools/bin/guidellm" run \
    --backend "kind=openai_http,target=$address" \
    --profile "kind=concurrent,streams=$streams" \
    --constraint "kind=max_requests,count=$requests" \
    --data "kind=synthetic_text,prompt_tokens=64,output_tokens=32" \
    --tokenizer "kind=huggingface_auto,model=$tokenizer" \
    --output "kind=json,path=$place/report.json" --output kind=console \
    --disable-console-interactive

"$venv/bin/python" - "$place/report.json" <<'PYTHON'
import json
import sys

with open(sys.argv[1]) as file:
    benchmark = json.load(file)["benchmarks"][0]
totals = benchmark["metrics"]["request_totals"]
print("guidellm:", totals)
sys.exit(totals["errored"] > 0 or totals["successful"] == 0)
PYTHON
