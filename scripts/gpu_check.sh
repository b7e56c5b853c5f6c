#!/usr/bin/env bash
# Checks this project on a machine with an accelerator, in a few minutes and without a network:
#
#     scripts/gpu_check.sh [OUTPUT_FOLDER]
#
# Measures the peaks, runs the unit tests, trains every engine for a few steps on one rank and a small model in full, and
# prints one line per check at the end. Exit code 1 if one failed. The Python is the first of $PYTHON, .venv and python3;
# it needs this project's dependencies, and a torch that sees the accelerator.
set -uo pipefail
cd "$(dirname "$0")/.."
root=$PWD
out=${1:-gpu-check}
mkdir -p "$out"
out=$(cd "$out" && pwd)
python=${PYTHON:-}
if [ -z "$python" ]; then
    python=python3
    [ -x "$root/.venv/bin/python" ] && python=$root/.venv/bin/python
fi
export PYTHONPATH=$root/src${PYTHONPATH:+:$PYTHONPATH}
export TRAINING_XPU_CACHE=$out/cache TRAINING_XPU_RUNS=$out/runs
steps=${STEPS:-12}
summary=()
failed=0

ljperf() {
    "$python" -c 'import sys; from training_xpu.cli.main import run; sys.exit(run())' "$@"
}

# check NAME COMMAND...: its output goes to NAME.log, and what it printed last is shown.
check() {
    local name=$1 begun=$SECONDS status
    shift
    echo "== $name"
    "$@" >"$out/$name.log" 2>&1
    status=$?
    tail -n 12 "$out/$name.log"
    [ "$status" -eq 0 ] || failed=1
    summary+=("$(printf '%-24s exit %-3d %4d s' "$name" "$status" $((SECONDS - begun)))")
}

# A line of figures from the document of `ljperf benchmark --json`.
figures() {
    "$python" - "$1" <<'PYTHON'
import json, sys

try:
    document = json.load(open(sys.argv[1]))
except ValueError:
    sys.exit(0)
for arm in document["arms"]:
    rate, loss = arm["tokens_per_second_per_device"], arm["loss"]
    if rate is None:
        continue
    mfu = "no peak known" if arm["mfu"] is None else f"MFU {arm['mfu']:.1%}"
    fell = loss["eval_before"] is not None and loss["eval_after"] < loss["eval_before"]
    memory = arm["peak_memory_bytes"] or 0
    print(
        f"  {document['workload']} {document['scale']['kind']}: {rate['median']:,.0f} tokens/s/device, {mfu}, "
        f"peak {memory / 2**30:.2f} GiB, evaluation loss {'falls' if fell else 'DOES NOT FALL'}"
    )
PYTHON
}

benchmark() {
    local workload=$1
    shift
    local name=${workload//\//-}
    check "$name" ljperf_json "$out/$name.json" benchmark --model "$workload" --nproc 1 --steps "$steps" --json "$@"
    summary+=("$(figures "$out/$name.json")")
}

ljperf_json() {
    local document=$1
    shift
    ljperf "$@" >"$document"
}

accelerator() {
    "$python" -c 'import torch; a = torch.accelerator.current_accelerator(); print(torch.__version__, a); assert a, "none"'
}

check accelerator accelerator
check env ljperf env --measure
check models ljperf models
if "$python" -c 'import pytest' 2>/dev/null; then
    check unit-tests "$python" -m pytest -q --maxfail=5 -p no:cacheprovider tests/unit
else
    summary+=("unit-tests               left out: pytest is not installed")
fi
benchmark ddp/llama3.2-1b
benchmark fsdp/qwen3-8b
benchmark deepspeed/llama3-8b
benchmark transformers/llama3.2-1b
check train-and-resume bash -c 'set -e; '"$(declare -f ljperf)"'; python=$0; cd "$1"
    ljperf train --model ddp/llama3.2-1b --scale proxy --nproc 1 --steps 6 --save-every 3 --output trained
    ljperf train --resume trained/* --steps 8 --output resumed' "$python" "$out"

echo
echo "== summary ($out)"
printf '%s\n' "${summary[@]}"
exit "$failed"
