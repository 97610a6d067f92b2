#!/usr/bin/env bash
# find_python.sh VARIABLE VERSION...: print the path of a Python of one of the VERSIONs, earlier ones preferred.
# The environment variable called VARIABLE, when set, is the answer. Candidates are run, not just looked up: a shim of
# pyenv is on PATH for versions that it then refuses to start.
set -euo pipefail
variable=$1
shift
if [ -n "${!variable:-}" ]; then
  command -v "${!variable}" && exit
  echo "error: $variable=${!variable} is not a program" >&2
  exit 1
fi
for version in "$@"; do
  for candidate in $(type -ap "python$version") "${PYENV_ROOT:-$HOME/.pyenv}/versions/$version".*/bin/python; do
    # Not one of a virtual environment: it may be the one that is about to be made again.
    if "$candidate" -c "import sys; sys.exit(sys.prefix != sys.base_prefix or '%d.%d' % sys.version_info[:2] != '$version')" \
        2>/dev/null && "$candidate" -c 'import ensurepip, venv' 2>/dev/null; then
      echo "$candidate"
      exit
    fi
  done
done
echo "error: no Python $(IFS=/; echo "$*") with venv here; install one, or name it: make $variable=/path/to/python …" >&2
exit 1
