#!/usr/bin/env bash
# Everything worth knowing on a machine with one GPU: bash benchmarks/gpu.sh OUT_DIR
#
# A call ends within ten minutes. Parts for which no time is left are named, and the same command goes on with them: two
# calls are enough. Each part leaves OUT_DIR/PART.json and PART.log; a part whose JSON is there is not measured again. A
# part that fails is named and the others go on; its figures so far are kept in PART.part. The exit status is 1 when a
# part failed, 3 when parts are left. The table is printed and left in OUT_DIR/summary.txt. After each part, everything
# is in one archive, OUT_DIR.tgz. An OUT_DIR that is new begins with that archive, where one is there: so a second call
# goes on with the first one's parts on another machine, too. A part that failed in an earlier call is tried again after
# all others. Nothing is fetched from a network.
#
#   PYTHON=python3.12      interpreter, 3.11 or newer, with torch
#   WHEELS=DIR             wheels of what is missing, installed beside them in DIR/site-VERSION; torch stays as it is
#   PARTS="learner pong"   only these parts: machine smoke tests ceilings profile learner learner-gpu gather actor-cpu
#                          actor-cuda cores served served-gpu together-cpu together-cuda together-mps pong
#   ARCHIVE=FILE.tgz       another place for the archive
#   RUN_FLAGS="..."        more flags for the runs of the whole system, PONG_FLAGS for that to a return of 18 alone;
#                          "--memory-gb 100" where the machine's memory grows when it is used
#   LEARNER_SECONDS, ACTOR_SECONDS, SERVED_SECONDS, TOGETHER_SECONDS, PONG_SECONDS, TOTAL_SECONDS   shorter or longer
#   KEEP_GOING=1           measures the rest where the smoke part failed, too
#   SLACK_SECONDS=60       longer limits for all parts, on a slow machine
#   LEARNER_BATCHES="512", LEARNER_TRANSITIONS=256000   other batch sizes, another fill of the unroll store
#   APEXRL_GPU_DEVICE=cpu  tries the script without a GPU; its figures are then worth nothing
set -uo pipefail
[ $# -eq 1 ] || { echo "usage: bash benchmarks/gpu.sh OUT_DIR" >&2; exit 2; }
mkdir -p "$1" || exit 2
out=$(cd "$1" && pwd)
archive=$(realpath -m "${ARCHIVE:-$out.tgz}")
[[ "$archive" != "$out"/* ]] || { echo "ARCHIVE $archive lies in what it is to hold: give another" >&2; exit 2; }
if [ -z "$(ls -A "$out")" ] && [ -s "$archive" ]; then
  tar xzf "$archive" -C "$out" || exit 2
fi
[ -z "${WHEELS:-}" ] || WHEELS=$(cd "$WHEELS" && pwd) || exit 2
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 2

python=${PYTHON:-python3}
device=${APEXRL_GPU_DEVICE:-cuda}
learner_seconds=${LEARNER_SECONDS:-2}
actor_seconds=${ACTOR_SECONDS:-5}
served_seconds=${SERVED_SECONDS:-50}
together_seconds=${TOGETHER_SECONDS:-60} # a start takes half of it
pong_seconds=${PONG_SECONDS:-140}
slack_seconds=${SLACK_SECONDS:-0}
total_seconds=${TOTAL_SECONDS:-570} # nothing is begun that might end later
transitions=${LEARNER_TRANSITIONS:-256000}
read -ra batches <<<"${LEARNER_BATCHES:-512}"
read -ra run_flags <<<"${RUN_FLAGS:-}"
# The preset of a machine with a GPU: with the paper's, the target network is copied twice in these seconds.
read -ra pong_flags <<<"${PONG_FLAGS:---preset gpu}"
export OMP_WAIT_POLICY=passive PYTHONUNBUFFERED=1
failed=() failed_before=() left=() turn="" child="" mps="" monitor=""

stop_mps() {
  [ -n "$mps" ] || return 0
  echo quit | timeout 10 nvidia-cuda-mps-control >/dev/null 2>&1
  cat "$mps"/*.log >>"$out/mps.log" 2>/dev/null
  rm -rf "$mps"
  mps=""
}

interrupted() {
  echo "interrupted: run the same command again to go on"
  [ -z "$child" ] || { kill -TERM "$child" 2>/dev/null; wait "$child"; }
  stop_monitor
  pack # with the figures so far of the part that was interrupted
  exit 130
}
trap interrupted INT TERM
trap 'stop_monitor; stop_mps' EXIT

# The load of the GPU beside a run, second by second.
start_monitor() {
  command -v nvidia-smi >/dev/null || return 0
  nvidia-smi dmon -s pucm -o T >"$out/$1.dmon" 2>&1 &
  monitor=$!
}

stop_monitor() {
  [ -n "$monitor" ] || return 0
  kill "$monitor" 2>/dev/null
  wait "$monitor" 2>/dev/null
  monitor=""
}

is_wanted() {
  [ -z "${PARTS:-}" ] || [[ " $PARTS " == *" $1 "* ]]
}

# Parts that failed in an earlier call have the second turn.
is_due() {
  local own=first
  [[ " ${failed_before[*]-} " != *" $1 "* ]] || own=second
  is_wanted "$1" && [ ! -s "$out/$1.json" ] && { [ -z "$turn" ] || [ "$turn" = "$own" ]; }
}

pack() {
  tar czf "$archive.part" --exclude=frames -C "$out" . && mv "$archive.part" "$archive"
}

# part NAME SECONDS COMMAND...: the command writes OUT_DIR/NAME.part, which becomes its JSON when it succeeds.
part() {
  local name=$1 limit=$(($2 + slack_seconds)) status
  shift 2
  is_due "$name" || return
  if [ $((SECONDS + limit)) -gt "$total_seconds" ]; then
    left+=("$name")
    return
  fi
  echo "$name: at most $limit s"
  rm -f "$out/$name.part" "$out/$name.failed"
  timeout --kill-after=10 "$limit" "$@" >"$out/$name.log" 2>&1 &
  child=$!
  wait "$child"
  status=$?
  child=""
  if [ "$status" -eq 0 ] && [ -s "$out/$name.part" ]; then
    mv "$out/$name.part" "$out/$name.json"
    pack
    return
  fi
  [ "$status" -ne 124 ] || status="124 (it took more than $limit s)"
  echo "FAILED: $name: status $status; the end of $out/$name.log:"
  tail -n 15 "$out/$name.log" | sed 's/^/    /'
  failed+=("$name")
  touch "$out/$name.failed"
  pack
}

# run NAME SECONDS FLAGS...: the whole system as run.sh starts it, with the paper's preset unless RUN_FLAGS say otherwise.
run() {
  local name=$1 seconds=$2
  shift 2
  is_due "$name" || return
  start_monitor "$name"
  part "$name" $((seconds + 14)) "$python" -m benchmarks.gpu_run --json "$out/$name.part" --keep "$out/$name.run" \
    --seconds "$seconds" "${ending[@]}" -- --env PongNoFrameskip-v4 --preset paper --device "$device" "${run_flags[@]}" "$@"
  stop_monitor
}

# with_mps NAME ...: as run does, while CUDA's multi-process service shares the GPU, where that is installed.
with_mps() {
  is_due "$1" || return
  if ! command -v nvidia-cuda-mps-control >/dev/null; then
    echo "$1: skipped, there is no nvidia-cuda-mps-control here"
    return
  fi
  mps=$(mktemp -d /tmp/mps-XXXXXX)
  export CUDA_MPS_PIPE_DIRECTORY=$mps CUDA_MPS_LOG_DIRECTORY=$mps
  if timeout 10 nvidia-cuda-mps-control -d; then
    run "$@" --actor-device "$device"
  else
    echo "FAILED: $1: nvidia-cuda-mps-control does not start"
    failed+=("$1")
  fi
  stop_mps
  unset CUDA_MPS_PIPE_DIRECTORY CUDA_MPS_LOG_DIRECTORY
}

# All packages are here, or brought as wheels.
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "$python: Python 3.11 or newer is needed: PYTHON=..." >&2; exit 2; }
if [ -n "${WHEELS:-}" ]; then
  site=$WHEELS/site-$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
  export PYTHONPATH=$site${PYTHONPATH:+:$PYTHONPATH}
  mapfile -t wheels < <("$python" benchmarks/gpu_report.py wanted "$WHEELS")
  if [ -n "${wheels[0]:-}" ]; then
    echo "installing ${#wheels[@]} wheels into $site"
    "$python" -m pip install --quiet --no-index --no-deps --disable-pip-version-check --target "$site" "${wheels[@]}" || exit 2
  fi
fi
missing=$("$python" benchmarks/gpu_report.py missing)
if [ -n "$missing" ]; then
  cat >&2 <<END
$python lacks:
$missing
Where there is a network, put these lines into missing.txt and fetch their wheels and those of what they need:
  python3 -m pip download --only-binary :all: --dest wheels --requirement missing.txt \\
    --python-version $("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])') --platform manylinux_2_28_x86_64 --platform manylinux2014_x86_64
and here: WHEELS=wheels bash benchmarks/gpu.sh $1
END
  exit 2
fi
if [ "$device" = cuda ] && ! "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
  echo "torch finds no GPU here; APEXRL_GPU_DEVICE=cpu tries the script without one" >&2
  exit 2
fi

learner=("$python" -m benchmarks.learner --device "$device" --repeats 1 --steps 1000
  --transitions "$transitions" --seconds "$learner_seconds" --directory "$out/frames")
actor=("$python" -m benchmarks.actor --games Pong --systems paper --repeats 1 --seconds "$actor_seconds")
probe=("$python" -m benchmarks.gpu_probe --device "$device")
tests=()
mapfile -t tests < <(grep -rlF 'tests.devices' tests --include='test_*.py')

for file in "$out"/*.json; do
  [ ! -e "$file" ] || echo "$(basename "$file" .json): is there"
done
for file in "$out"/*.failed; do
  [ ! -e "$file" ] || failed_before+=("$(basename "$file" .failed)")
done

# shellcheck disable=SC2016 # expanded by the inner shell
part machine 40 bash -c 'lscpu; free -g; nvidia-smi; "$1" benchmarks/gpu_report.py machine "$2"' \
  machine "$python" "$out/machine.part"
part smoke 60 "${probe[@]}" smoke --json "$out/smoke.part"
if [[ " ${failed[*]-} " == *" smoke "* ]] && [ -z "${KEEP_GOING:-}" ]; then
  echo "where the smoke part fails, no speed means anything: everything is in $archive; KEEP_GOING=1 measures the rest"
  exit 1
fi

measure() {
  # Without the project's pytest settings: they name plugins that need not be here.
  # shellcheck disable=SC2016 # expanded by the inner shell
  part tests 120 bash -c '"$1" -m pytest -v -c /dev/null --rootdir . -p no:cacheprovider -m gpu \
    --junitxml "$2/tests.xml" "${@:3}"; "$1" benchmarks/gpu_report.py tests "$2/tests.xml" "$2/tests.part"' \
    tests "$python" "$out" "${tests[@]}"
  part ceilings 40 "${probe[@]}" ceilings --json "$out/ceilings.part"
  part profile 150 "${probe[@]}" profile --json "$out/profile.part"
  part learner 120 "${learner[@]}" --presets paper --batch-sizes "${batches[@]}" --kinds ours ours-eager eager \
    --json "$out/learner.part"
  part learner-gpu 60 "${learner[@]}" --presets gpu --batch-sizes 64 --kinds ours eager --json "$out/learner-gpu.part"
  part gather 40 "${learner[@]}" --batch-sizes "${batches[@]}" --kinds gather --json "$out/gather.part"
  part actor-cpu 50 "${actor[@]}" --device cpu --json "$out/actor-cpu.part"
  part actor-cuda 50 "${actor[@]}" --device "$device" --json "$out/actor-cuda.part"
  part cores 40 "${probe[@]}" cores --json "$out/cores.part"

  ending=() # by time
  served=("$served_seconds" --no-evaluator --samples-per-insert 0 --num-workers 2 --actor-device cpu
    --min-size-to-sample 5000) # soon there, so that most of the seconds count
  run served "${served[@]}"
  run served-gpu "${served[@]}" --preset gpu
  run together-cpu "$together_seconds" --no-evaluator --samples-per-insert 0 --actor-device cpu
  run together-cuda "$together_seconds" --no-evaluator --samples-per-insert 0 --actor-device "$device"
  with_mps together-mps "$together_seconds" --no-evaluator --samples-per-insert 0
  ending=(--until 18)
  pong=(pong "$pong_seconds" --evaluation-period-seconds 1 "${pong_flags[@]}")
  case $("$python" benchmarks/gpu_report.py faster "$out") in
    mps) with_mps "${pong[@]}" ;;
    cuda) run "${pong[@]}" --actor-device "$device" ;;
    *) run "${pong[@]}" --actor-device cpu ;;
  esac
}

for turn in first second; do measure; done

APEXRL_GPU_DEVICE=$device "$python" benchmarks/gpu_report.py summary "$out" | tee "$out/summary.txt" || failed+=(summary)
[ ${#left[@]} -eq 0 ] || echo "LEFT: ${left[*]}: run the same command again" | tee -a "$out/summary.txt"
[ ${#failed[@]} -eq 0 ] || echo "FAILED: ${failed[*]}" | tee -a "$out/summary.txt"
pack
echo "everything is in $archive"
[ ${#failed[@]} -eq 0 ] || exit 1
[ ${#left[@]} -eq 0 ] || exit 3
