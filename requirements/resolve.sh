#!/usr/bin/env bash
# resolve.sh: resolve requirements/*.in in new environments and write requirements/*.lock from them (`make lock`).
set -euo pipefail
here=$(dirname "$0")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

resolve() { # NAME VARIABLE VERSION...
  local name=$1 python alone="$here/$1-alone.in" sources=("$here/$1.in")
  shift
  python=$("$here/find_python.sh" "$@")
  "$python" -m venv "$work/$name"
  local pip=("$work/$name/bin/python" -m pip install --disable-pip-version-check)
  "${pip[@]}" ${TORCH_INDEX_URL:+--extra-index-url "$TORCH_INDEX_URL"} -r "${sources[0]}"
  if [ -e "$alone" ]; then
    "${pip[@]}" --no-deps -r "$alone"
    sources+=("$alone")
  fi
  "$work/$name/bin/python" "$here/lock.py" "$here/$name.lock" "${sources[@]}"
}

resolve engine PYTHON 3.11
resolve gym PYTHON_GYM 3.13 3.12
