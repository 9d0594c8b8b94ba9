#!/usr/bin/env bash
# Runs a config on this machine: launchers/local.sh CONFIG [dotted.key=value ...]
# `mar train` starts the trainer's ranks with torchrun; rank 0 starts everything else through Ray.
set -euo pipefail
root="$(cd "$(dirname "$(realpath "${BASH_SOURCE[0]}")")/.." && pwd)"
venv="${VENV:-.venv}"
[[ "$venv" == /* ]] || venv="$root/$venv"
[[ ! -d "$venv/bin" ]] || PATH="$venv/bin:$PATH"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
exec mar train "$@"
