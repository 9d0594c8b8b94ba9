#!/usr/bin/env bash
# One machine's share of a run over several: launchers/torchrun_multinode.sh CONFIG [dotted.key=value ...]
# The same command on every machine. They are told apart by the environment, with the names that torchrun's jobs have:
#   NNODES         machines in all
#   NODE_RANK      number of this one, from 0
#   MASTER_ADDR    machine 0, as the others reach it
#   MASTER_PORT    a free port on it (29500)
#   TRAINER_NODES  machines that have trainer ranks, the first ones (all); the others have engines alone
#   RAY_PORT       a second free port on machine 0 (6379), where there are machines of engines alone
#   RESTARTS       how often a run that failed is started again, from its last checkpoint (3)
#   START_S        how long a machine of engines waits for machine 0, in seconds (600)
#   REJOIN_S       how long it waits for machine 0 to come again, once it is gone (60)
# Exit code: that of `mar train` (0 finished, 1 failed, 2 refused, 130 stopped); on a machine of engines 0 once the run is over.
set -euo pipefail

refuse() {
  echo "torchrun_multinode.sh: $1" >&2
  exit 2
}
number() { # NAME: a whole number in the environment
  [[ "${!1}" =~ ^[0-9]+$ ]] || refuse "$1=${!1} is not a whole number"
}

[[ $# -gt 0 ]] || refuse "no CONFIG given"
[[ -n "${NNODES:-}" ]] || refuse "NNODES is not set: the number of machines"
[[ -n "${NODE_RANK:-}" ]] || refuse "NODE_RANK is not set: the number of this machine, from 0"
[[ -n "${MASTER_ADDR:-}" ]] || refuse "MASTER_ADDR is not set: machine 0, as the others reach it"
export MASTER_PORT="${MASTER_PORT:-29500}"
TRAINER_NODES="${TRAINER_NODES:-$NNODES}" RAY_PORT="${RAY_PORT:-6379}" RESTARTS="${RESTARTS:-3}" START_S="${START_S:-600}" REJOIN_S="${REJOIN_S:-60}"
for name in NNODES NODE_RANK MASTER_PORT TRAINER_NODES RAY_PORT RESTARTS START_S REJOIN_S; do number "$name"; done
((NODE_RANK < NNODES)) || refuse "NODE_RANK=$NODE_RANK, but the last of $NNODES machines is number $((NNODES - 1))"
((TRAINER_NODES >= 1 && TRAINER_NODES <= NNODES)) || refuse "TRAINER_NODES=$TRAINER_NODES is not between 1 and NNODES=$NNODES"

root="$(cd "$(dirname "$(realpath "${BASH_SOURCE[0]}")")/.." && pwd)"
venv="${VENV:-.venv}"
[[ "$venv" == /* ]] || venv="$root/$venv"
[[ ! -d "$venv/bin" ]] || PATH="$venv/bin:$PATH" # in an image they are on PATH already
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" RAY_worker_niceness=0
# A token of one machine opens no other; a cluster's network is its own.
export RAY_AUTH_MODE="${RAY_AUTH_MODE:-disabled}"

reachable() { # HOST: its Ray answers
  (exec 3<>"/dev/tcp/$1/$RAY_PORT") 2>/dev/null
}

ray=()
stop_ray() {
  if ((${#ray[@]})); then
    kill -TERM "${ray[@]}" 2>/dev/null || true
    wait "${ray[@]}" 2>/dev/null || true
    ray=()
  fi
}
trap stop_ray EXIT

if ((NODE_RANK >= TRAINER_NODES)); then
  # As numbers: Ray asks a name server for a name, also where /etc/hosts has it.
  read -r address _ < <(getent ahostsv4 "$MASTER_ADDR") || refuse "MASTER_ADDR=$MASTER_ADDR is no machine that machine $NODE_RANK knows"
  # Engines alone: this machine works as long as machine 0 has a Ray, and for the next one if it comes again.
  trap 'exit 143' TERM
  trap 'exit 130' INT
  # What an engine that was killed here leaves: only the next one would remove it.
  trap 'stop_ray; python -m megatron_async_rl.weights.stale_files || true' EXIT
  within=$START_S found=""
  while :; do
    until=$((SECONDS + within))
    until reachable "$MASTER_ADDR"; do
      if ((SECONDS >= until)); then
        [[ -n "$found" ]] || refuse "no Ray at MASTER_ADDR:RAY_PORT=$MASTER_ADDR:$RAY_PORT after START_S=$START_S s; is machine 0 started, and the port open?"
        echo "torchrun_multinode.sh: machine 0's Ray has ended, and with it the work of machine $NODE_RANK"
        exit 0
      fi
      sleep 1
    done
    ray start --address="$address:$RAY_PORT" --disable-usage-stats --block &
    ray=($!)
    wait "${ray[0]}" || true
    ray=()
    if reachable "$MASTER_ADDR"; then
      echo "torchrun_multinode.sh: Ray has ended on machine $NODE_RANK, and not on machine 0; its words are above" >&2
      exit 1
    fi
    found=1 within=$REJOIN_S
  done
fi

if ((NODE_RANK == 0 && TRAINER_NODES < NNODES)); then
  ray start --head --port="$RAY_PORT" --include-dashboard=false --disable-usage-stats --block &
  ray=($!)
  until reachable 127.0.0.1; do
    kill -0 "${ray[0]}" 2>/dev/null || refuse "Ray does not start on port RAY_PORT=$RAY_PORT; its words are above"
    sleep 1
  done
  export RAY_ADDRESS="127.0.0.1:$RAY_PORT"
fi

train() {
  if ((TRAINER_NODES > 1)); then
    set -- "$@" --nnodes "$TRAINER_NODES" --node-rank "$NODE_RANK" --rdzv-endpoint "$MASTER_ADDR:$MASTER_PORT"
  fi
  # Once: a machine that is lost later costs its engines, and not the start after.
  if ((NODE_RANK == 0 && TRAINER_NODES < NNODES && start == 0)); then
    set -- "$@" --engine-nodes "$((NNODES - TRAINER_NODES))"
  fi
  mar train "$@" &
  local child=$! code=0 signalled
  # A scheduler's SIGTERM and a Ctrl-C are for the run: it stops after the step, with a checkpoint.
  trap 'signalled=1 stopping=1; kill -TERM "$child" 2>/dev/null || true' TERM INT
  while :; do
    signalled="" code=0
    wait "$child" || code=$?
    [[ -n "$signalled" ]] || return "$code" # else the signal ended the wait, not the run
  done
}

stopping=""
for ((start = 0; ; start++)); do
  code=0
  train "$@" || code=$?
  # 1: it failed. 0: finished; 2: refused, which it would be again; 130: stopped by somebody.
  ((code == 1)) && [[ -z "$stopping" ]] || exit "$code"
  ((start < RESTARTS)) || { echo "torchrun_multinode.sh: failed $((RESTARTS + 1)) times; RESTARTS=$RESTARTS" >&2; exit 1; }
  echo "torchrun_multinode.sh: machine $NODE_RANK starts the run again from its last checkpoint ($((start + 1)) of RESTARTS=$RESTARTS)" >&2
done
