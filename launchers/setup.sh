#!/usr/bin/env bash
# Makes the CPU environment in $VENV (default: .venv of the checkout) from requirements/, once per content of that folder.
# Needs Python 3.11 or newer with venv, and a package registry. PYTHON chooses the interpreter.
set -euo pipefail
cd "$(dirname "$(realpath "${BASH_SOURCE[0]}")")/.."
VENV="${VENV:-.venv}"
TORCH_CPU_INDEX="https://download.pytorch.org/whl/cpu"

find_python() {
  local candidate
  for candidate in ${PYTHON:+"$PYTHON"} python3.11 python3.12 python3.13 python3; do
    if "$candidate" -c 'import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' 2>/dev/null; then
      echo "$candidate"
      return
    fi
  done
  echo "setup: no Python 3.11 to 3.13 with venv and ensurepip found; install python3.11 and python3.11-venv, or set PYTHON" >&2
  return 1
}

key="$(cat requirements/cpu.txt requirements/dev.txt setup.py | sha256sum | cut -c1-16)"
ready="$VENV/.ready-$key"
if [[ -f "$ready" && "$(cat "$ready")" == "$PWD" && -x "$VENV/bin/python" ]]; then
  exit 0
fi

python="$(find_python)"
echo "Setting up $VENV with $("$python" --version) (once, about two minutes)"
"$python" -m venv --clear "$VENV"
pip=("$VENV/bin/python" -m pip -qq --disable-pip-version-check --no-input install --no-deps --progress-bar off)
torch="$(grep '^torch==' requirements/cpu.txt)"
if ! "${pip[@]}" "$torch" 2>"$VENV/torch.log"; then
  "${pip[@]}" --index-url "$TORCH_CPU_INDEX" "$torch" || { cat "$VENV/torch.log" >&2; exit 1; }
fi
"${pip[@]}" -r requirements/cpu.txt -r requirements/dev.txt
"${pip[@]}" --no-build-isolation --editable .
pwd > "$ready"
