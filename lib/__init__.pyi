from . import (
    effects as effects,
    errors as errors,
    proofs as proofs,
    stages as stages,
    transforms as transforms,
)
from .batches.batch import Batch as Batch
from .batches.descriptor import BatchDescriptor as BatchDescriptor, Descriptor as Descriptor
from .batches.outputs import IntermediateTensors as IntermediateTensors, Output as Output
from .batches.padding import inert as inert, pad as pad, unpad as unpad
from .batches.sampling import SamplingParams as SamplingParams
from .batches.state import State as State, admit as admit, advance as advance
from .errors import WeftError as WeftError
from .meshes.distribute import distribute as distribute
from .meshes.mesh import Mesh as Mesh
from .meshes.placements import (
    Partial as Partial,
    PerRank as PerRank,
    Placements as Placements,
    Replicate as Replicate,
    Shard as Shard,
)
from .ops.requests import DRAFT as DRAFT, EMBEDDED as EMBEDDED, LAST_TOKEN as LAST_TOKEN
from .ops.transfers.collective import (
    all_gather as all_gather,
    all_reduce as all_reduce,
    all_to_all as all_to_all,
    axis_index as axis_index,
    axis_size as axis_size,
    ppermute as ppermute,
    reduce_scatter as reduce_scatter,
)
from .settings import (
    assert_max_captures as assert_max_captures,
    batch_invariant as batch_invariant,
    config as config,
    no_capture as no_capture,
)
from .stages.adapters.adapter import load_adapter as load_adapter
from .stages.checkpoints.loading import load as load
from .stages.model import Model as Model
from .transforms.engine.engine import Engine as Engine
from .transforms.engine.evaluation.certificates import Certificate as Certificate
from .transforms.engine.evaluation.verification import verify as verify
from .transforms.engine.generate import Completion as Completion, generate as generate
from .transforms.engine.logprobs import logprobs as logprobs
from .transforms.engine.options import EngineLimits as EngineLimits, Speculation as Speculation
from .transforms.engine.outputs import RequestOutput as RequestOutput
from .transforms.engine.requests.prompts import EmbedsPrompt as EmbedsPrompt
from .transforms.graphs.calls.borrowing import check_borrowed as check_borrowed
from .transforms.graphs.dispatch import dispatch as dispatch, dispatch_table as dispatch_table
from .transforms.graphs.graphified import clear_caches as clear_caches
from .transforms.graphs.graphify import graphify as graphify, piecewise as piecewise
from .transforms.graphs.ladder import Ladder as Ladder, Limits as Limits, make_ladder as make_ladder
from .transforms.graphs.while_loop import while_loop as while_loop
from .transforms.pipelines.microbatch import microbatch as microbatch, scan as scan
from .transforms.pipelines.pipeline import compose as compose, pipeline as pipeline
from .transforms.shards.shard import shard as shard
from .values.donation import clone as clone, donate as donate, donates as donates
from .values.schema import Schema as Schema
from .values.trees import (
    axes as axes,
    descriptor_field as descriptor_field,
    pytree as pytree,
    static as static,
)

__version__: str
