#!/usr/bin/env bash
# Two short trainings on this machine: stock Megatron on eight processes, then one in which a
# process is killed in the middle of a step and training goes on. About two minutes on two cores.
#
#   make demo
#
# RUN_ROOT: folder for the run directories (default runs/demo-<timestamp>-<pid>); STOCK_ITERS and
# RECOVER_ITERS: lengths, 3 or more. The last line is "demo: ok" if all went as it should.
set -euo pipefail
cd "$(dirname "$0")/.."

PYTHON=.venv/bin/python
if ! [ -x $PYTHON ]; then
    echo "examples/demo.sh: no .venv here: run 'make demo', which makes it, or 'make env'" >&2
    exit 64
fi
RUN_ROOT=${RUN_ROOT:-runs/demo-$(date +%Y%m%d-%H%M%S)-$$}
STOCK_ITERS=${STOCK_ITERS:-5} RECOVER_ITERS=${RECOVER_ITERS:-150}
VICTIM=1
DEATH=$((RECOVER_ITERS / 2))
FAULT=kill@$DEATH:slot=$VICTIM:point=reduce:n=1
LIMIT_S=900

# train NAME EVERY COMMAND...: run, show every n-th step, keep the whole output in a file.
train() {
    local name=$1 every=$2 code=0
    shift 2
    timeout --foreground $LIMIT_S env RUN_DIR="$RUN_ROOT/$name" "$@" 2>&1 |
        $PYTHON tools/show_run.py "$RUN_ROOT/$name.log" --every "$every" || code=$?
    if [ $code -ne 0 ]; then
        [ $code -ne 124 ] || echo "demo: no end after $LIMIT_S s" >&2
        echo "demo: failed, exit code $code. The whole output: $RUN_ROOT/$name.log; its end:" >&2
        tail -n 15 "$RUN_ROOT/$name.log" >&2
        exit 1
    fi
}

cat <<END
--- 1 of 2: stock Megatron-Core on 8 processes: tensor 2 x pipeline 2 x data 2, no strategy on ---
A byte-level LLaMA (4 layers, 64 wide) learns Python's standard library. The start takes a while:
every process imports torch and Megatron. The 600 lines that Megatron prints go to
$RUN_ROOT/stock.log

END
train stock 1 TP=2 PP=2 DP=2 ITERS="$STOCK_ITERS" examples/tiny_llama.sh

cat <<END

--- 2 of 2: four replicas with --ft-recover; one process gets SIGKILL in iteration $DEATH ---
The fault: --ft-fault $FAULT
The process of slot $VICTIM dies when a part of its gradients is summed and the rest is not.
Its replica goes dark, the others compute its microbatches in that same step, and go on.
The whole output goes to $RUN_ROOT/recover.log

END
train recover 15 TP=1 PP=1 DP=4 ITERS="$RECOVER_ITERS" examples/tiny_llama.sh \
    --ft-recover --ft-fault "$FAULT"

echo
echo "--- what the second run came to ($RUN_ROOT/recover/summary.json) ---"
$PYTHON -m megatron_ft.observe.summary "$RUN_ROOT/recover"
echo
$PYTHON tools/check_demo.py "$RUN_ROOT" \
    --stock-iters "$STOCK_ITERS" --recover-iters "$RECOVER_ITERS"
echo "demo: ok"
