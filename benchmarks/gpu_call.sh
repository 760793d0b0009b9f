#!/bin/sh
# What one visit to a GPU runs: the parts named, one after another, each with a log; a table of what happened comes last.
#
#     sh benchmarks/gpu_call.sh smoke grid            tests: smoke grid options features extremes
#                                                   speed: speed paper64 paper128 suites step costs tangent sweep train tune
#                                                   on two GPUs: context scaling devices
#
# Logs and JSON go to $OUT, or to out/ where it is not set. WORKERS processes share the GPU in the tests (default: 12, or the
# number of cores less two where that is smaller). PYTHON is the interpreter (default: python3). Exits with 1 if a part failed.
set -u
for name in "$@"; do
    case $name in
    smoke | grid | options | features | extremes | speed | paper64 | paper128 | suites | step | costs | tangent | sweep | train | tune | context | scaling | devices) ;;
    *)
        echo "gpu_call.sh: there is no part '$name'" >&2
        exit 2
        ;;
    esac
done
cd "$(dirname "$0")/.." || exit 1
out=${OUT:-out}
python=${PYTHON:-python3}
mkdir -p "$out"
cores=$(getconf _NPROCESSORS_ONLN)
workers=${WORKERS:-$((cores > 14 ? 12 : cores > 3 ? cores - 2 : 2))}
export PYTHONUNBUFFERED=1 PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
summary=""
failed=0

# What the tests load is said here, not what else happens to be installed.
pytest="$python -m pytest -p xdist.plugin -m gpu -q --durations=8 --tb=short --maxfail=40"
export PYTEST_DISABLE_PLUGIN_AUTOLOAD=1

# The judges of the tests need no tuned matrix products, and searching for those takes most of their compile time.
quick="--xla_gpu_autotune_level=0 ${XLA_FLAGS:-}"

# part NAME SECONDS COMMAND: runs it under a time limit, with its output in NAME.log and on the terminal.
part() {
    name=$1 limit=$2
    shift 2
    begin=$(date +%s)
    {
        timeout -k 10 "$limit" sh -c "$*" 2>&1
        echo $? >"$out/$name.status"
    } | tee "$out/$name.log"
    status=$(cat "$out/$name.status")
    rm -f "$out/$name.status"
    [ "$status" -eq 0 ] || failed=1
    last=$(grep -v '^$' "$out/$name.log" | tail -n 1 | cut -c 1-90)
    summary="$summary
$(printf '%-10s status %-3s %4d s   %s' "$name" "$status" $(($(date +%s) - begin)) "$last")"
}

for name in "$@"; do
    case $name in
    smoke) # one case of each dtype, within seconds: is anything wrong with the machine or the kernels?
        part smoke 120 "XLA_FLAGS='$quick' $pytest -n 6 tests/gpu/test_tiles.py -k 'table and D64 or table and D128-bf16'"
        ;;
    grid) part grid 470 "XLA_FLAGS='$quick' $pytest -n $workers tests/gpu/test_grid.py" ;;
    options)
        part options 470 "XLA_FLAGS='$quick' $pytest -n $workers tests/gpu/test_options.py tests/gpu/test_tiles.py \
            tests/gpu/test_repeats.py tests/gpu/test_transforms.py"
        ;;
    features) part features 470 "XLA_FLAGS='$quick' $pytest -n $workers tests/gpu/test_features.py" ;;
    extremes) # large tensors in one process; beside it the others
        part extremes 470 "$pytest -n 4 tests/gpu/test_sanitizer.py tests/gpu/test_compiling.py & others=\$!
            XLA_FLAGS='$quick' $pytest tests/gpu/test_large.py; large=\$?
            wait \$others && exit \$large"
        ;;
    context) part context 300 "XLA_FLAGS='$quick' $pytest tests/gpu/test_context.py" ;;
    scaling) part scaling 300 "$python -m benchmarks.scaling --json '$out/scaling.json'" ;;
    devices) part devices 400 "$python -m benchmarks.train_devices --json '$out/devices.json'" ;;
    speed) part speed 400 "$python -m benchmarks.speed --suite headline --seconds 390 --json '$out/speed.json'" ;;
    paper64 | paper128) # half of the paper's grid each, as a call has time for no more beside that many others
        shapes=$(printf "d${name#paper}-T%s " 512 1k 2k 4k 8k 16k)
        part "$name" 470 "$python -m benchmarks.speed --shapes $shapes --passes forward forward+backward \
            --seconds 455 --json '$out/$name.json'"
        ;;
    suites) # decoding takes less time than the host needs to ask for it, so that GPU time alone says anything
        part suites 470 "$python -m benchmarks.speed --suite d256 gqa mla window packed bias f32 long \
            --seconds 370 --json '$out/suites.json'; others=\$?
            $python -m benchmarks.speed --suite decode --timer cupti --seconds 80 --json '$out/decode.json' && exit \$others"
        ;;
    step) part step 470 "$python -m benchmarks.train_step --seconds 400 --json '$out/step.json'" ;;
    costs) part costs 300 "$python -m benchmarks.features --json '$out/features.json'" ;;
    tangent) part tangent 300 "$python -m benchmarks.tangent --json '$out/tangent.json'" ;;
    sweep) part sweep 420 "$python -m benchmarks.sweep --seconds ${SWEEP_SECONDS:-330} --json '$out/sweep.json'" ;;
    tune) part tune 470 "$pytest tests/gpu/test_tune.py" ;;
    train) part train 470 "$python -m benchmarks.train_curves --json '$out/train.json'" ;;
    esac
done
nvidia-smi --query-gpu=name,driver_version,clocks.sm,temperature.gpu,memory.used --format=csv,noheader 2>/dev/null
echo "$summary"
exit $failed
