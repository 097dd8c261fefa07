#!/usr/bin/env bash
# Runs everything on one machine: `bash run.sh` trains (flags: `bash run.sh --help`), `bash run.sh test` runs the tests.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

requirements="requirements.txt"
[ "${1:-}" = test ] && requirements="requirements-dev.txt"

if [ -x .venv/bin/python ]; then
  python=.venv/bin/python
else
  python=""
  for candidate in python3 python3.13 python3.12 python3.11 python; do
    if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      python=$candidate
      break
    fi
  done
  [ -n "$python" ] || { echo "run.sh: Python 3.11 or newer is needed" >&2; exit 1; }
  "$python" -m venv .venv || { echo "run.sh: python's venv module is needed (Debian: apt install python3-venv)" >&2; rm -rf .venv; exit 1; }
fi

# The stamp keeps the text of the installed requirements, so a later start installs again only after a change.
stamp=.venv/installed-$requirements
if ! cmp -s <(cat requirements.txt "$requirements") "$stamp"; then
  echo "installing $requirements into .venv ..."
  .venv/bin/python -m pip install --quiet --disable-pip-version-check --requirement "$requirements"
  cat requirements.txt "$requirements" >"$stamp"
fi

if [ "${1:-}" = test ]; then
  shift
  exec .venv/bin/python -m pytest "$@"
fi
exec .venv/bin/python -m apexrl.running.launch "$@"
