#!/usr/bin/env bash
# The part of a multi-machine run that belongs to this machine:
#   launchers/torchrun_multinode.sh CONFIG [dotted.key=value ...]
# Run the same command on every machine. The environment distinguishes them, with torchrun's names:
#   NNODES         number of machines
#   NODE_RANK      number of this machine, from 0
#   MASTER_ADDR    address of machine 0, the head node, as the others reach it
#   MASTER_PORT    a free port on the head node (29500)
#   TRAINER_NODES  number of machines with trainer ranks, the first ones (all); the others are rollout nodes
#   RAY_PORT       a second free port on the head node (6379), used if there are rollout nodes
#   RESTARTS       restarts of a failed run from its last checkpoint; on a rollout node restarts of Ray (3)
#   START_S        seconds for Ray to start on the head node, and for a rollout node to wait for it (600)
#   REJOIN_S       seconds for which a rollout node waits for a new Ray on the head node after Ray has ended (120)
#   RAY_AUTH_TOKEN a secret, the same on all machines, needed if there are rollout nodes: without it anyone who reaches
#                  Ray's ports can run code as this user (openssl rand -hex 32); RAY_AUTH_TOKEN_PATH names a file with it
# Exit code: that of `mar train` (0 finished, 1 failed, 2 refused, 130 stopped); on a rollout node 0 once the run is over.
set -euo pipefail

refuse() {
  echo "torchrun_multinode.sh: $1" >&2
  exit 2
}
number() { # NAME MIN MAX: a whole number in the environment
  [[ "${!1}" =~ ^[0-9]{1,9}$ ]] || refuse "$1=${!1} is not a whole number"
  printf -v "$1" %d "$((10#${!1}))" # bash reads a number with a leading zero as octal
  ((${!1} >= $2 && ${!1} <= $3)) || refuse "$1=${!1} is not between $2 and $3"
}

