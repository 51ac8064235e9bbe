"""What the user asks for, as frozen dataclasses that check their values when they are made.

Every field is a key of the configuration (`train.lr` is `RunSpec.train.lr`); the text below a field is what
`ddp-hpc config` prints about it. Values that follow from others are properties.
"""

from ddp_hpc.run.spec.launch import (
    ContainerSpec,
    DebugSpec,
    LaunchSpec,
    NetworkSpec,
    NotifySpec,
    PreflightSpec,
    ResourcesSpec,
    RestartSpec,
    SlurmSpec,
    SnapshotSpec,
    StageSpec,
    TorchrunSpec,
)
from ddp_hpc.run.spec.run import RunSpec
from ddp_hpc.run.spec.script import Program, ScriptedSpec, ScriptSpec, program_of
from ddp_hpc.run.spec.training import (
    CheckpointSpec,
    DataSpec,
    EvalSpec,
    IntegritySpec,
    LogSpec,
    LrScheduleSpec,
    OnNonfinite,
    OptimizerSpec,
    ProfileSpec,
    RecipeSpec,
    TrainingSpec,
    TrainSpec,
)

__all__ = [
    "CheckpointSpec",
    "ContainerSpec",
    "DataSpec",
    "DebugSpec",
    "EvalSpec",
    "IntegritySpec",
    "LaunchSpec",
    "LogSpec",
    "LrScheduleSpec",
    "NetworkSpec",
    "NotifySpec",
    "OnNonfinite",
    "OptimizerSpec",
    "PreflightSpec",
    "ProfileSpec",
    "Program",
    "RecipeSpec",
    "ResourcesSpec",
    "RestartSpec",
    "RunSpec",
    "ScriptSpec",
    "ScriptedSpec",
    "SlurmSpec",
    "SnapshotSpec",
    "StageSpec",
    "TorchrunSpec",
    "TrainSpec",
    "TrainingSpec",
    "program_of",
]
