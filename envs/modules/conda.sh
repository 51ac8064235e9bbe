#!/usr/bin/env bash
# A conda environment. The job starts the very Python that submitted it, by its path; activating sets what its libraries read.
module purge
module load miniforge || exit
# shellcheck source=/dev/null
source "$(conda info --base)/etc/profile.d/conda.sh"
conda activate ddp_hpc || exit