[[ $# -gt 0 ]] || refuse "no CONFIG given"
[[ -n "${NNODES:-}" ]] || refuse "NNODES is not set: the number of machines"
[[ -n "${NODE_RANK:-}" ]] || refuse "NODE_RANK is not set: the number of this machine, from 0"
[[ -n "${MASTER_ADDR:-}" ]] || refuse "MASTER_ADDR is not set: machine 0, as the others reach it"
export MASTER_PORT="${MASTER_PORT:-29500}"
TRAINER_NODES="${TRAINER_NODES:-$NNODES}" RAY_PORT="${RAY_PORT:-6379}" RESTARTS="${RESTARTS:-3}" START_S="${START_S:-600}" REJOIN_S="${REJOIN_S:-120}"
number NNODES 1 999999999
for name in NODE_RANK TRAINER_NODES RESTARTS START_S REJOIN_S; do number "$name" 0 999999999; done
for name in MASTER_PORT RAY_PORT; do number "$name" 1 65535; done
((NODE_RANK < NNODES)) || refuse "NODE_RANK=$NODE_RANK, but the last of $NNODES machines is number $((NNODES - 1))"
((TRAINER_NODES >= 1 && TRAINER_NODES <= NNODES)) || refuse "TRAINER_NODES=$TRAINER_NODES is not between 1 and NNODES=$NNODES"
((TRAINER_NODES == NNODES || MASTER_PORT != RAY_PORT)) || refuse "MASTER_PORT and RAY_PORT are both $RAY_PORT: give each a port of its own"

root="$(cd "$(dirname "$(realpath "${BASH_SOURCE[0]}")")/.." && pwd)"
venv="${VENV:-.venv}"
[[ "$venv" == /* ]] || venv="$root/$venv"
[[ ! -d "$venv/bin" ]] || PATH="$venv/bin:$PATH" # in an image they are on PATH already
for command in mar ray; do
  [[ -n "$(command -v "$command")" ]] || refuse "there is no command $command in $venv/bin, nor on PATH: make the environment (make setup), or name it with VENV"
done
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" RAY_worker_niceness=0
[[ -n "${RAY_AUTH_TOKEN:-}" ]] || unset RAY_AUTH_TOKEN # Ray would use an empty value as a token
folder=""
if ((TRAINER_NODES < NNODES)); then # Ray listens at all addresses of these machines: it has no setting to listen at one
  if [[ -n "${RAY_AUTH_TOKEN:-}${RAY_AUTH_TOKEN_PATH:-}" ]]; then
    export RAY_AUTH_MODE="${RAY_AUTH_MODE:-token}"
  elif [[ -z "${RAY_AUTH_MODE:-}" ]]; then
    export RAY_AUTH_MODE=disabled # a token that Ray generates on one machine is not valid on the others
    echo "torchrun_multinode.sh: note: without RAY_AUTH_TOKEN anyone who reaches Ray's ports on this machine can run code as $(id -un): set the same secret on all machines, or keep their network private" >&2
  fi
fi

reachable() { # HOST: a process accepts connections on Ray's port; a lost host does not reply
  timeout 5 bash -c "exec 3<>/dev/tcp/$1/$RAY_PORT" 2>/dev/null
}

over() { # HOST: the host replies, and no process listens on Ray's port. bash has no error number for that; if its message differs, Ray detects the end by itself
  [[ "$(LC_ALL=C timeout 5 bash -c "exec 3<>/dev/tcp/$1/$RAY_PORT" 2>&1)" == *"Connection refused"* ]]
}

# Ray and the run have separate sessions, so that signals to the process group reach this script only.
ray=()
ray_runs() {
  ((${#ray[@]})) && kill -0 "${ray[0]}" 2>/dev/null
}
stop_ray() { # it drains for up to 30 s, and may lose a signal that comes while it starts
  local fifths
  for ((fifths = 0; fifths < 350; fifths++)); do
    ray_runs || return 0
    ((fifths % 175)) || kill -TERM "${ray[0]}" 2>/dev/null || true
    sleep 0.2
  done
  kill -KILL -- "-${ray[0]}" 2>/dev/null || true # its session, with all processes that it has started
}
# Folder of Ray's session, removed at the end, or at the next start if the launcher was killed. Ray holds the lock on it, too.
make_folder() {
  local base="${RAY_TMPDIR:-${TMPDIR:-/tmp}}" new
  ((${#base} <= 26)) || base=/tmp # sockets have paths of at most 107 bytes (watchdog/run_folder.py)
  new="$(mktemp -d "$base/.mar-XXXXXXXX")" || refuse "no temporary folder can be made in $base (RAY_TMPDIR, TMPDIR)"
  exec {lock}>"$new/.megatron_async_rl"
  flock -n "$lock" || true # without locks, the folder never counts as a killed launcher's
  folder="$base/mar-$(od -An -N4 -tx1 /dev/urandom | tr -d ' \n')"
  mv -T "$new" "$folder"
}
clean_up() {
  stop_ray
  [[ -z "$folder" ]] || rm -rf "$folder"
}
trap clean_up EXIT
trap 'exit 143' TERM
trap 'exit 130' INT
trap 'exit 129' HUP

if ((NODE_RANK >= TRAINER_NODES)); then
  # Rollout node: serves the head node's Ray while it runs, and the next one if Ray returns.
  # Remove the files of killed engines, which otherwise only the next engine would remove.
  trap 'clean_up; python -m megatron_async_rl.watchdog.run_folder || true' EXIT
  python -m megatron_async_rl.watchdog.run_folder || true
  make_folder
  within=$START_S found="" lost=0 address="" noted=""
  while :; do
    until=$((SECONDS + within))
    # Use the numeric address: Ray queries a name server even if /etc/hosts has the name, and a starting machine may not have its name yet.
    until read -r address _ < <(getent ahostsv4 "$MASTER_ADDR") && reachable "$address"; do
      if ((SECONDS >= until)); then
        if [[ -n "$found" ]]; then
          echo "torchrun_multinode.sh: machine 0's Ray has ended, and with it the work of machine $NODE_RANK"
          exit 0
        fi
        [[ -n "$address" ]] || refuse "MASTER_ADDR=$MASTER_ADDR is not a known host name on machine $NODE_RANK, after START_S=$START_S s"
        refuse "no Ray at MASTER_ADDR:RAY_PORT=$MASTER_ADDR:$RAY_PORT after START_S=$START_S s; is machine 0 started, and the port open?"
      fi
      if [[ -z "$noted$found" ]]; then
        noted=1 missing="the host name $MASTER_ADDR is not known yet"
        [[ -z "$address" ]] || missing="no Ray yet at $address:$RAY_PORT"
        echo "torchrun_multinode.sh: machine $NODE_RANK waits for machine 0, up to START_S=$START_S s: $missing"
      fi
      sleep 1
    done
    if [[ -n "$found" ]]; then
      # Ray has ended here. The head node has one: the same, which lost this machine, or the next.
      ((lost++ < RESTARTS)) || { echo "torchrun_multinode.sh: Ray has ended $lost times on machine $NODE_RANK, and not on machine 0 (RESTARTS=$RESTARTS); its messages are above" >&2; exit 1; }
      echo "torchrun_multinode.sh: machine $NODE_RANK joins machine 0's Ray again ($lost of RESTARTS=$RESTARTS)" >&2
    fi
    setsid ray start --address="$address:$RAY_PORT" --temp-dir="$folder/ray" --disable-usage-stats --block &
    ray=($!)
    # Otherwise Ray would search for the head node for another minute and end with hundreds of log lines.
    for ((refused = 0; refused < 5;)); do
      ray_runs || break
      if over "$address"; then ((++refused)); else refused=0; fi
      sleep 1
    done
    {
      kill -KILL "${ray[0]}" || true # the engines end, too; leave a moment for the removal of their shared memory
      wait "${ray[0]}" || true
      sleep 2
      kill -KILL -- "-${ray[0]}" || true
    } 2>/dev/null
    ray=()
    found=1 within=$REJOIN_S
  done
fi

engines=$((NNODES - TRAINER_NODES)) wait_for_engines=""
start_ray() {
  ! reachable 127.0.0.1 || refuse "RAY_PORT=$RAY_PORT is already in use on this machine: name a free port, the same on all machines"
  [[ -n "$folder" ]] || make_folder
  # The run does not use Ray's autoscaler monitor, which serves metrics on port 44217 without the token.
  setsid ray start --head --port="$RAY_PORT" --no-monitor --temp-dir="$folder/ray" \
    --include-dashboard=false --disable-usage-stats --block &
  ray=($!)
  local until=$((SECONDS + START_S))
  until reachable 127.0.0.1; do
    ray_runs || refuse "Ray does not start on port RAY_PORT=$RAY_PORT; its messages are above"
    ((SECONDS < until)) || refuse "Ray does not listen on port RAY_PORT=$RAY_PORT after START_S=$START_S s"
    sleep 1
  done
  export RAY_ADDRESS="127.0.0.1:$RAY_PORT"
  # Only once: losing a machine later costs its engines, but must not delay a later start.
  wait_for_engines=1
}

stopping="" passed="" child=""
stop() { # SIGNAL: the run stops after the step, with a checkpoint
  stopping="$1" passed=""
  [[ -z "$child" ]] || { passed=1; kill "-$1" "$child" 2>/dev/null || true; }
}
train() {
  local code=0
  if ((TRAINER_NODES > 1)); then
    set -- "$@" --nnodes "$TRAINER_NODES" --node-rank "$NODE_RANK" --rdzv-endpoint "$MASTER_ADDR:$MASTER_PORT"
  fi
  if [[ -n "$wait_for_engines" ]]; then
    set -- "$@" --engine-nodes "$engines"
  fi
  wait_for_engines=""
  setsid mar train "$@" &
  child=$!
  [[ -z "$stopping" || -n "$passed" ]] || stop "$stopping" # the signal came before the run had started
  while :; do
    passed="" code=0
    wait "$child" || code=$?
    [[ -n "$passed" ]] || break # otherwise the signal ended the wait, not the run
  done
  child=""
  return "$code"
}

for ((start = 0; ; start++)); do
  if ((NODE_RANK == 0 && engines > 0)) && ! ray_runs; then start_ray; fi
  [[ -z "$stopping" ]] || exit 130
  trap 'stop TERM' TERM INT
  trap 'stop HUP' HUP # only the first signal counts
  code=0
  train "$@" || code=$?
  # Restart only a failure (1), not 0 (finished), 2 (would be refused again) or 130 (stopped).
  ((code == 1)) && [[ -z "$stopping" ]] || exit "$code"
  ((start < RESTARTS)) || { echo "torchrun_multinode.sh: failed $((RESTARTS + 1)) times; RESTARTS=$RESTARTS" >&2; exit 1; }
  echo "torchrun_multinode.sh: machine $NODE_RANK starts the run again from its last checkpoint ($((start + 1)) of RESTARTS=$RESTARTS)" >&2
done
