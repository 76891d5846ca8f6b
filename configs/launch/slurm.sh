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
#SBATCH --signal=B:USR1@180
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
# INTERFACE=ib0                                   # if nodes have several networks: the one that ranks talk over

cd "$REPOSITORY"
export PATH="$ENVIRONMENT/bin:$PATH"
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-4}
if [[ -n ${INTERFACE:-} ]]; then
    export NCCL_SOCKET_IFNAME=$INTERFACE GLOO_SOCKET_IFNAME=$INTERFACE
fi
# Seconds that torchrun gives its ranks to save after SIGTERM before it kills them; its default is 30.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=150
# Needed for a restarted torchrun to find the ranks of the others (torch 2.15).
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1

first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
read -r -a settings <<<"$SETTINGS"
command=(
    torchrun
    --nnodes "$SLURM_JOB_NUM_NODES"
    --nproc-per-node "${SLURM_GPUS_ON_NODE:-8}"
    --max-restarts 3
    --rdzv-backend c10d
    --rdzv-id "$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}"
    --rdzv-endpoint "$first:$PORT"
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
