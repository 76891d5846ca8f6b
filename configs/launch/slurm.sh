#!/usr/bin/env bash
# Train on several nodes under SLURM:
#
#     sbatch configs/launch/slurm.sh
#
# Before the time limit SLURM signals this script; the run then saves its step, exits, and is queued again, and the next
# job continues from there. SLURM also queues the job again if a node fails (--requeue).
#SBATCH --job-name=clipkit
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=96
#SBATCH --time=24:00:00
#SBATCH --signal=B:USR1@660
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=clipkit-%j.log
set -euo pipefail

# What to train, and where files are: change these, or set them with sbatch --export=ALL,NAME=VALUE.
REPOSITORY=${REPOSITORY:-$HOME/clipkit}           # on a filesystem that all nodes share
ENVIRONMENT=${ENVIRONMENT:-$REPOSITORY/.venv}     # the virtual environment
CONFIG=${CONFIG:-configs/vit_b_32.toml}
DATA=${DATA:-'/data/pairs/{00000..41455}.tar'}
OUT=${OUT:-$REPOSITORY/runs/${SLURM_JOB_NAME:-clipkit}}  # an existing run is continued
PORT=${PORT:-29500}
SETTINGS=${SETTINGS:-}                            # further settings, such as "data.groups=64 steps=200000"
CACHE=${CACHE:-${TMPDIR:-/tmp}/clipkit-$(id -un)}  # on each node's own disk: downloaded shards
INDEX_CACHE=${INDEX_CACHE:-$REPOSITORY/cache}     # shared by all nodes: indexes of shards
GPUS=${SLURM_GPUS_ON_NODE:-8}
WORKERS=${WORKERS:-$((${SLURM_CPUS_ON_NODE:-96} / GPUS - 1))}  # loader processes per GPU; 1 core is for the rank
# INTERFACE=ib0                                   # if nodes have several networks: the one that ranks talk over

cd "$REPOSITORY"
export PATH="$ENVIRONMENT/bin:$PATH"
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-4}
if [[ -n ${INTERFACE:-} ]]; then
    export NCCL_SOCKET_IFNAME=$INTERFACE GLOO_SOCKET_IFNAME=$INTERFACE
fi
export CLIPKIT_CACHE=$CACHE CLIPKIT_INDEX_CACHE=$INDEX_CACHE
# Captions have other lengths in each step: memory is reused better.
export PYTORCH_ALLOC_CONF=${PYTORCH_ALLOC_CONF:-expandable_segments:True}
# Where ranks write what they were waiting for if a collective times out.
mkdir -p "$INDEX_CACHE/traces"
export TORCH_FR_DUMP_TEMP_FILE=$INDEX_CACHE/traces/${SLURM_JOB_ID}_rank_
# Seconds that torchrun gives its ranks to save after SIGTERM before it kills them; its default is 30. They may have to
# finish one checkpoint and write another. A rank that waits for a dead one ends after 20 s.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=600
# Needed for a restarted torchrun to find the ranks of the others (torch 2.15).
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1

first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
read -r -a settings <<<"$SETTINGS"
[[ $SETTINGS == *data.workers=* ]] || settings+=("data.workers=$WORKERS")
binding=()
if command -v numactl >/dev/null; then
    binding=(--numa-binding node) # each rank and its loader run on the cores next to its GPU
fi
command=(
    torchrun
    --nnodes "$SLURM_JOB_NUM_NODES"
    --nproc-per-node "$GPUS"
    --max-restarts 3
    --rdzv-backend c10d
    --rdzv-id "$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}"
    --rdzv-endpoint "$first:$PORT"
    ${binding[@]+"${binding[@]}"}
    train.py "$CONFIG" "data.train=$DATA" "out=$OUT" ${settings[@]+"${settings[@]}"}
)
echo "$(date --iso-8601=seconds) ${command[*]}"

time_is_over=
# shellcheck disable=SC2317 # the trap calls it
stop() {
    time_is_over=yes
    kill -TERM "$step" 2>/dev/null || true # srun passes it on to every torchrun, which passes it on to its ranks
}
trap stop USR1 TERM

srun --kill-on-bad-exit=1 "${command[@]}" &
step=$!
status=0
wait "$step" || status=$?
while kill -0 "$step" 2>/dev/null; do # a signal ends `wait`, not the step
    status=0
    wait "$step" || status=$?
done

if [[ -n $time_is_over ]]; then
    echo "$(date --iso-8601=seconds) the time is over: the run is queued again"
    scontrol requeue "$SLURM_JOB_ID"
    exit 0
fi
exit "$status"
