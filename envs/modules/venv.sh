#!/usr/bin/env bash
# A virtual environment made with a module's Python needs that module in the job too: its interpreter is a link to it.
module purge
module load python/3.11 || exit # as when `python -m venv` was run
# PyTorch's wheels bring CUDA, cuDNN and NCCL: a cuda module would only put others before them.
unset LD_LIBRARY_PATH
