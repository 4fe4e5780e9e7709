#!/usr/bin/env bash
# A small byte-level LLaMA on the standard library's sources, on this machine.
#
#   DP=4 PP=2 ITERS=20 examples/tiny_llama.sh --ft-recover
#
# TP, PP, DP: parallel sizes; ITERS: iterations; RUN_DIR: run directory; NP: processes, if not one
# per slot. Further flags are passed on to pretrain_llama_ft.py: Megatron's own and --ft-*.
set -euo pipefail
cd "$(dirname "$0")/.."

TP=${TP:-1} PP=${PP:-2} DP=${DP:-2} ITERS=${ITERS:-30}
slots=$((TP * PP * DP))
processes=${NP:-$slots}
python=.venv/bin/python
[ -x "$python" ] || { echo "examples/tiny_llama.sh: no .venv here: run 'make env' first" >&2; exit 64; }

"$python" -c 'from megatron_ft.data import prepare_default; prepare_default("data")'

run_dir=()
[ -z "${RUN_DIR:-}" ] || run_dir=(--ft-run-dir "$RUN_DIR")
[ "$processes" = "$slots" ] || run_dir+=(--ft-world-size "$slots")

exec "$python" -m megatron_ft.launcher -n "$processes" pretrain_llama_ft.py \
    --tensor-model-parallel-size "$TP" --pipeline-model-parallel-size "$PP" \
    --num-layers 4 --hidden-size 64 --ffn-hidden-size 172 \
    --num-attention-heads 4 --group-query-attention --num-query-groups 2 \
    --seq-length 64 --max-position-embeddings 64 \
    --micro-batch-size 2 --global-batch-size $((8 * DP)) --train-iters "$ITERS" \
    --lr 2e-3 --min-lr 2e-4 --lr-decay-style cosine --lr-warmup-iters 2 --clip-grad 1.0 \
    --overlap-grad-reduce --ddp-bucket-size 50000 \
    --data-path data/stdlib_byte_text_document --split 98,1,1 \
    --tokenizer-type NullTokenizer --vocab-size 257 \
    --eval-iters 4 --eval-interval 1000 --log-interval 1 --seed 1234 \
    "${run_dir[@]}" "$@"
