#!/usr/bin/env bash
# What only a GPU can show, within eight minutes on one: identity to the bit, and how fast steps are and why.
#
#   benchmarks/gpu.sh [MODEL]        default: the bundled smollm2-135m
#
# PYTHON names the interpreter (default: .venv/bin/python where it is there, else python3), OUT the folder for the JSON
# files (default: a new one in /tmp). Ends with 0 where all held, 1 where something failed, 2 where torch sees no GPU.
set -euo pipefail

cd "$(dirname "$0")/.."
model=${1:-smollm2-135m}
default_python=python3
[[ -x .venv/bin/python ]] && default_python=.venv/bin/python
python=${PYTHON:-$default_python}
out=${OUT:-$(mktemp -d)}
mkdir -p "$out"
deadline=$((SECONDS + 470))
failed=0
summary=()

gpu=$("$python" -c 'import torch; print(torch.cuda.get_device_name() if torch.cuda.is_available() else "")')
if [[ -z $gpu ]]; then
    echo "benchmarks/gpu.sh: torch sees no GPU here; run it on a machine with an NVIDIA GPU and a CUDA build of torch" >&2
    exit 2
fi
echo "GPU: $gpu; model: $model; results in $out"

# part NAME SECONDS COMMAND...: one part within its time and what is left of the eight minutes; its output is kept.
part() {
    local name=$1 limit=$2 left=$((deadline - SECONDS)) code=0 started=$SECONDS
    shift 2
    if ((left < 10)); then
        summary+=("left out  $name: no time was left")
        failed=1
        return
    fi
    ((limit > left)) && limit=$left
    printf '\n== %s ==\n' "$name"
    timeout --kill-after=5 "$limit" "$@" 2>&1 | tee "$out/$name.log" || code=$?
    case $code in
        0) summary+=("held      $name ($((SECONDS - started)) s)") ;;
        124 | 137) summary+=("STOPPED   $name: killed, or beyond its $limit s") && failed=1 ;;
        *) summary+=("FAILED    $name: code $code, see $out/$name.log") && failed=1 ;;
    esac
}

# Captured passes against uncaptured ones, on tiny models of several architectures.
part tests 100 "$python" -m pytest tests/test_static.py -q -p no:cacheprovider -k gpu

# Bitwise: random draft lengths and reuse against plain decoding, and rows among 1 to 9; ends with 1 at any difference.
part identity-bitwise 110 "$python" -m benchmarks identity --target "$model" --device cuda --precision bf16 \
    --exact bitwise --requests 24 --tokens 12000 --rows 16 --json "$out/identity-bitwise.json"

# One graph for each bucket of rows: how often rounding turns a token. A count, no promise.
part identity-off 80 "$python" -m benchmarks identity --target "$model" --device cuda --precision bf16 \
    --exact off --requests 24 --tokens 8000 --rows 8 --json "$out/identity-off.json"

# transformers' generate beside ours; v(k); the plain step beside the bound that memory sets.
for exact in off bitwise; do
    part "engine-$exact" 100 "$python" -m benchmarks engine --target "$model" --device cuda --precisions bf16 \
        --exact "$exact" --controllers plain fixed:2 fixed:4 fixed:8 heuristic --policies \
        --requests 6 --json "$out/engine-$exact.json"
done

printf '\n== summary: %s, %s, %d s ==\n' "$gpu" "$model" "$SECONDS"
printf '%s\n' "${summary[@]}"
"$python" - "$out" <<'PYTHON'
import json
import sys
from pathlib import Path

for path in sorted(Path(sys.argv[1]).glob("*.json")):
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        continue
    for key, value in sorted(document.items()):
        text = json.dumps(value)
        print(f"{path.stem}.{key}: {text if len(text) <= 400 else text[:400] + ' ...'}")
PYTHON
exit "$failed"
