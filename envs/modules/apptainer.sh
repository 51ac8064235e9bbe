#!/usr/bin/env bash
# An image. Its layers and its temporary files are large: off the home directory, whose quota they fill.
module purge
module load apptainer || exit
export APPTAINER_CACHEDIR=${SCRATCH:?}/apptainer/cache APPTAINER_TMPDIR=${TMPDIR:-/tmp}
