#!/usr/bin/env bash
# make_venv.sh DIRECTORY LOCK VARIABLE VERSION...: make the virtual environment DIRECTORY, or bring it up to date, so that
# it holds what LOCK lists. VARIABLE and VERSIONs choose the Python (find_python.sh). Says every few seconds how far it is;
# pip's own account goes to .cache/<DIRECTORY>.pip.log. DIRECTORY/.stamp, written by the caller at the end, holds the
# checkout's path: an environment made elsewhere (a copied checkout) is made anew.
set -euo pipefail
directory=$1 lock=$2
shift 2
mkdir -p .cache
log=.cache/$directory.pip.log
total=$(grep -c == "$lock")

exec 9>".cache/$directory.lock"
flock --nonblock 9 || { echo "    $directory: waiting for another make that works on it"; flock 9; }

if ! "$directory/bin/python" -m pip --version >/dev/null 2>&1 ||
    { [ -s "$directory/.stamp" ] && [ "$(cat "$directory/.stamp")" != "$PWD" ]; }; then
  python=$("$(dirname "$0")/find_python.sh" "$@")
  echo "    $directory: new, from $("$python" -V) at $python"
  "$python" -m venv --clear "$directory"
fi

progress() {
  trap 'kill $!; exit' TERM  # with its sleep, which would keep the terminal or pipe open
  while sleep 8 & wait $!; do
    # Every installed distribution has a .dist-info; pip names each one when it has found it.
    found=$(grep -cE '^(Collecting|Processing|Requirement already)' "$log" || true)
    there=$(find "$directory"/lib/python*/site-packages -maxdepth 1 -name '*.dist-info' | wc -l)
    echo "    $directory: ${SECONDS}s, $found of $total packages fetched, $((there > total ? total : there)) installed"
  done
}
: >"$log"
progress 9>&- &
trap 'kill $! 2>/dev/null || true' EXIT

if ! "$directory/bin/python" -m pip install --no-deps --no-input --progress-bar off --disable-pip-version-check \
    ${TORCH_INDEX_URL:+--extra-index-url "$TORCH_INDEX_URL"} -r "$lock" >>"$log" 2>&1; then
  tail -n 15 "$log" >&2
  echo "error: pip failed; all it said is in $log" >&2
  if grep -q 'No matching distribution.*torch==' "$log"; then
    echo "pip has no CPU build of torch here; name an index that has it: make TORCH_INDEX_URL=… (requirements/README.md)" >&2
  fi
  exit 1
fi
echo "    $directory: $total packages, ${SECONDS}s"
