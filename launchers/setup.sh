#!/usr/bin/env bash
# Create the CPU environment in $VENV (default: .venv of the checkout) from requirements/, again only if that folder changes.
# Needs Python 3.12 with venv, and a package index. PYTHON selects the interpreter, TORCH_CPU_INDEX a mirror of
# PyTorch's index of CPU wheels; an empty DEV omits packages that only tests and lint need.
set -euo pipefail
cd "$(dirname "$(realpath "${BASH_SOURCE[0]}")")/.."
VENV="${VENV:-.venv}"
TORCH_CPU_INDEX="${TORCH_CPU_INDEX:-https://download.pytorch.org/whl/cpu}"

is_fit() { # true if the lock was made for this interpreter, and it can make an environment
  "$1" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info[:2] != (3, 12))' 2>/dev/null
}

find_python() {
  if [[ -n "${PYTHON:-}" ]]; then
    is_fit "$PYTHON" && echo "$PYTHON" && return
    echo "setup: PYTHON=$PYTHON is not Python 3.12 with venv and ensurepip" >&2
    return 1
  fi
  # pyenv has a shim for every installed version, which fails for inactive ones, so its own folders are searched, too.
  local candidate
  for candidate in python3.12 python3 python "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.12*/bin/python; do
    is_fit "$candidate" && echo "$candidate" && return
  done
  cat >&2 <<MESSAGE
setup: no Python 3.12 with venv and ensurepip found: looked for python3.12, python3 and python on PATH, and in pyenv's folder.
Megatron-Core 0.19 needs it. Install it, and try again:
  apt install python3.12 python3.12-venv               Ubuntu 24.04
  uv python install 3.12                               elsewhere, without root
or name it: make setup PYTHON=/path/to/python3.12
MESSAGE
  return 1
}

key="$(cat requirements/cpu.txt requirements/dev.txt requirements/nvidia.txt requirements/tasks.txt setup.py | sha256sum | cut -c1-16)"
ready="$VENV/.ready-$key" dev=(-r requirements/dev.txt)
if [[ -z "${DEV-yes}" ]]; then
  ready+=-without-dev dev=()
fi
if [[ -f "$ready" && "$(cat "$ready")" == "$PWD" && -x "$VENV/bin/python" ]]; then
  exit 0
fi

python="$(find_python)"
echo "Setting up $VENV with $("$python" --version) (once, a few minutes)"
made="$VENV/.made-by-setup"
# The next command empties the folder, so it must be one of this script.
if [[ -e "$VENV" && ! -e "$made" && -n "$(ls -A "$VENV")" ]] && ! compgen -G "$VENV/.ready-*" >/dev/null; then
  echo "setup: $VENV exists and was not made by this script. Name a new folder, make setup VENV=/path/to/new/folder, or remove it" >&2
  exit 1
fi
"$python" -m venv --clear --without-pip "$VENV"
touch "$made" # before pip, which takes seconds: an interrupted set-up may begin again
"$python" -m venv "$VENV"
trap 'exit 130' INT # a Ctrl-C that pip handles must not lead to the next step
trap 'exit 143' TERM
pip=("$VENV/bin/python" -m pip -qq --disable-pip-version-check --no-input install --no-deps --progress-bar off)
# uv fetches and unpacks in parallel, which pip does not. Its cache is on the environment's file system, so that files are linked
# instead of copied, and goes at the end.
cache="$VENV/.uv-cache"
uv=("$VENV/bin/python" -m uv pip install --quiet --no-deps --python "$VENV/bin/python" --index-strategy unsafe-best-match --cache-dir "$cache")
[[ -n "${PIP_NO_COMPILE:-}" ]] || uv+=(--compile-bytecode)
with_uv() { # whether uv can replace pip here: it is installed, and pip has no setting that it lacks
  "${pip[@]}" "$(grep '^uv==' requirements/cpu.txt)" || return
  local variables
  variables="$("$VENV/bin/python" -m pip config list | "$VENV/bin/python" launchers/uv_settings.py)" || return
  local line
  while IFS= read -r line; do
    [[ -z "$line" ]] || export "${line?}"
  done <<<"$variables"
}
install() {
  if [[ -n "${uv:-}" ]]; then
    "${uv[@]}" "$@" >>"$VENV/uv.log" 2>&1 && return
    echo "uv failed (its output: $VENV/uv.log); continuing with pip, which takes longer"
    uv=()
  fi
  "${pip[@]}" "$@"
}
with_uv 2>"$VENV/uv.log" || uv=()
torch="$(grep '^torch==' requirements/cpu.txt)"
from_cpu_index=(--index-url "$TORCH_CPU_INDEX")
quickly=(--timeout 10 --retries 1) # an index that is out of reach must not hold up the set-up
require_disk() { # gigabytes that the environment takes; a full disk would end the set-up minutes later
  local free
  free="$(df -P -B 1000000 "$VENV" 2>/dev/null | sed -n '2s/.* \([0-9]*\)  *[0-9]*% .*/\1/p' || true)"
  if [[ -n "$free" ]] && ((free < $1 * 1000)); then
    cat >&2 <<MESSAGE
setup: $VENV needs $1 GB, and its disk has $((free / 1000)).$((free % 1000 / 100)) GB free.
Free space there, or name a new folder on a larger disk: make setup VENV=/path/to/new/folder
MESSAGE
    exit 1
  fi
}
served() { # torch's CPU build, by pip's own sources or with more arguments; nothing is installed
  "${pip[@]}" --dry-run "$@" "$torch" >"$VENV/torch.log" 2>&1
}
if served; then
  require_disk 5
  install "$torch"
elif served "${quickly[@]}" "${from_cpu_index[@]}"; then
  require_disk 5
  "${pip[@]}" "${from_cpu_index[@]}" "$torch" # a variable of uv for the index would precede this option
else
  cat <<MESSAGE
Neither pip's configured index nor $TORCH_CPU_INDEX has $torch (pip's output: $VENV/torch.log).
Installing the standard build of torch instead. It runs on a CPU, too, but needs $(grep -c '==' requirements/nvidia.txt) NVIDIA libraries:
2.1 GB more to download and 3 GB more on disk. TORCH_CPU_INDEX=URL selects a mirror that has the CPU build.
MESSAGE
  require_disk 8
  install "${torch%+cpu}" -r requirements/nvidia.txt
fi
grep -vE '^(torch|uv)==' requirements/cpu.txt >"$VENV/others.txt"
install -r "$VENV/others.txt" "${dev[@]}"
# Optional: one package is compiled, and a machine may have no compiler.
install -r requirements/tasks.txt ||
  echo "setup: reasoning-gym is not installed (its package pycosat needs a C compiler); data.train: reasoning_gym:TASK needs it."
install --no-build-isolation --editable .
rm -rf "$cache"
pwd > "$ready"
echo "Set-up of $VENV is complete. To use the command mar in a shell: source $VENV/bin/activate"
