#!/usr/bin/env bash
# Runs everything on one machine: `bash run.sh` trains (flags: `bash run.sh --help`), `bash run.sh test` runs the tests,
# `bash run.sh test --all` the long ones, too, and `bash run.sh COMMAND`, such as watch, is a command of apexrl.
set -euo pipefail
checkout="$(CDPATH='' cd -- "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")" && pwd)"
venv="${APEXRL_VENV:-$checkout/.venv}" # another place for a checkout that is read-only, or for several of them
case "$venv" in /*) ;; *) venv="$PWD/$venv" ;; esac

requirements="requirements.txt"
if [ "${1:-}" = test ]; then
  requirements="requirements-dev.txt"
  case " $* " in *" --all "*) requirements="requirements-all.txt" ;; esac
fi

mark="$venv/made-by-run.sh" # a directory with this file is ours to clear, for example after Ctrl-C; no other one is
make_environment() {
  local python=""
  for candidate in python3 python3.13 python3.12 python3.11 python; do
    if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      python=$candidate
      break
    fi
  done
  [ -n "$python" ] || { echo "run.sh: Python 3.11 or newer is needed" >&2; exit 1; }
  { mkdir -p "$venv" && [ -w "$venv" ]; } || { echo "run.sh: $venv cannot be written: give APEXRL_VENV=DIR, another directory" >&2; exit 1; }
  if ! [ -e "$mark" ] && [ -n "$(ls -A "$venv")" ]; then
    local found="has files, but no Python that runs" cure="empty this one"
    if [ -x "$venv/bin/python" ]; then found="is an environment without pip" cure="say $venv/bin/python -m ensurepip"; fi
    echo "run.sh: $venv $found: give APEXRL_VENV=DIR, a new directory, or $cure" >&2
    exit 1
  fi
  touch "$mark"
  find "$venv/" -mindepth 1 -maxdepth 1 ! -name "${mark##*/}" -exec rm -rf {} +
  "$python" -m venv "$venv" || { echo "run.sh: python's venv module is needed (Debian: apt install python3-venv)" >&2; exit 1; }
}

# PyPI's torch for Linux brings gigabytes of CUDA. Without an NVIDIA GPU the one from PyTorch's index for CPUs is taken,
# unless pip is told where to look for packages, or this machine does not reach the index.
cpu_index=https://download.pytorch.org/whl/cpu
choose_torch() {
  index=()
  if command -v nvidia-smi >/dev/null || [ "$(uname -s)" != Linux ]; then return; fi
  # Not `grep -q`, which ends before pip has written everything: by pipefail that would mean no.
  if "$venv/bin/python" -m pip config list 2>/dev/null | grep -E '(index-url|find-links|no-index)=' >/dev/null; then return; fi
  if "$venv/bin/python" -c 'import sys, urllib.request as r; r.urlopen(sys.argv[1], timeout=10)' "$cpu_index/torch/" 2>/dev/null; then
    echo "no NVIDIA GPU: torch comes without CUDA, from $cpu_index"
    index=(--extra-index-url "$cpu_index")
  else
    echo "no NVIDIA GPU, and $cpu_index cannot be reached: torch comes from PyPI, which may bring CUDA (3 GB)"
  fi
}

# The stamp keeps Python's version and the text of the installed requirements: a later start installs only after a change.
stamp="$venv/installed-$requirements"
wanted() { "$venv/bin/python" -V && cat "$checkout/requirements.txt" "$checkout/$requirements"; }
is_installed() { [ -x "$venv/bin/python" ] && cmp -s <(wanted) "$stamp"; }
if ! is_installed && mkdir -p "$venv" 2>/dev/null && command -v flock >/dev/null; then
  exec 9<"$venv" # one start installs, others wait for it, but where the file system has no such locks
  locked=0 && flock -n 9 || locked=$?
  if [ "$locked" = 1 ]; then
    echo "run.sh: another one installs into $venv: waiting for it"
    flock -w 3600 9 || { echo "run.sh: it did not end within an hour: stop it, or give APEXRL_VENV=DIR" >&2; exit 1; }
  fi
fi
if ! is_installed; then
  "$venv/bin/python" -m pip --version >/dev/null 2>&1 || make_environment
  echo "installing $requirements into $venv ..."
  choose_torch
  "$venv/bin/python" -m pip install --quiet --disable-pip-version-check "${index[@]}" --requirement "$checkout/$requirements"
  [ "$requirements" = requirements.txt ] || (cd "$checkout" && "$venv/bin/python" -m tests.deploy.tools)
  wanted >"$stamp"
fi
exec 9<&- # a run holds no lock
# The environment's Python, a notebook's too, finds the package of the checkout that was used last: this one may be a
# copy, or have moved. An environment that is shared may be read-only.
for packages in "$venv"/lib/python3.*/site-packages; do
  if [ -w "$packages" ] && [ "$(cat "$packages/apexrl.pth" 2>/dev/null)" != "$checkout" ]; then
    echo "$checkout" >"$packages/apexrl.pth"
  fi
done

case "${1:-}" in
  test)
    shift
    cd "$checkout"
    exec "$venv/bin/python" -m pytest "$@"
    ;;
  --version) ;;
  "" | -*) set -- train "$@" ;;
esac
# The run works in the directory of its caller. -P: no file there takes the place of one of ours.
export PYTHONPATH="$checkout${PYTHONPATH:+:$PYTHONPATH}"
APEXRL_PROGRAM="bash $(printf %q "$0")" exec "$venv/bin/python" -P -m apexrl "$@"
