#!/usr/bin/env bash
# Train a model with a recipe: examples/recipes/run.sh NAME [dotted.key=value ...]
# Downloads model and data into models/ and data/ of the checkout, shows the plan, trains, writes the model as a Hugging Face
# directory, RUN/hf, and evaluates the last checkpoint. The same command resumes after an interruption.
# On several machines run the same command on each, with NNODES, TRAINER_NODES, NODE_RANK, MASTER_ADDR and RAY_AUTH_TOKEN
# as in launchers/torchrun_multinode.sh, in a shared checkout. Machine 0 downloads, converts and evaluates; the others wait
# for the model, at most FETCH_S seconds (7200).
set -euo pipefail
here="$(dirname "$(realpath "${BASH_SOURCE[0]}")")"
root="$(realpath "$here/../..")"
recipe="$here/${1:-}.yaml"
if [[ $# -eq 0 || ! -f "$recipe" ]]; then
  echo "run.sh: give one of these recipes:" "$(cd "$here" && printf '%s ' *.yaml | sed 's/\.yaml//g')" >&2
  exit 2
fi
shift
export NNODES="${NNODES:-1}" NODE_RANK="${NODE_RANK:-0}" MASTER_ADDR="${MASTER_ADDR:-127.0.0.1}"
venv="${VENV:-.venv}"
[[ "$venv" == /* ]] || venv="$root/$venv"
[[ ! -d "$venv/bin" ]] || PATH="$venv/bin:$PATH"
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}" # environments of recipes are in the checkout

value() { # KEY KEY: a path of the recipe
  python -c 'import sys, yaml, pathlib; f = pathlib.Path(sys.argv[1]); print((f.parent / yaml.safe_load(f.read_text())[sys.argv[2]][sys.argv[3]]).resolve())' "$recipe" "$1" "$2"
}
model="$(value model path)" run="$(value run dir)"
for override in "$@"; do
  case "$override" in
    run.dir=*) run="$(realpath -m "${override#run.dir=}")" ;;
    model.path=* | data.*=*) echo "run.sh: a recipe has its own model and data; mar train $recipe $override takes others" >&2; exit 2 ;;
  esac
done

if ((NODE_RANK == 0)); then
  python "$here/fetch.py" "$recipe"
  mar plan "$recipe" "$@" --nodes "$NNODES" --trainer-nodes "${TRAINER_NODES:-$NNODES}"
else
  until [[ -e "$model/.fetched" ]]; do
    ((SECONDS < ${FETCH_S:-7200})) || { echo "run.sh: machine 0 has not fetched $model within FETCH_S=${FETCH_S:-7200} s" >&2; exit 1; }
    sleep 1
  done
fi
"$root/launchers/torchrun_multinode.sh" "$recipe" "$@"
if ((NODE_RANK == 0)); then
  rm -rf "$run/hf"
  mar convert "$run/checkpoint" "$run/hf"
  mar eval "$run/checkpoint"
  echo "The trained model: $run/hf    (to serve it: vllm serve $run/hf)"
fi
