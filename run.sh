#!/usr/bin/env bash
# Runs everything on one machine: `bash run.sh` trains (flags: `bash run.sh --help`), `bash run.sh test` runs the tests.
set -euo pipefail
checkout="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
venv="$checkout/.venv"

requirements="requirements.txt"
[ "${1:-}" = test ] && requirements="requirements-dev.txt"

if [ ! -x "$venv/bin/python" ]; then
  python=""
  for candidate in python3 python3.13 python3.12 python3.11 python; do
    if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      python=$candidate
      break
    fi
  done
  [ -n "$python" ] || { echo "run.sh: Python 3.11 or newer is needed" >&2; exit 1; }
  "$python" -m venv "$venv" || { echo "run.sh: python's venv module is needed (Debian: apt install python3-venv)" >&2; rm -rf "$venv"; exit 1; }
fi

# The stamp keeps the text of the installed requirements, so a later start installs again only after a change.
stamp="$venv/installed-$requirements"
if ! cmp -s <(cat "$checkout/requirements.txt" "$checkout/$requirements") "$stamp"; then
  echo "installing $requirements into $venv ..."
  "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --requirement "$checkout/$requirements"
  cat "$checkout/requirements.txt" "$checkout/$requirements" >"$stamp"
fi

if [ "${1:-}" = test ]; then
  shift
  cd "$checkout"
  exec "$venv/bin/python" -m pytest "$@"
fi
# The run works in the directory of its caller. -P: no file there takes the place of one of ours.
export PYTHONPATH="$checkout${PYTHONPATH:+:$PYTHONPATH}"
exec "$venv/bin/python" -P -m apexrl.running.launch "$@"
