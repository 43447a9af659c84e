from .engine.setup import make_runner as make_runner, make_state as make_state
from .graphs.graphified import Graphified as Graphified
from .graphs.ladder import MODES as MODES
from .graphs.lower import Compiled as Compiled, Lowered as Lowered
from .pipelines.checker import check as check
from .pipelines.pipeline import Pipelined as Pipelined
from .pipelines.schedule import (
    Job as Job,
    decode_jobs as decode_jobs,
    make_programs as make_programs,
)
from .pipelines.session import Session as Session
from .pipelines.timing.cohorts import plan_cohorts as plan_cohorts
from .pipelines.timing.costs import Costs as Costs
from .pipelines.timing.simulate import simulate as simulate
from .pipelines.timing.timeline import (
    Timeline as Timeline,
    compare as compare,
    make_timeline as make_timeline,
    measure as measure,
)
from .pipelines.transports import Transport as Transport
from .pipelines.transports.distributed import Distributed as Distributed
from .pipelines.transports.launch import launch as launch
from .pipelines.transports.local import Local as Local
from .pipelines.transports.threads import Threads as Threads
from .pipelines.weaving import interleaved as interleaved, weave as weave
from .shards.shard import Sharded as Sharded
from .transform import Transform as Transform, lift as lift
