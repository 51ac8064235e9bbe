"""What the user asks for, as frozen dataclasses that check their values when they are made.

Every field is a key of the configuration (`train.lr` is `RunSpec.train.lr`); the text below a field is what
`ddp-hpc config` prints about it. Values that follow from others are properties.
"""

from ddp_hpc.run.spec.launch import ContainerSpec as ContainerSpec
from ddp_hpc.run.spec.launch import DebugSpec as DebugSpec
from ddp_hpc.run.spec.launch import LaunchSpec as LaunchSpec
from ddp_hpc.run.spec.launch import NetworkSpec as NetworkSpec
from ddp_hpc.run.spec.launch import NotifySpec as NotifySpec
from ddp_hpc.run.spec.launch import PreflightSpec as PreflightSpec
from ddp_hpc.run.spec.launch import ResourcesSpec as ResourcesSpec
from ddp_hpc.run.spec.launch import RestartSpec as RestartSpec
from ddp_hpc.run.spec.launch import SlurmSpec as SlurmSpec
from ddp_hpc.run.spec.launch import SnapshotSpec as SnapshotSpec
from ddp_hpc.run.spec.launch import StageSpec as StageSpec
from ddp_hpc.run.spec.launch import TorchrunSpec as TorchrunSpec
from ddp_hpc.run.spec.run import RunSpec as RunSpec
from ddp_hpc.run.spec.script import Program as Program
from ddp_hpc.run.spec.script import ScriptSpec as ScriptSpec
from ddp_hpc.run.spec.script import parse_program as parse_program
from ddp_hpc.run.spec.training import CheckpointSpec as CheckpointSpec
from ddp_hpc.run.spec.training import DataSpec as DataSpec
from ddp_hpc.run.spec.training import EvalSpec as EvalSpec
from ddp_hpc.run.spec.training import IntegritySpec as IntegritySpec
from ddp_hpc.run.spec.training import LogSpec as LogSpec
from ddp_hpc.run.spec.training import LrScheduleSpec as LrScheduleSpec
from ddp_hpc.run.spec.training import OnNonfinite as OnNonfinite
from ddp_hpc.run.spec.training import OptimizerSpec as OptimizerSpec
from ddp_hpc.run.spec.training import ProfileSpec as ProfileSpec
from ddp_hpc.run.spec.training import RecipeSpec as RecipeSpec
from ddp_hpc.run.spec.training import TrainSpec as TrainSpec
