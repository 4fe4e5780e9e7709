#!/usr/bin/env bash
# The strategies in one job: four processes on this machine (pipeline 2 x data 2), three are killed.
#
#   examples/all_strategies.sh
#
# 1. In iteration 5 a process dies. Its replica goes dark, the other one computes its microbatches
#    (ReCoVer), and a new process is started; when it has built its stage, the replica is filled.
# 2. In iteration 30 a stage dies in both replicas. Nobody holds it any more: it is rebuilt from its
#    neighbour (CheckFree+) in a new process, training goes on with one replica, and the other is
#    filled from there when a second process is there.
#
# RUN_DIR: run directory (default runs/all-strategies-<timestamp>-<pid>). Further flags are passed
# on. The last line is "all strategies: ok" if all went as it should. About two minutes on two cores.
set -euo pipefail
cd "$(dirname "$0")/.."

PYTHON=.venv/bin/python
if ! [ -x $PYTHON ]; then
    echo "examples/all_strategies.sh: no .venv here: run 'make env' first" >&2
    exit 64
fi
RUN_DIR=${RUN_DIR:-runs/all-strategies-$(date +%Y%m%d-%H%M%S)-$$}
ITERS=60 DARK=5 LOST=30
LIMIT_S=900

# Slots of replica r: r in the first stage, 2 + r in the second. A newcomer imports and builds for
# some seconds; steps that sleep a little leave it the processor, and it the time, until then.
code=0
timeout --foreground $LIMIT_S env TP=1 PP=2 DP=2 ITERS=$ITERS RUN_DIR="$RUN_DIR" \
    examples/tiny_llama.sh --ft-recover --ft-checkfree-plus --ft-respawn \
    --ft-fault slow@4:slot=1:s=0.12:for=$((LOST - 4)) \
    --ft-fault slow@$((LOST + 1)):slot=0:s=0.12:for=$((ITERS - LOST - 1)) \
    --ft-fault kill@$DARK:slot=2 \
    --ft-fault kill@$LOST:slot=2 --ft-fault kill@$LOST:slot=3 "$@" 2>&1 |
    $PYTHON tools/show_run.py "$RUN_DIR.log" --every 10 || code=$?
if [ $code -ne 0 ]; then
    [ $code -ne 124 ] || echo "all strategies: no end after $LIMIT_S s" >&2
    echo "all strategies: failed, exit code $code. The whole output: $RUN_DIR.log" >&2
    exit 1
fi
echo
$PYTHON tools/report.py "$RUN_DIR"
$PYTHON tools/check_all_strategies.py "$RUN_DIR" --iters $ITERS --lost $LOST
echo "all strategies: ok"
