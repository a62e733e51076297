#!/bin/sh
# A torch upgrade: does the program compute the same with the new version, up to its own noise?
# sh torch_upgrade.sh OLD_PYTHON NEW_PYTHON train.py [WORDS]...: two environments, both with this package installed.
set -eu
old=$1 new=$2
shift 2
"$old" -m checked_backend record --out recording-old -- "$old" "$@"
"$new" -m checked_backend record --out recording-new --noise-runs 0 -- "$new" "$@"
"$new" -m checked_backend compare recording-old recording-new --html compare.html
