#!/usr/bin/env bash
# The tests of what runs on a GPU: one line for each part, and a total. Nothing is downloaded.
# Without a GPU the parts that need none run on the processor, and the others are named with what they need.
# Needs Python with torch and the packages of the extra [test]; further words go to pytest: `-k models`, `--junit-xml FILE`,
# `-n 12 --dist load` for many processes (with OMP_NUM_THREADS=1 and TORCHINDUCTOR_COMPILE_THREADS=1).
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" HF_HUB_OFFLINE=1
exec "${PYTHON:-python3}" -m pytest tests/gpu -m gpu -q -p no:cacheprovider -p no:benchmark "$@"
