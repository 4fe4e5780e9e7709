#!/usr/bin/env bash
# LLaMA 7B on a GPU cluster under Slurm, training on when processes die.
#
#   DATA_PATH=/data/mine_text_document TOKENIZER_MODEL=/data/tokenizer.model \
#   CHECKPOINT_DIR=/checkpoints/llama-7b sbatch examples/llama_7b.sh
#
# Submit from the repository's folder, on a file system that all nodes share. One task a GPU, as
# many as TP x PP x DP. The CUDA path has not been run on a GPU yet: read docs/gpu.md first.
#
# Required:
#   DATA_PATH        prefix of Megatron's .bin and .idx (tools/preprocess_data.py makes them)
#   TOKENIZER_MODEL  LLaMA's tokenizer.model; another tokenizer: set TOKENIZER_TYPE too
#   CHECKPOINT_DIR   checkpoints go here, and training goes on from the last one in it
# Optional:
#   TP PP DP         tensor-, pipeline-, data-parallel sizes (4 4 2)
#   TOKENIZER_TYPE   Megatron's --tokenizer-type (Llama2Tokenizer)
#   FT_FLAGS         strategies (--ft-recover); empty for stock training
#   RUN_DIR          run directory (CHECKPOINT_DIR/run)
#   WANDB_PROJECT    log to wandb, under WANDB_NAME (llama-7b)
#   DRY_RUN=1        print the command and start nothing
# Further flags are passed on and win over those below.
#
#SBATCH --job-name=llama-7b
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --time=24:00:00
# To the launcher (B:), which passes it on; Megatron then saves and ends (--exit-signal-handler).
#SBATCH --signal=B:TERM@300
#SBATCH --output=llama-7b-%j.log
set -euo pipefail

fail() {
    printf 'examples/llama_7b.sh: %s\n' "$1" >&2
    exit 64
}

# Slurm runs a copy of this script from a folder of its own.
cd "${SLURM_SUBMIT_DIR:-$(dirname "$0")/..}"
[ -f pretrain_llama_ft.py ] || fail "$PWD is not the repository's folder: submit from there"
python=.venv/bin/python
[ -x $python ] || fail "no .venv in $PWD: run 'make env' there (a file system that all nodes share)"

[ -n "${DATA_PATH:-}" ] || fail "DATA_PATH is not set: the prefix of the .bin and .idx that \
tools/preprocess_data.py made, without .bin"
[ -n "${TOKENIZER_MODEL:-}" ] || fail "TOKENIZER_MODEL is not set: the tokenizer that made the data"
[ -n "${CHECKPOINT_DIR:-}" ] || fail "CHECKPOINT_DIR is not set: where checkpoints go"
dry_run=()
if [ "${DRY_RUN:-0}" = 1 ]; then
    dry_run=(--dry-run)
else
    for file in "$DATA_PATH.bin" "$DATA_PATH.idx" "$TOKENIZER_MODEL"; do
        [ -e "$file" ] || fail "no $file"
    done
fi

TP=${TP:-4} PP=${PP:-4} DP=${DP:-2}
slots=$((TP * PP * DP))
[ -z "${SLURM_NTASKS:-}" ] || [ "$SLURM_NTASKS" -eq $slots ] || fail "the allocation has \
$SLURM_NTASKS tasks, but TP x PP x DP = $TP x $PP x $DP = $slots: change --nodes and \
--ntasks-per-node, or the sizes"

optional=()
[ "$TP" -eq 1 ] || optional+=(--sequence-parallel)
[ -z "${WANDB_PROJECT:-}" ] ||
    optional+=(--wandb-project "$WANDB_PROJECT" --wandb-exp-name "${WANDB_NAME:-llama-7b}")
read -ra ft_flags <<<"${FT_FLAGS---ft-recover}"

# The launcher is called here and not by srun: ranks that srun starts have no fault tolerance.
exec $python -m megatron_ft.launcher "${dry_run[@]}" -n $slots --grace 270 pretrain_llama_ft.py \
    --tensor-model-parallel-size "$TP" --pipeline-model-parallel-size "$PP" \
    --num-layers 32 --hidden-size 4096 --ffn-hidden-size 11008 --num-attention-heads 32 \
    --seq-length 4096 --max-position-embeddings 4096 \
    --normalization RMSNorm --norm-epsilon 1e-5 --swiglu --disable-bias-linear \
    --position-embedding-type rope --rotary-base 10000 --untie-embeddings-and-output-weights \
    --attention-dropout 0 --hidden-dropout 0 --init-method-std 0.02 --bf16 \
    --vocab-size 32000 --make-vocab-size-divisible-by 1 \
    --tokenizer-type "${TOKENIZER_TYPE:-Llama2Tokenizer}" \
    --tokenizer-model "$TOKENIZER_MODEL" --data-path "$DATA_PATH" --split 990,9,1 \
    --micro-batch-size 1 --global-batch-size 1024 --train-iters 500000 \
    --lr 3e-4 --min-lr 3e-5 --lr-decay-style cosine --lr-warmup-iters 2000 \
    --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95 --clip-grad 1.0 \
    --overlap-grad-reduce --disable-gloo-process-groups --exit-signal-handler \
    --save "$CHECKPOINT_DIR" --load "$CHECKPOINT_DIR" --save-interval 500 \
    --log-interval 1 --eval-interval 1000 --eval-iters 10 --seed 1234 \
    --ft-run-dir "${RUN_DIR:-$CHECKPOINT_DIR/run}" \
    "${ft_flags[@]}" "${optional[@]}" "$@"
