#!/usr/bin/env bash
# Installs an sdist or a wheel into a new environment, away from the checkout, and uses it as a newcomer would:
#   check_install.sh FILE with|without     (kernels; the interpreter is $PYTHON)
set -euo pipefail
file=$(realpath "$1")
root=$(realpath "$(dirname "$0")/..")
room=$(mktemp -d)
trap 'rm -rf "$room"' EXIT
cd "$room"
"${PYTHON:-python3}" -m venv venv
export PATH="$room/venv/bin:$PATH"
pip install --quiet "$file[models]" -c "$root/constraints.txt"

python - "$2" <<'CHECK'
import sys
from dla.ops.cpu.library import missing
assert (missing() is None) == (sys.argv[1] == "with"), missing()
CHECK
dla --version
dla --help
dla info
dla info mamba2-mini

# The README's example of the operator, and a tiny model that transformers finds by itself.
sed '1,/^```python$/d;/^```$/,$d' "$root/README.md" >example.py
grep -q dynamic_linear_attention example.py
python example.py
python -c 'from dla.models import DLAForCausalLM, preset; DLAForCausalLM(preset("mamba2-tiny", "dynamic")).save_pretrained("tiny")'
python -c 'from transformers import AutoModelForCausalLM as auto; print(type(auto.from_pretrained("tiny")).__name__)'
dla generate tiny --prompt "The memory" --max-new-tokens 8
