#!/usr/bin/env bash
# The strategies in one job: six processes on this machine (pipeline 3 x data 2), three are killed.
#
#   examples/all_strategies.sh
#
# 1. In iteration 5 a process dies between two steps. Its replica goes dark for the moment, and the
#    other one computes its microbatches (ReCoVer). Before the next step the process of the
#    neighbouring stage adopts the dead one's (MeCeFO) and the replica is back. When a new process has
#    been started and has built the stage, it fills the slot.
# 2. In iteration 30 a stage dies in both replicas. Nobody holds it any more: it is rebuilt from its
#    neighbours (CheckFree) in a new process, training goes on with one replica, and the other comes
#    back from there.
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

# Slots of replica r: r, 2 + r and 4 + r, stage by stage. A newcomer imports and builds for
# some seconds; steps that sleep a little leave it the processor, and it the time, until then.
code=0
timeout --foreground $LIMIT_S env TP=1 PP=3 DP=2 ITERS=$ITERS RUN_DIR="$RUN_DIR" \
    examples/tiny_llama.sh --num-layers 6 \
    --ft-recover --ft-mecefo --ft-checkfree --ft-respawn \
    --ft-fault slow@4:slot=0:s=0.2:for=$((LOST - 4)) \
    --ft-fault slow@$((LOST + 1)):slot=0:s=0.4:for=$((ITERS - LOST - 1)) \
    --ft-fault kill@$DARK:slot=3:point=optimizer \
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
